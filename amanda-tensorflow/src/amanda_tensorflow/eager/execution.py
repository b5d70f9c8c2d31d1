"""One forward operator of eager execution with its plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from amanda.engine.backward import replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.errors import RoutineResultError, described
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import (
    detached,
    is_differentiable,
    is_tensor,
    record,
    run_on_gradients,
)
from amanda_tensorflow.eager.tape_marks import Claim, Mark, live_actions
from amanda_tensorflow.eager.thread import Tracker
from amanda_tensorflow.eager.variable_values import VariableValues
from amanda_tensorflow.gradient_map.recording import MARK
from amanda_tensorflow.operators.types import (
    OpView,
    has_one_output,
    input_names,
    module_of,
    presented,
)
from amanda_tensorflow.operators.variable_views import view_of


@attrs.define(eq=False)
class Vanilla:
    """TensorFlow's own functions, as the driver found them or others have left them."""

    fast_path: Callable[..., Any]
    execute: Callable[..., Any]
    record_gradient: Callable[..., Any]


@attrs.frozen(eq=False)
class OpRequest:
    """What TensorFlow asks to be executed, without the inputs.

    Attributes:
        kind: the operator's type.
        count: how many outputs it has.
        attributes: names and values of its attributes, in turn; None if it has none.
        context: TensorFlow's context.
        name: the name that the caller gave.
        vanilla: how to execute it.
    """

    kind: str
    count: int
    attributes: tuple[Any, ...] | None
    context: Any
    name: str | None
    vanilla: Vanilla

    def execute(self, inputs: Sequence[Any]) -> list[Any]:
        """Its outputs; no tape is told."""
        result: list[Any] = self.vanilla.execute(
            self.kind.encode(),
            self.count,
            list(inputs),
            self.attributes,
            self.context,
            self.name,
        )
        return result

    def record(self, inputs: Sequence[Any], outputs: Sequence[Any], mark: Mark | None) -> None:
        """Tell the tapes of an execution."""
        attributes = self.attributes
        if mark is not None:
            attributes = (*(attributes or ()), MARK, mark)
        self.vanilla.record_gradient(self.kind, list(inputs), attributes, list(outputs))

    def run(self, inputs: Sequence[Any]) -> Any:
        """Execute and record it; the output, or the list of them where it declares several."""
        outputs = self.execute(inputs)
        if not _internals.no_tape_records():
            self.record(inputs, outputs, None)
        return outputs[0] if has_one_output(self.kind) else outputs

    def presented_attributes(self) -> dict[str, Any]:
        """The attributes as tools see them."""
        flat = self.attributes or ()
        return presented(self.kind, zip(flat[::2], flat[1::2], strict=True))


@attrs.define(eq=False)
class EagerCall(OpCall):
    """What core is told of the operator."""

    request: OpRequest | None = None
    values: VariableValues | None = None

    def value(self, index: int) -> Any:
        """The value of the variable that input `index` was read from, or is; None for others."""
        assert self.values is not None
        return self.values.of(self.inputs[index])

    def value_key(self, index: int) -> Hashable | None:
        """The variable's handle, by a number of its own; None for other inputs."""
        assert self.values is not None
        source = self.values.source_of(self.inputs[index])
        return None if source is None else source.key

    def value_view(self, index: int) -> tuple[Any, ...]:
        """The reshapes and transpositions between the variable and input `index`."""
        assert self.values is not None
        source = self.values.source_of(self.inputs[index])
        return () if source is None else view_of(source.steps)

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """See :meth:`OpRequest.run`."""
        assert self.request is not None
        return self.request.run


