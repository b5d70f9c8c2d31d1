"""``replace_op`` in eager execution: the function runs, and its gradient is the operator's.

Tapes record the operators of the function one by one. Where tools act on the gradients of the
replaced operator as a whole, two records of our own stand around them::

    inputs --[AmandaInputs]--> copies --(the function)--> outputs --[AmandaOutputs]--> results
            after_backward_op                                   before_backward_op

In the backward pass ``AmandaOutputs`` gets the gradients of the results first. With a
``replace_backward_op`` it hands its gradients to the inputs directly, past the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda.engine.backward import replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.interface.action import Action, ActionKind
from amanda_tensorflow.eager.autodiff import detached, is_tensor, record, run_on_gradients
from amanda_tensorflow.eager.op_request import EagerCall, OpRequest
from amanda_tensorflow.eager.tape_marks import Mark, live_actions
from amanda_tensorflow.eager.tracker import EagerTracker
from amanda_tensorflow.operators.gradient_shapes import checked
from amanda_tensorflow.operators.replacements import replaced_outputs
from amanda_tensorflow.operators.types import is_differentiable


@attrs.define(eq=False)
class OpReplacement:
    """One execution of the function that replaces an operator.

    Args:
        mark: the mark of the execution; None if no tape records.
    """

    _dispatcher: Dispatcher
    _tracker: EagerTracker
    _request: OpRequest
    _plan: ActionPlan
    _mark: Mark | None
    _inputs: list[Any] = attrs.field(factory=list, init=False)

    def run(self, action: Action, inputs: list[Any]) -> list[Any]:
        """Call the function; returns its outputs.

        Raises:
            RoutineResultError: they are not as many tensors as the operator gives.
        """
        self._inputs = inputs
        tracker, outer = self._tracker, self._tracker.marking
        if self._mark is not None:
            inputs = self._with_gradients_of(self._mark, inputs)
            if self._plan.claims:
                self._mark.whole = False
                tracker.marking = self._mark
        call = EagerCall(None, self._plan.op_id, inputs, request=self._request)
        try:
            result = self._dispatcher.replace(action, inputs, call)
        finally:
            tracker.marking = outer
        return replaced_outputs(result, action, self._request.count, is_tensor)

    def recorded(self, plan: ActionPlan, mark: Mark, outputs: list[Any]) -> list[Any]:
        """The outputs, behind ``AmandaOutputs`` if the plan acts on their gradients."""
        if not (plan.before_backward or plan.replace_backward):
            return outputs
        inputs = self._inputs if plan.replace_backward else []
        places = [i for i, tensor in enumerate(inputs) if is_differentiable(tensor)]
        copies = [detached(output) for output in outputs]
        record(
            "AmandaOutputs",
            copies,
            [*outputs, *(inputs[place] for place in places)],
            _output_gradients(self._dispatcher, mark, places),
            lambda *tangents: list(tangents[: len(copies)]),
        )
        return copies

    def _with_gradients_of(self, mark: Mark, inputs: list[Any]) -> list[Any]:
        """The inputs, behind ``AmandaInputs`` if the plan acts on their gradients."""
        plan = self._plan
        if not plan.after_backward or plan.replace_backward:
            return inputs
        places = [i for i, value in enumerate(inputs) if is_differentiable(value)]
        copies = list(inputs)
        for place in places:
            copies[place] = detached(inputs[place])
        record(
            "AmandaInputs",
            [copies[place] for place in places],
            [inputs[place] for place in places],
            _input_gradients(self._dispatcher, mark, places),
            lambda *tangents: list(tangents),
        )
        return copies


# A tape keeps the functions that the following two return, possibly beyond the scope: they look
# the actions up through the mark, and hold neither a tensor nor a plan.


def _output_gradients(dispatcher: Dispatcher, mark: Mark, places: Sequence[int]) -> Any:
    """The gradient function of ``AmandaOutputs``.

    Args:
        places: positions of the inputs that get a gradient from ``replace_backward_op``.
    """

    def backward(*gradients: Any) -> list[Any]:
        before = live_actions(dispatcher, mark, ActionKind.BEFORE_BACKWARD_OP)
        changed = run_on_gradients(dispatcher, before, gradients)
        replacements = live_actions(dispatcher, mark, ActionKind.REPLACE_BACKWARD_OP)
        if not replacements:
            return [*changed, *[None] * len(places)]
        nothing: list[Any] = [None] * len(mark.inputs)
        supplied = replaced_gradients(dispatcher, replacements[0], changed, nothing)
        supplied = checked(supplied, replacements[0], mark.shapes or nothing)
        after = live_actions(dispatcher, mark, ActionKind.AFTER_BACKWARD_OP)
        supplied = run_on_gradients(dispatcher, after, supplied)
        return [*[None] * len(changed), *(supplied[place] for place in places)]

    return backward


def _input_gradients(dispatcher: Dispatcher, mark: Mark, places: Sequence[int]) -> Any:
    """The gradient function of ``AmandaInputs``.

    Args:
        places: positions of the inputs that it records.
    """

    def backward(*gradients: Any) -> list[Any]:
        full: list[Any] = [None] * len(mark.inputs)
        for place, gradient in zip(places, gradients, strict=True):
            full[place] = gradient
        after = live_actions(dispatcher, mark, ActionKind.AFTER_BACKWARD_OP)
        full = run_on_gradients(dispatcher, after, full)
        return [full[place] for place in places]

    return backward
