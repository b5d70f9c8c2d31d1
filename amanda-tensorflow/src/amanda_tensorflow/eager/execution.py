"""Runs one forward operator of eager execution with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.engine.dispatch import Dispatcher, OpExecution
from amanda.engine.plan import ActionPlan
from amanda.inline.steps import Around
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.op_request import OpRequest
from amanda_tensorflow.eager.replacement import OpReplacement
from amanda_tensorflow.eager.tape_marks import Mark, SharedMark
from amanda_tensorflow.eager.thread import EagerTracker
from amanda_tensorflow.eager.variable_values import VariableValues
from amanda_tensorflow.keras_layers.module_names import is_plain_module
from amanda_tensorflow.operators.gradient_shapes import gradient_shapes
from amanda_tensorflow.operators.phases import phase_of_eager


class EagerExecutor:
    """Runs operators that are not plainly vanilla, and has the tapes record them.

    Args:
        values: the tensors that were read from variables.
    """

    def __init__(self, dispatcher: Dispatcher, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._values = values

    def run_analysed(
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
        return self.run(tracker, analyses.plan, request, inputs, values, analyses), analyses.plan

    def run(
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