class Executor:
    """Runs the operators that are not plainly vanilla."""

    def __init__(self, dispatcher: Dispatcher, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._values = values

    def run_claimed(
        self, tracker: Tracker, plan: ActionPlan, request: OpRequest, inputs: list[Any]
    ) -> list[Any]:
        """An operator without actions whose backward operators some tool looks at."""
        outputs = request.execute(inputs)
        if tracker.has_passed(plan.driver_data):
            mark: Mark = plan.driver_data.mark
        else:
            mark = self._mark(tracker, plan, request, inputs)
            mark.outputs = self._values.weak(outputs)
            self._share(tracker, plan, mark)
        request.record(inputs, outputs, mark)
        self._note_owner(tracker, request, outputs, mark)
        return outputs

    def run(
        self,
        tracker: Tracker,
        plan: ActionPlan | None,
        op_id: str,
        request: OpRequest,
        inputs: list[Any],
        scope: str,
    ) -> tuple[list[Any], ActionPlan]:
        """An operator with its analyses and actions.

        Args:
            plan: None if some analysis has yet to run.

        Returns:
            The operator's outputs and its plan.
        """
        execution = None
        if plan is None:
            call = self._call(op_id, request, inputs, scope)
            execution = self._dispatcher.begin(call)
            plan = execution.plan
        values = inputs
        for action in plan.before:
            values = self._dispatcher.run(action, values)
        mark = None if _internals.no_tape_records() else self._mark(tracker, plan, request, inputs)
        replacement = None
        if plan.replace is None:
            outputs = request.execute(values)
        else:
            replacement = Replacement(self._dispatcher, tracker, request, plan, mark)
            outputs = replacement.run(plan.replace, values)
        if mark is not None:
            mark.outputs = self._values.weak(outputs)
        if execution is not None:
            plan = execution.finish(outputs)
        if mark is not None and replacement is not None:
            outputs = replacement.recorded(plan, mark, outputs)
        elif mark is not None:
            request.record(values, outputs, mark if _is_marked(plan) else None)
            self._share(tracker, plan, mark)
            self._note_owner(tracker, request, outputs, mark)
        for action in plan.after:
            outputs = self._dispatcher.run(action, outputs)
        return outputs, plan

    def _call(self, op_id: str, request: OpRequest, inputs: list[Any], scope: str) -> EagerCall:
        attributes = request.presented_attributes()
        return EagerCall(
            op=OpView(request.kind, op_id),
            op_id=op_id,
            inputs=inputs,
            names=input_names(request.kind, len(inputs), attributes),
            attributes=attributes,
            module=module_of(scope),
            request=request,
            values=self._values,
        )

    def _mark(
        self, tracker: Tracker, plan: ActionPlan, request: OpRequest, inputs: Sequence[Any]
    ) -> Mark:
        """What the record of one execution carries."""
        names = input_names(request.kind, len(inputs), request.presented_attributes())
        scopes = self._dispatcher.scopes()
        weak = self._values.weak(inputs)
        return Mark(plan.op_id, request.kind, names, scopes, weak, tracker.generation)

    def _share(self, tracker: Tracker, plan: ActionPlan, mark: Mark) -> None:
        """Let later executions without actions share a mark."""
        if plan.is_claim and plan.driver_data is None:
            plan.driver_data = Claim(mark, tracker.passes)

    def _note_owner(
        self, tracker: Tracker, request: OpRequest, outputs: Sequence[Any], mark: Mark
    ) -> None:
        """An Identity may be what TensorFlow puts behind a function with a custom gradient."""
        if request.kind == "Identity":
            tracker.note_owner(outputs[0], mark)


def _is_marked(plan: ActionPlan) -> bool:
    """Whether something is to happen in the backward pass."""
    return bool(plan.claims or plan.before_backward or plan.after_backward or plan.replace_backward)


class Replacement:
    """The function that stands in for an operator, and the gradient of both."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tracker: Tracker,
        request: OpRequest,
        plan: ActionPlan,
        mark: Mark | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self._request = request
        self._plan = plan
        self._mark = mark
        self._inputs: list[Any] = []

    def run(self, action: Action, inputs: list[Any]) -> list[Any]:
        """The outputs of the function.

        Raises:
            RoutineResultError: they are not what the operator gives.
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
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(outputs) != self._request.count or not all(map(is_tensor, outputs)):
            count = self._request.count
            wanted = "its output tensor" if count == 1 else f"its {count} output tensors"
            raise RoutineResultError(
                f"{action.routine} replaces op {action.op_id} and must return {wanted}, "
                f"got {described(result)}"
            )
        return outputs

    def recorded(self, plan: ActionPlan, mark: Mark, outputs: list[Any]) -> list[Any]:
        """The outputs, with the gradient that routines or a tool's VJP make of theirs."""
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
        """The inputs, with a record behind them in which all their gradients meet."""
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


# The functions below outlive their operator in a tape: they must hold no tensor and no plan.


def _output_gradients(dispatcher: Dispatcher, mark: Mark, places: Sequence[int]) -> Any:
    """From the gradients of a replaced operator's outputs to those of its function's
    outputs, or past these to its inputs."""

    def backward(*gradients: Any) -> list[Any]:
        before = live_actions(dispatcher, mark, ActionKind.BEFORE_BACKWARD_OP)
        changed = run_on_gradients(dispatcher.run, before, gradients)
        replacements = live_actions(dispatcher, mark, ActionKind.REPLACE_BACKWARD_OP)
        if not replacements:
            return [*changed, *[None] * len(places)]
        nothing: list[Any] = [None] * len(mark.inputs)
        supplied = replaced_gradients(dispatcher, replacements[0], changed, nothing)
        after = live_actions(dispatcher, mark, ActionKind.AFTER_BACKWARD_OP)
        supplied = run_on_gradients(dispatcher.run, after, supplied)
        return [*[None] * len(changed), *(supplied[place] for place in places)]

    return backward


def _input_gradients(dispatcher: Dispatcher, mark: Mark, places: Sequence[int]) -> Any:
    """Through the routines after the backward of a replaced operator."""

    def backward(*gradients: Any) -> list[Any]:
        full: list[Any] = [None] * len(mark.inputs)
        for place, gradient in zip(places, gradients, strict=True):
            full[place] = gradient
        after = live_actions(dispatcher, mark, ActionKind.AFTER_BACKWARD_OP)
        full = run_on_gradients(dispatcher.run, after, full)
        return [full[place] for place in places]

    return backward
