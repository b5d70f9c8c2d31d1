"""The slow path of eager operators: ``execute.execute``, in Python.

The patch gets inputs as tensors and attributes by name. It runs an operator with its analyses,
routines and marks; what the operator needs is the :class:`Reason` in its entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.python.patching import named_as
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.execution import EagerExecutor
from amanda_tensorflow.eager.op_request import OpRequest, Vanilla
from amanda_tensorflow.eager.plan_cache import (
    PLAIN,
    UNKNOWN,
    Cell,
    OperatorEntry,
    Reason,
    entry_of,
    entry_of_plan,
    keep,
    slow_path_reason,
)
from amanda_tensorflow.eager.thread import LOCAL, EagerTracker
from amanda_tensorflow.eager.tool_errors import retried
from amanda_tensorflow.eager.variable_values import READING, VariableValues
from amanda_tensorflow.operators.types import NOT_OPS

Runner = Callable[[EagerTracker, ActionPlan, OpRequest, list[Any]], list[Any]]
"""Runs an operator of which the plan is known; returns its outputs."""

_NO_TENSORS = "operators called with inputs that are not tensors"


class SlowPath:
    """The patch of ``execute.execute``.

    Args:
        vanilla: TensorFlow's own functions.
        values: is told of the tensors that are read from variables.

    Attributes:
        patched: the patch, once it is made; else None.
    """

    def __init__(self, dispatcher: Dispatcher, vanilla: Vanilla, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._vanilla = vanilla
        self._values = values
        self._executor = EagerExecutor(dispatcher, values)
        self._runners: dict[Reason | None, Runner] = {
            Reason.TENSORS: self._executor.run_planned,
            Reason.MARK: self._executor.run_claimed,
            None: _run_vanilla,
        }
        self.patched: Any = None

    # -- the patch --------------------------------------------------------

    def put_in_place(self) -> None:
        """Patch the function that TensorFlow has set meanwhile: ``op_callbacks`` sets another."""
        self._vanilla.execute = _internals.EXECUTE.execute
        _internals.EXECUTE.execute = self.patched

    def leave(self, undo: Callable[[], None]) -> None:
        """Undo the patches by `undo`, but keep a function that TensorFlow has set meanwhile."""
        current, found = _internals.EXECUTE.execute, self._vanilla.execute
        undo()
        if self.patched is not None:
            _internals.EXECUTE.execute = found if current is self.patched else current

    def patch(self, vanilla: Any) -> Any:
        """Return the patch of ``execute.execute``."""
        originals, only_tensors = self._vanilla, _internals.TENSORS_ONLY.issuperset

        def execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None
        ) -> Any:
            tracker = LOCAL.tracker
            # Without a context TensorFlow refuses the call.
            if tracker is None or ctx is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            tracker.recorded = None
            kind = op_name.decode() if isinstance(op_name, bytes) else op_name
            has_fallen = kind in tracker.fallen and not tracker.local.op_callbacks
            tracker.fallen.discard(kind)
            is_watched = not STATE.paused and (not tracker.stale or tracker.refresh())
            cell, entry = list[Any](), UNKNOWN
            if is_watched:
                try:
                    cell = tracker.cells[tracker.local.scope_name][kind]
                    entry = cell[cell[0] + 1]
                except LookupError:
                    pass
            elif tracker.marking is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            if entry is UNKNOWN and (kind in NOT_OPS or _internals.op_def_of(kind) is None):
                tracker.ids.enter_function(kind)
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            request = OpRequest(kind, num_outputs, attrs, ctx, name, originals, has_fallen)
            if entry is PLAIN:
                return self._counted(cell, request, inputs)
            if not only_tensors(map(type, inputs)) and self._has_others(inputs):
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            if not is_watched:
                return self._in_replacement(tracker, request, list(inputs))
            if tracker.depth or tracker.run is not None:
                return self._backward(tracker, entry, request, list(inputs))
            return self._forward(tracker, cell, entry, request, list(inputs))

        self.patched = named_as(vanilla, execute)
        return execute

    def _has_others(self, inputs: Sequence[Any]) -> bool:
        """True if an operator has inputs that are not tensors: it is not seen."""
        if all(isinstance(value, _internals.EagerTensor) for value in inputs):
            return False
        self._dispatcher.not_seen(_NO_TENSORS)
        return True

    # -- operators --------------------------------------------------------

    def _counted(self, cell: Cell, request: OpRequest, inputs: Any) -> list[Any]:
        """Run an operator to which nothing is done."""
        outputs = request.execute(inputs)
        cell[0] += 1
        return outputs

    def _in_replacement(self, tracker: EagerTracker, request: OpRequest, inputs: list[Any]) -> Any:
        """Run an operator of a replacement: its record carries the replaced operator's mark."""
        outputs = request.execute(inputs)
        if not _internals.no_tape_records():
            request.record(inputs, outputs, tracker.marking)
            tracker.note_recorded(outputs)
        return outputs

    def _backward(
        self, tracker: EagerTracker, entry: OperatorEntry, request: OpRequest, inputs: list[Any]
    ) -> Any:
        """Run an operator of a backward pass."""
        run = tracker.run
        if run is None:
            return request.execute(inputs)
        if entry.reason is not Reason.TENSORS and run.is_vanilla(request.kind):
            outputs = request.execute(inputs)
            run.cell(request.kind)[0] += 1
            return outputs
        outputs = list(run.execute(request.kind, inputs, request.execute_recorded))
        tracker.note_recorded(outputs)
        return outputs

    def _forward(
        self,
        tracker: EagerTracker,
        cell: Cell,
        entry: OperatorEntry,
        request: OpRequest,
        inputs: list[Any],
    ) -> Any:
        """Run a forward operator."""
        failed = retried() if sys.exception() is not None else None
        if failed is not None:
            raise failed
        kind, ids = request.kind, tracker.ids
        if entry is UNKNOWN:
            scope = ids.scope(tracker.local.scope_name)
            cell = ids.cell(scope, kind)
            entry = entry_of(cell)
        number, plan = cell[0], entry.plan
        if plan is None:
            op_id = ids.op_id(scope, kind, number)
            plan = self._dispatcher.plan(op_id)
            if plan is None:
                return self._first(tracker, cell, scope, op_id, request, inputs)
            self._keep(tracker, cell, number, kind, plan, tracker.generation)
        if plan.is_blind:
            self.start(tracker, plan, cell)
        cell[0] = number + 1
        ids.started.discard((id(cell), number))
        is_recorded = not _internals.no_tape_records()
        reason = entry.reason
        if reason is not Reason.TENSORS:
            reason = slow_path_reason(plan, is_recorded)
        outputs = self._runners[reason](tracker, plan, request, inputs)
        if plan.is_blind:
            for action in plan.after:
                self._dispatcher.run(action, [])
        if kind in READING and outputs:
            self._values.note(kind, inputs, outputs[0])
        if is_recorded and reason is not None:
            tracker.note_recorded(outputs)
        return outputs

    def _first(
        self,
        tracker: EagerTracker,
        cell: Cell,
        scope: str,
        op_id: str,
        request: OpRequest,
        inputs: list[Any],
    ) -> list[Any]:
        """Run an operator that a tool has yet to analyse.

        Args:
            scope: the name scope that it has in ids.
        """
        number, generation, kind = cell[0], tracker.generation, request.kind
        cell[0] = number + 1
        is_recorded = not _internals.no_tape_records()
        outputs, plan = self._executor.run_analysed(tracker, op_id, request, inputs, scope)
        self._keep(tracker, cell, number, kind, plan, generation)
        if kind in READING and outputs:
            self._values.note(kind, inputs, outputs[0])
        if is_recorded:
            tracker.note_recorded(outputs)
        return outputs

    def start(self, tracker: EagerTracker, plan: ActionPlan, cell: Cell) -> None:
        """Run the routines before an operator, which look at no tensor; once, on either path."""
        this = id(cell), cell[0]
        if this not in tracker.ids.started:
            for action in plan.before:
                self._dispatcher.run(action, [])
            tracker.ids.started.add(this)

    def _keep(
        self,
        tracker: EagerTracker,
        cell: Cell,
        number: int,
        kind: str,
        plan: ActionPlan,
        generation: int,
    ) -> None:
        """Keep what a plan, made in this generation of plans, says of an operator."""
        if tracker.keeps_plans(generation):
            keep(cell, number, entry_of_plan(plan, kind in READING))


def _run_vanilla(
    tracker: EagerTracker, plan: ActionPlan, request: OpRequest, inputs: list[Any]
) -> list[Any]:
    """Run an operator for which there is nothing to do with its tensors."""
    return request.execute(inputs)
