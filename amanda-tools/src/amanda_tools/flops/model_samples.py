"""Counts the samples that a model is given: the first size of the outermost module's first input.

::

    samples = ModelSamples()
    samples.note(point)         # where a forward pass begins, in a graph where it ends
    samples.check(point)        # where it ends, of operators that run at once
    samples.figures()           # {"samples": 96}; {} where those of a pass are not known
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from amanda.interface.points import PointContext
from amanda_tools._values.shapes import batch_of, shape_of


class ModelSamples:
    """The samples and tokens of the forward passes so far; unknown as soon as those of one are.

    Several outermost modules that run between two readings, such as parts of one model, are given
    the same samples if their numbers agree. Those of modules without parameters, such as a loss,
    are none of the model.
    """

    def __init__(self) -> None:
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._since = 0
        # By what the ids of the module begin with: another module may get its ``id()``.
        self._passes: dict[str, tuple[int, int | None]] = {}
        self._given: dict[str, int] = {}
        # Whether the parts of a module have data with samples first, and whether one is recurrent.
        self._orders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def take(self) -> int:
        """Add the passes since the last call; return the most samples of one."""
        since, self._since = self._since, 0
        passes, self._passes = list(self._passes.values()), {}
        if self._samples is None or not passes:
            return since
        if len({samples for samples, _ in passes}) > 1:
            self._samples = self._tokens = None
            return 0
        self._samples += passes[0][0]
        tokens = {count for _, count in passes if count is not None}
        if self._tokens is not None:
            self._tokens = self._tokens + tokens.pop() if len(tokens) == 1 else None
        return since

    def note(self, point: PointContext) -> None:
        """Count a forward pass, where its inputs are known."""
        if self._samples is None or not _may_have_parameters(point.target):
            return
        known = ((tensor, _sizes(tensor)) for tensor in point.inputs)
        tensor, sizes = next((pair for pair in known if pair[1] != ()), (None, None))
        if not sizes or not self._has_batch_first(point.target, point.inputs):
            self._samples = self._tokens = None
            return
        self._given[point.id] = sizes[0]
        self._since = max(self._since, sizes[0])
        # Token ids are integers, which select rows of an embedding.
        dtype = str(getattr(tensor, "dtype", ""))
        is_tokens = (
            len(sizes) == 2 and "uint" not in dtype and ("int32" in dtype or "int64" in dtype)
        )
        samples, tokens = self._passes.get(point.id, (0, 0))
        if tokens is not None:
            tokens = tokens + sizes[0] * sizes[1] if is_tokens else None
        self._passes[point.id] = samples + sizes[0], tokens

    def check(self, point: PointContext) -> None:
        """Leave the figures out where a pass ends whose outputs are of another number of samples.

        Several rows of its input may be one sample, such as the nodes of a graph.
        """
        given = self._given.pop(point.id, 0)
        sizes = [size for tensor in point.outputs or () for size in _sizes(tensor) or ()]
        if given and sizes and all(size % given for size in sizes):
            self._samples = self._tokens = None

    def figures(self) -> Mapping[str, int]:
        """Return the numbers of ``samples`` and ``tokens`` so far, each if it is known."""
        named = {"samples": self._samples, "tokens": self._tokens}
        return {name: count for name, count in named.items() if count}

    def _has_batch_first(self, module: Any, inputs: Sequence[Any]) -> bool:
        """Return False for a module of PyTorch with a part whose data have positions first, as
        those of recurrent layers have in a packed sequence."""
        if not _is_of_torch(module):
            return True
        if module not in self._orders:
            parts = list(module.modules())
            has_batch_first = all(getattr(part, "batch_first", True) for part in parts)
            self._orders[module] = (
                has_batch_first,
                any(hasattr(part, "proj_size") for part in parts),
            )
        has_batch_first, is_recurrent = self._orders[module]
        return has_batch_first and not (is_recurrent and _is_packed(*inputs[:2]))


def _is_packed(data: Any, batch_sizes: Any = None) -> bool:
    """True if tensors may be those of a ``PackedSequence``: the second one adds up to the first."""
    if batch_sizes is None or batch_sizes.dim() != 1 or batch_sizes.device.type != "cpu":
        return False
    return (_sizes(data) or (0,))[0] == int(batch_sizes.sum())


def _is_of_torch(module: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(module, torch.nn.Module)


def _may_have_parameters(module: Any) -> bool:
    """Return False for a module of PyTorch without parameters."""
    return not _is_of_torch(module) or next(module.parameters(), None) is not None


def _sizes(tensor: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor, those of ``torch.vmap`` first; None if they are unknown, as of
    a nested tensor."""
    try:
        return (*batch_of([tensor]).values(), *shape_of(tensor))
    except (LookupError, RuntimeError, TypeError, ValueError):
        return None
