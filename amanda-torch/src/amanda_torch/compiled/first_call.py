"""The first call of compiled code with actions in it, which may fail where the program does not.

A compiler may make code that does not run, and the program has not asked for it. Therefore what the
first call has changed is put back if it fails, and the graph runs operator by operator instead::

    binding.function = FirstCall(code, function, graph, accept, refuse)

An error that this raises, too, is the program's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_torch import _internals
from amanda_torch.compiled.code import GraphCode
from amanda_torch.compiled.inlining import CompiledCode, notes_of
from amanda_torch.compiled.rehearsal import overlaps, writes_in


class Before:
    """What a call of a graph may change, before it: tensors, and generators of random numbers.

    Args:
        graph: its code.
        inputs: of the call.
    """

    def __init__(self, graph: GraphCode, inputs: Sequence[Any]) -> None:
        self._tensors = [x for x in (*inputs, *graph.held) if isinstance(x, torch.Tensor)]
        # Parameters may be large, and most graphs only read them.
        writes = writes_in(graph)
        self._versions = [
            None if x.is_inference() else _internals.version_of(x) for x in self._tensors
        ]
        self._copies = [
            x.detach().clone() if writes or x.is_inference() or not x.requires_grad else None
            for x in self._tensors
        ]
        devices = {x.device for x in self._tensors if x.device.type != "cpu"}
        self._generators = [
            (torch.get_rng_state, torch.set_rng_state),
            *map(_internals.random_state, devices),
        ]
        self._states = [get() for get, _ in self._generators]

    def restore(self) -> bool:
        """Put back what has changed since; whether that could be done."""
        for tensor, copy, version in zip(self._tensors, self._copies, self._versions, strict=True):
            if copy is None:
                if _internals.version_of(tensor) != version:
                    return False
            elif not torch.equal(tensor, copy):
                if overlaps(tensor):
                    return False
                with torch.no_grad(), _internals.keeps_version(tensor):
                    tensor.copy_(copy)
        for (_, put), state in zip(self._generators, self._states, strict=True):
            put(state)
        return True


class FirstCall:
    """Runs compiled code for the first time, in the place of what runs it later.

    Args:
        code: it.
        otherwise: runs the graph operator by operator.
        graph: the code of that.
        accept: called when the code has run.
        refuse: called with the reason when it has failed, and the graph has run.
    """

    def __init__(
        self,
        code: CompiledCode,
        otherwise: Callable[..., Any],
        graph: GraphCode,
        accept: Callable[[], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._code = code
        self._otherwise = otherwise
        self._graph = graph
        self._accept = accept
        self._refuse = refuse

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of the graph."""
        before = _internals.without_modes(Before, self._graph, inputs)
        try:
            result = self._code.run(inputs)
            self._accept()
            return result
        except Exception as error:
            # A routine that the code has called has ended the program, and is to do so.
            if notes_of(error) or not _internals.without_modes(before.restore):
                raise
            reason = f"its code fails with {type(error).__name__}"
        # Not within the handler: an error of the program's own has nothing before it.
        result = self._otherwise(*inputs)
        self._refuse(reason)
        return result
