"""Runs one forward operator of eager execution with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
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

    All methods return the operator's outputs, which the tapes know already.

    Args:
        values: the tensors that were read from variables.
    """

    def __init__(self, dispatcher: Dispatcher, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._values = values

    def run_claimed(
        self, tracker: EagerTracker, plan: ActionPlan, request: OpRequest, inputs: list[Any]
    ) -> list[Any]:
        """Run an operator without actions whose backward operators some tool analyses."""
        outputs = request.execute(inputs)
        if tracker.has_passed(plan.driver_data):
            mark: Mark = plan.driver_data.mark
        else:
            names = request.input_names(len(inputs))
            mark = self._mark(tracker, plan, request, inputs, names)
            mark.outputs = self._values.weak(outputs)
            self._share(tracker, plan, mark)
        request.record(inputs, outputs, mark)
        self._note_owner(tracker, request, outputs, mark)
        return outputs

    def run_planned(
        self, tracker: EagerTracker, plan: ActionPlan, request: OpRequest, inputs: list[Any]
    ) -> list[Any]:
        """Run an operator whose plan is known, with its actions."""
        run_all = self._dispatcher.run_all
        values = run_all(plan.before, inputs) if plan.before else inputs
        tape = not _internals.no_tape_records()
        if plan.replace is None and not (tape and _is_marked(plan)):
            outputs = request.execute(values)
            if tape:
                request.record(values, outputs, None)
        else:
            mark = None
            if tape:
                names = request.input_names(len(inputs))
                mark = self._mark(tracker, plan, request, inputs, names)
            outputs, replacement = self._computed(tracker, plan, request, values, mark)
            if mark is not None:
                outputs = self._recorded(
                    tracker, plan, request, (values, outputs, replacement, mark)
                )
        return run_all(plan.after, outputs) if plan.after else outputs

    def run_analysed(
        self, tracker: EagerTracker, op_id: str, request: OpRequest, inputs: list[Any], scope: str
    ) -> tuple[list[Any], ActionPlan]:
        """Run an operator that some tool has yet to analyse; returns its outputs and its plan.

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
        plan = analyses.plan
        values = self._dispatcher.run_all(plan.before, inputs)
        mark = None
        if not _internals.no_tape_records():
            mark = self._mark(tracker, plan, request, inputs, call.names)
        outputs, replacement = self._computed(tracker, plan, request, values, mark)
        plan = analyses.finish(outputs)
        if mark is not None:
            execution = values, outputs, replacement, mark
            outputs = self._recorded(tracker, plan, request, execution)
        return self._dispatcher.run_all(plan.after, outputs), plan

    def _computed(
        self,
        tracker: EagerTracker,
        plan: ActionPlan,
        request: OpRequest,
        values: list[Any],
        mark: Mark | None,
    ) -> tuple[list[Any], OpReplacement | None]:
        """The outputs of the operator or of its replacement, which is returned too."""
        replacement = None
        if plan.replace is None:
            outputs = request.execute(values)
        else:
            replacement = OpReplacement(self._dispatcher, tracker, request, plan, mark)
            outputs = replacement.run(plan.replace, values)
        if mark is not None:
            mark.outputs = self._values.weak(outputs)
        return outputs, replacement

    def _recorded(
        self,
        tracker: EagerTracker,
        plan: ActionPlan,
        request: OpRequest,
        execution: tuple[list[Any], list[Any], OpReplacement | None, Mark],
    ) -> list[Any]:
        """The outputs of an execution, once the tapes know it."""
        values, outputs, replacement, mark = execution
        if plan.replace_backward is not None:
            mark.shapes = gradient_shapes(values)
        if replacement is not None:
            return replacement.recorded(plan, mark, outputs)
        request.record(values, outputs, mark if _is_marked(plan) else None)
        self._share(tracker, plan, mark)
        self._note_owner(tracker, request, outputs, mark)
        return outputs

    def _mark(
        self,
        tracker: EagerTracker,
        plan: ActionPlan,
        request: OpRequest,
        inputs: Sequence[Any],
        names: Sequence[str],
    ) -> Mark:
        """The mark of one execution."""
        weak = self._values.weak(inputs)
        return Mark(plan.op_id, request.kind, names, tracker.active, weak, tracker.generation)

    def _share(self, tracker: EagerTracker, plan: ActionPlan, mark: Mark) -> None:
        """Let later executions of an operator share a mark, if no action looks at a tensor."""
        if (plan.is_claim or plan.is_blind) and plan.driver_data is None:
            plan.driver_data = SharedMark(mark, tracker.passes)

    def _note_owner(
        self, tracker: EagerTracker, request: OpRequest, outputs: Sequence[Any], mark: Mark
    ) -> None:
        """Remember the mark of an Identity.

        ``tf.custom_gradient`` passes its results through Identities and records its gradient
        function for their outputs: the operators of that function are theirs.
        """
        if request.kind == "Identity":
            tracker.note_owner(outputs[0], mark)


def _is_marked(plan: ActionPlan) -> bool:
    """Whether anything is to happen when the operator is differentiated."""
    return bool(plan.claims or plan.before_backward or plan.after_backward or plan.replace_backward)
