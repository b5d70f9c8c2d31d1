"""The state that a run of a graph may change, saved so that it can be restored.

A run is undone, and redone, like this::

    before = SavedState(code, inputs)
    run(inputs)
    if before.is_complete():
        redo = before.restore()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amanda_torch import _internals
from amanda_torch.compiled.code import GraphCode
from amanda_torch.operators.names import is_in_place, name_of


class SavedState:
    """The tensors of a graph, and the generators of random numbers, before a run.

    Args:
        code: code of the graph.
        inputs: inputs of the run.
    """

    def __init__(self, code: GraphCode, inputs: Sequence[Any]) -> None:
        self._tensors = [x for x in (*inputs, *code.held) if isinstance(x, torch.Tensor)]
        self._versions = [_version(tensor) for tensor in self._tensors]
        # Parameters may be large, and most graphs only read them.
        writes = _writes(code)
        self._copies = {
            number: _copied(tensor)
            for number, tensor in enumerate(self._tensors)
            if writes or tensor.is_inference() or not tensor.requires_grad
        }
        self._unused = _internals.unused_accelerator()
        devices = {x.device for x in self._tensors if x.device.type not in ("cpu", "meta")}
        devices |= _internals.accelerator_in_use()
        self._generators = [
            (torch.get_rng_state, torch.set_rng_state),
            *map(_internals.random_state, devices),
        ]
        self._states = [get() for get, _ in self._generators]

    def is_complete(self) -> bool:
        """True if all changes can be undone."""
        if self._unused != _internals.unused_accelerator():
            # The run has begun to use the generator, and may have drawn numbers.
            return False
        return all(n in self._copies and not _overlaps(self._tensors[n]) for n in self._changed())

    def restore(self) -> Callable[[], None]:
        """Undo all changes; return a function that applies them again, whatever has changed
        meanwhile."""
        changed = {number: _copied(self._tensors[number]) for number in self._changed()}
        versions = [_version(tensor) for tensor in self._tensors]
        states = [get() for get, _ in self._generators]
        self._put(self._copies, self._versions, self._states)
        after = {**self._copies, **changed}
        return lambda: self._put(after, versions, states)

    def _put(
        self,
        values: Mapping[int, torch.Tensor],
        versions: Sequence[int | None],
        states: Sequence[Any],
    ) -> None:
        for number, value in values.items():
            tensor, version = self._tensors[number], versions[number]
            # -0.0 equals 0.0: changes that the version counts are undone without a comparison.
            is_counted = version is None or _version(tensor) != version
            if is_counted or not torch.equal(tensor, value):
                _internals.without_gradients(tensor.copy_, value)
            if version is not None and _version(tensor) != version:
                _internals.set_version(tensor, version)
        for (_, put), state in zip(self._generators, states, strict=True):
            put(state)

    def _changed(self) -> Iterator[int]:
        for number, version in enumerate(self._versions):
            tensor, copy = self._tensors[number], self._copies.get(number)
            if version is None or _version(tensor) != version:
                yield number
            elif copy is not None and not torch.equal(tensor, copy):
                # Batch normalisation changes its statistics without a new version.
                yield number


def _writes(code: GraphCode) -> bool:
    """True if an operator of a graph may write into a parameter."""
    return any(
        site.function is not _internals.module_mark
        and is_in_place(name_of(site.function), site.keywords)
        for site in code.sites
    )


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else _internals.version_of(tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _overlaps(tensor: torch.Tensor) -> bool:
    """True if elements share memory, so that the tensor cannot be written."""
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sized)
