"""The slow path of eager operators: ``execute.execute``, in Python.

The patch gets inputs as tensors and attributes by name. It runs an operator with its analyses,
routines and marks; what the operator needs is the :class:`Reason` in its entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda.engine.dispatch import Dispatcher, OpExecution
from amanda.engine.plan import ActionPlan
from amanda.inline.steps import Around
from amanda.python.patching import named_as
from amanda.state import STATE
from amanda_tensorflow import _internals
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
)
from amanda_tensorflow.eager.replacement import OpReplacement
from amanda_tensorflow.eager.tape_marks import Mark, SharedMark
from amanda_tensorflow.eager.tool_errors import raise_if_retried
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker
from amanda_tensorflow.eager.variable_readings import READING, SUMS, VariableValues
from amanda_tensorflow.keras_layers.module_names import is_plain_module
from amanda_tensorflow.operators.gradient_shapes import gradient_shapes
from amanda_tensorflow.operators.phases import phase_of_eager
from amanda_tensorflow.operators.types import NOT_OPS

_NO_TENSORS = "operators called with inputs that are not tensors"


class SlowPath:
    """The patch of ``execute.execute``.

    Args:
        vanilla: TensorFlow's own functions.
        values: the tensors that are read from variables.

    Attributes:
        patched: the patch, once it is made; else None.
    """

    def __init__(self, dispatcher: Dispatcher, vanilla: Vanilla, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._vanilla = vanilla
        self._values = values
        self.patched: Any = None

    # -- the patch --------------------------------------------------------

    def put_in_place(self) -> None:
        """Patch the function that TensorFlow has set meanwhile: ``op_callbacks`` sets another."""
        if _internals.EXECUTE.execute is not self.patched:
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
            asked = op_name, num_outputs, inputs, attrs, ctx, name
            # Without a context TensorFlow refuses the call.
            if tracker is None or ctx is None:
                return originals.execute(*asked)
            tracker.recorded = None
            kind = op_name.decode() if isinstance(op_name, bytes) else op_name
            has_fallen = kind in tracker.sent_to_slow_path
            tracker.sent_to_slow_path.discard(kind)
            if STATE.paused or (tracker.stale and not tracker.refresh()):
                return self._unwatched(tracker, kind, has_fallen, asked)
            cell, entry = list[Any](), UNKNOWN
            try:
                cell = tracker.cells[tracker.local.scope_name][kind]
                entry = cell[cell[0] + 1]
            except LookupError:
                if kind in NOT_OPS or _internals.op_def_of(kind) is None:
                    tracker.ids.enter_function(kind)
                    return originals.execute(*asked)
            request = OpRequest(kind, num_outputs, attrs, ctx, name, originals, has_fallen)
            if entry is PLAIN:
                outputs = request.execute(inputs)
                cell[0] += 1
                return outputs
            if not only_tensors(map(type, inputs)) and self._has_others(inputs):
                return originals.execute(*asked)
            if tracker.depth:
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

    def _unwatched(
        self, tracker: EagerTracker, kind: str, has_fallen: bool, asked: tuple[Any, ...]
    ) -> Any:
        """Run an operator of a tool's code, or another one that no scope sees.

        The record of one of a replacement carries the replaced operator's mark.

        Args:
            asked: the arguments of ``execute.execute``.
        """
        mark, (_, count, inputs, attributes, context, name) = tracker.marking, asked
        # Calls of functions have the function's name.
        is_op = mark is not None and kind not in NOT_OPS and _internals.op_def_of(kind) is not None
        if not is_op or self._has_others(inputs):
            return self._vanilla.execute(*asked)
        request = OpRequest(kind, count, attributes, context, name, self._vanilla, has_fallen)
        outputs = request.execute(inputs)
        if not _internals.no_tape_records():
            request.record(inputs, outputs, mark)
            tracker.note_recorded(outputs)
        return outputs

    def _backward(
        self, tracker: EagerTracker, entry: OperatorEntry, request: OpRequest, inputs: list[Any]
    ) -> Any:
        """Run an operator of a backward pass."""
        run = tracker.run
        if run is None:
            return request.execute(inputs)
        if entry.reason is not Reason.ROUTINES and run.is_vanilla(request.kind):
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
        """Run a forward operator, which some tool may have yet to analyse."""
        if sys.exception() is not None:
            raise_if_retried()
        kind, ids, generation, scope, op_id = request.kind, tracker.ids, tracker.generation, "", ""
        if entry is UNKNOWN:
            scope = ids.scope(tracker.local.scope_name)
            cell = ids.cell(scope, kind)
            entry = entry_of(cell)
        number = cell[0]
        plan, values = tracker.begun or (entry.plan, None)
        cell[0] = number + 1
        if plan is None:
            op_id = ids.op_id(scope, kind, number)
            plan = self._dispatcher.plan(op_id)
        if plan is None:
            outputs, plan = self._run_analysed(tracker, op_id, request, inputs, scope)
        else:
            if values is None:
                values = self._dispatcher.run_all(plan.before, inputs) if plan.before else inputs
            outputs = self._run(tracker, plan, request, inputs, values)
        if op_id and tracker.keeps_plans(generation):
            keep(cell, number, entry_of_plan(plan, kind in READING))
        if kind in READING and outputs:
            self._values.note(kind, inputs, outputs[0])
        elif op_id and kind in SUMS:
            self._values.note_sum(kind, inputs, outputs[0])
        return outputs

    def _run_analysed(
        self, tracker: EagerTracker, op_id: str, request: OpRequest, inputs: list[Any], scope: str
    ) -> tuple[list[Any], ActionPlan]:
        """Run an operator that some tool has yet to analyse; return its outputs and its plan.

        Args:
            scope: the name scope that it has in ids.
        """
        call = request.call(op_id, inputs, tracker.ids.module(scope), self._values)
        places = tracker.ids.places
        told = places[-1].phase if places else ""
        in_module = bool(places) and is_plain_module(places[-1].layer())
        in_layer = bool(places) and not in_module
        call.phase = told or phase_of_eager(request.kind, in_layer, in_module)
        analyses = self._dispatcher.begin(call)
        values = self._dispatcher.run_all(analyses.plan.before, inputs)
        return self._run(tracker, analyses.plan, request, inputs, values, analyses), analyses.plan

    def _run(
        self,
        tracker: EagerTracker,
        plan: ActionPlan,
        request: OpRequest,
        inputs: list[Any],
        values: list[Any],
        analyses: OpExecution | None = None,
    ) -> list[Any]:
        """Run an operator and the routines after it; return its outputs, which tapes know.

        An operator that is in no need of a record of ours is recorded by TensorFlow.

        Args:
            values: the inputs after the routines before it.
            analyses: are finished when its outputs are known; None if all have run.
        """
        has_mark = bool(analyses or plan.claims or plan.acts_on_gradients or plan.replace)
        is_recorded = (
            has_mark or plan.around >= Around.TENSORS
        ) and not _internals.no_tape_records()
        mark = self._mark(tracker, plan, request, inputs) if has_mark and is_recorded else None
        replacement = None
        if plan.replace is None:
            outputs = request.execute(values)
        else:
            replacement = OpReplacement(self._dispatcher, tracker, request, plan, mark)
            outputs = replacement.run(plan.replace, values)
        if analyses is not None:
            plan = analyses.finish(outputs)
        if mark is not None:
            outputs = self._recorded(tracker, plan, request, (values, outputs, replacement, mark))
        elif is_recorded:
            request.record(values, outputs, None)
        if plan.after:
            outputs = self._dispatcher.run_all(plan.after, outputs)
        if is_recorded:
            tracker.note_recorded(outputs)
        return outputs

    def _recorded(
        self,
        tracker: EagerTracker,
        plan: ActionPlan,
        request: OpRequest,
        execution: tuple[list[Any], list[Any], OpReplacement | None, Mark],
    ) -> list[Any]:
        """Return the outputs of an execution, once the tapes know it.

        Later executions share its mark, if no action looks at a tensor. The mark of an Identity is
        remembered: ``tf.custom_gradient`` passes its results through Identities and records its
        gradient function for their outputs; the operators of that function are theirs.
        """
        values, outputs, replacement, mark = execution
        if not mark.shared:
            mark.outputs = self._values.weak(outputs)
        if plan.replace_backward is not None:
            mark.shapes = gradient_shapes(values)
        if replacement is not None:
            return replacement.recorded(plan, mark, outputs)
        is_marked = plan.claims or plan.acts_on_gradients
        request.record(values, outputs, mark if is_marked else None)
        if plan and plan.around < Around.TENSORS and plan.driver_data is None:
            plan.driver_data = SharedMark(mark, tracker.passes)
        if request.kind == "Identity":
            tracker.note_owner(outputs[0], mark)
        elif request.kind == "ReadVariableOp":
            tracker.note_reader(values[0], mark)
        return outputs

    def _mark(
        self, tracker: EagerTracker, plan: ActionPlan, request: OpRequest, inputs: Sequence[Any]
    ) -> Mark:
        """Return the mark of one execution, or the one that executions share."""
        if tracker.has_passed(plan.driver_data):
            shared: Mark = plan.driver_data.mark
            return shared
        weak, names = self._values.weak(inputs), request.input_names(len(inputs))
        return Mark(plan.op_id, request.kind, names, tracker.active, weak, tracker.generation)
