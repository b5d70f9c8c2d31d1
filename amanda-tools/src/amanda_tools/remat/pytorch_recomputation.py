"""Recomputation in PyTorch's backward pass; imported when the first operator of PyTorch comes.

Tensors that autograd saves are packed into handles (``torch.autograd.graph.saved_tensors_hooks``).
The handle of a recomputed operator holds no tensor but leads to the recorded run, which holds its
inputs in the same way. When the backward pass unpacks a handle, the runs that it leads to are run
again, with all state as it was, and autograd's own packing of the second run gives the tensors that
the first run packed, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from amanda.interface.calls import OpFunction
from amanda.state import Lock
from amanda_tools._internals import (
    has_saved_tensor_hooks,
    no_overrides,
    takes_saved_tensor_hooks,
    version_of,
)
from amanda_tools.remat import recorded_runs as runs


class Recomputer:
    """Replaces operators in the forward pass and runs them again in the backward pass.

    Args:
        recomputed: ids of the operators that are run again.
        drawing: ids of the recomputed operators that draw random numbers.
        changing: ids of operators that change results of those in place.
    """

    def __init__(
        self, recomputed: frozenset[str], drawing: frozenset[str], changing: frozenset[str]
    ) -> None:
        self._recomputed = recomputed
        self._drawing = drawing
        self._changing = changing
        self._lock = Lock()
        # Runs by the storages of living outputs. An entry lives as long as such a tensor, a handle,
        # or a run that reads it, and no longer than until the backward pass begins.
        self._origins: weakref.WeakKeyDictionary[Any, tuple[runs.RecordedRun, int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._met: set[str] = set()

    def run(self, *inputs: Any, function: OpFunction, op_id: str, names: Sequence[str]) -> Any:
        """Replacement routine: run the operator, with handles for what it saves."""
        if not (torch.is_grad_enabled() and takes_saved_tensor_hooks()):
            return function(*inputs)
        with no_overrides():
            if any(map(runs.is_transformed, inputs)):
                return function(*inputs)
        if has_saved_tensor_hooks():
            # Those of a checkpoint count what is saved. An operator of another thread, or of
            # another iteration, may have had this id.
            if op_id in self._changing:
                with no_overrides():
                    self._follow(inputs, function.now(), op_id)
            return function(*inputs)
        with no_overrides():
            execution = self._noted(inputs, function, op_id, names)
            storages = {storage for storage in map(runs.storage_of, inputs) if storage is not None}
        handles: list[runs.SavedHandle] = []

        def pack(tensor: torch.Tensor) -> runs.SavedHandle:
            with no_overrides():
                handle = self._handle(tensor, op_id, execution, storages, len(handles))
            handles.append(handle)
            return handle

        with saved_tensors_hooks(pack, self._unpack):
            result = function(*inputs)
        if execution is not None:
            execution.count = len(handles)
            with no_overrides():
                self._note_outputs(execution, result, storages)
        # Autograd keeps `pack`, and through it both of these, as long as what was packed.
        storages.clear()
        handles.clear()
        return result

    def _noted(
        self, inputs: Sequence[Any], function: OpFunction, op_id: str, names: Sequence[str]
    ) -> runs.RecordedRun | None:
        """Note an operator that is about to run; return its run, if it is recomputed."""
        if op_id not in self._recomputed:
            if op_id in self._changing:
                self._follow(inputs, function.now(), op_id)
            return None
        if op_id in self._met:
            self._begin_iteration()
        self._met.add(op_id)
        return self._execution(inputs, function.now(), op_id, names)

    def _note_outputs(self, execution: runs.RecordedRun, result: Any, storages: set[Any]) -> None:
        for number, output in enumerate(runs.tensors_in(result)):
            storage = runs.storage_of(output)
            if storage is not None and storage not in storages:
                self._origins[storage] = execution, number, version_of(output)

    def _begin_iteration(self) -> None:
        self._met.clear()
        self._origins.clear()

    def _execution(
        self, inputs: Sequence[Any], function: OpFunction, op_id: str, names: Sequence[str]
    ) -> runs.RecordedRun:
        found = runs.RecordedRun(
            op_id,
            function,
            names,
            [None if tensor is None else self._found(tensor, op_id) for tensor in inputs],
            [tensor is not None and tensor.requires_grad for tensor in inputs],
            runs.Autocast.of(inputs),
            runs.random_states() if op_id in self._drawing else (),
        )
        for source in found.sources():
            source.waiting.add(found)
        return found

    def _follow(self, inputs: Sequence[Any], function: OpFunction, op_id: str) -> None:
        """Note an operator that is about to change the output of a run in place."""
        storage = runs.storage_of(inputs[0])
        origin = None if storage is None else self._origins.get(storage)
        target = self._found(inputs[0], op_id)
        if origin is None or not isinstance(target, runs.Recomputed):
            return
        execution, number, version = origin
        others = [None if tensor is None else self._found(tensor, op_id) for tensor in inputs[1:]]
        # Not `target` itself, which holds its run: that would be a reference cycle.
        change = runs.InPlaceChange(
            function, target.number, target.geometry, others, runs.Autocast.of(inputs)
        )
        # What autograd packs while the operator runs is what will be there afterwards.
        self._origins[storage] = execution, number, version + 1
        for handle in execution.handles:
            if isinstance(handle.content, runs.Recomputed) and handle.content.number >= 0:
                handle.content = runs.OverwrittenTensor(op_id)
        execution.changes.append(change)
        for source in execution.sources():
            source.waiting.add(execution)

    def _found(self, tensor: torch.Tensor, op_id: str) -> runs.Kept | runs.Recomputed:
        """Return where a tensor will be found in the backward pass."""
        storage = runs.storage_of(tensor)
        origin = None if storage is None else self._origins.get(storage)
        if origin is None or tensor.is_conj() or tensor.is_neg():
            return runs.Kept.of(tensor, op_id)
        execution, number, version = origin
        # A tensor that was changed in place since does not come out of a second run.
        if version_of(tensor) != version:
            return runs.Kept.of(tensor, op_id)
        return runs.Recomputed.in_memory_of(execution, number, tensor)

    def _handle(
        self,
        tensor: torch.Tensor,
        op_id: str,
        execution: runs.RecordedRun | None,
        storages: set[Any],
        number: int,
    ) -> runs.SavedHandle:
        content = self._found(tensor, op_id)
        if isinstance(content, runs.Kept) and execution is not None:
            storage = runs.storage_of(tensor)
            if storage is not None and storage not in storages:
                content = runs.Recomputed(execution, -1 - number)
        handle = runs.SavedHandle(content)
        if isinstance(content, runs.Recomputed):
            content.execution.add_handle(handle)
        return handle

    def _unpack(self, handle: runs.SavedHandle) -> torch.Tensor:
        content = handle.content
        if not isinstance(content, runs.Recomputed):
            return content.tensor_now()
        return self._lock.hold(self._recompute, content, handle)

    def _recompute(self, content: runs.Recomputed, handle: runs.SavedHandle) -> torch.Tensor:
        self._origins.clear()
        self._compute(content.execution)
        tensor = content.tensor_now()
        content.execution.unread.discard(handle)
        content.execution.release()
        return tensor

    def _compute(self, target: runs.RecordedRun) -> None:
        """Run a recorded run again, and first the runs that its inputs come out of."""
        stack = [target]
        while stack:
            execution = stack[-1]
            if execution.has_run:
                stack.pop()
                continue
            sources = execution.sources()
            for source in sources:
                source.waiting.add(execution)
            missing = [source for source in sources if not source.has_run]
            if missing:
                stack += missing
                continue
            execution.run_again()
            for source in sources:
                source.waiting.discard(execution)
                source.release()
