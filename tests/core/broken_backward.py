"""Loopback drivers that each break a rule about gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda.driver import (
    Dispatcher,
    NamedOp,
    OpCall,
    OperatorGradients,
    OperatorRun,
    PastTensor,
    PatchSet,
)
from amanda.interface.action import Action
from amanda.testing.loopback import LoopbackDriver, tape
from amanda.testing.loopback.driver import DriverNode
from tests.core.faults import fault

# -- differentiation ----------------------------------------------------------


@fault("test_straight_through_before", "test_straight_through_after")
class NeverIsolates(LoopbackDriver):
    """Every routine takes part in AD."""

    def ad_isolated(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        return new


@fault("test_straight_through_before")
class CutsTheGradient(LoopbackDriver):
    """No gradient passes a substitution."""

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        return super().substitute(old, new, action).alias()


@fault("test_straight_through_of_second_order")
class FirstOrderOnly(LoopbackDriver):
    """A gradient that has passed straight through has no gradient itself."""

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        value = new.alias()
        if old.requires_grad:
            passing = DriverNode("StraightThrough", [old.edge()], lambda g: [g[0].alias()])
            tape.attach(passing, [value])
        return value


@fault("test_ad_enabled", "test_differentiable_tool")
class AlwaysIsolates(LoopbackDriver):
    """No routine takes part in AD."""

    def routine(self, action: Action, selected: Any, isolated: bool) -> Any:
        return super().routine(action, selected, True)


@fault("test_shape_mismatch")
class AcceptsAnyShape(LoopbackDriver):
    """It does not look at shapes."""

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        return new


@fault("test_substituted_input_of_an_in_place_op")
class LosesInPlaceChanges(LoopbackDriver):
    """An in-place op changes what it was given, whatever that is."""

    def _run_inplace(self, op: Any, signature: Any, args: Any, kwargs: Any) -> Any:
        return self.run_operator(op, op.__name__, signature, args, kwargs, op.compute)


# -- backward ops -------------------------------------------------------------


@fault("test_all_backward_ops", "test_owner_of_an_accumulation")
class MissesAccumulation(LoopbackDriver):
    """Gradient accumulation is not a backward op for it."""

    def claim_nodes(self, operator: OperatorRun, outputs: Any) -> None:
        pass


@fault("test_all_backward_ops")
class SeesOneBackwardOp(LoopbackDriver):
    """It sees the last node of the gradient graph and no other."""

    def claim_nodes(self, operator: OperatorRun, outputs: Any) -> None:
        super().claim_nodes(operator, outputs)
        for node in list(self.claims):
            if node is not outputs[0].node:
                del self.claims[node]


@fault("test_gradients_of_the_inputs", "test_changed_gradients_of_the_inputs")
class IgnoresInputGradients(LoopbackDriver):
    """Routines on the gradients of an operator's inputs never run."""

    class operator_class(OperatorRun):
        def _run_recorded(self, plan: Any, analysis: Any, acts: bool) -> Any:
            return super()._run_recorded(plan, analysis, False)


@fault("test_recorded_after_the_op")
class ForgetsLateActions(LoopbackDriver):
    """What an after-analysis records for the backward does not reach the first one."""

    class operator_class(OperatorRun):
        def _run_recorded(self, plan: Any, analysis: Any, acts: bool) -> Any:
            return super()._run_recorded(plan, analysis, plan.acts_on_gradients)


@fault("test_released_tensor")
class HoldsTensors(LoopbackDriver):
    """It keeps the forward tensors for a backward analysis."""

    class operator_class(OperatorRun):
        def _past(self, tensor: Any) -> Any:
            return None if tensor is None else _Strong(tensor, self._driver.current_value)


class _Strong(PastTensor):
    def __init__(self, tensor: Any, current_value: Any) -> None:
        super().__init__(tensor, current_value)
        self._kept = tensor


@fault("test_an_abandoned_graph_dies")
class HoldsTheGraph(LoopbackDriver):
    """It holds the nodes of the gradient graph for as long as it is attached."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.claims = {}  # type: ignore[assignment]


@fault("test_forward_outside_of_the_scope")
class KeepsSilent(LoopbackDriver):
    """It does not say what it has not seen."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        dispatcher.not_seen = lambda reason, count=1: None  # type: ignore[method-assign]


@fault("test_no_backward_routine_under_disabled")
class IgnoresDisabled(LoopbackDriver):
    """A backward under disabled() is instrumented."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        dispatcher.is_paused = lambda: False  # type: ignore[method-assign]


@fault("test_backward_ops_are_no_forward_ops", "test_backward_ops_of_gradients")
class TakesBackwardForForward(LoopbackDriver):
    """A backward op is a forward op for it too."""

    def patch(self, patches: PatchSet) -> None:
        super().patch(patches)
        patches.wrap(tape.GradientNode, "run", self._analysing)

    def _analysing(self, vanilla: Any) -> Any:
        def run(node: tape.GradientNode, grads: Any) -> Any:
            if self.dispatcher.scopes() and not isinstance(node, DriverNode):
                call = OpCall(NamedOp(node.name), self.ids.next(node.name), grads)
                self.dispatcher.begin(call).finish(grads)
            return vanilla(node, grads)

        return run


@fault("test_backward_ops_of_the_user_are_no_forward_ops")
class InstrumentsBackwardPasses(LoopbackDriver):
    """The operators that run in a backward pass are forward ops for it."""

    @property
    def is_active(self) -> bool:
        return not self.thread.vanilla and bool(self.dispatcher.scopes())


@fault("test_forward_outputs_still_held", "test_several_forward_outputs_still_held")
class ForgetsOutputs(LoopbackDriver):
    """A backward context has no forward outputs."""

    class operator_class(OperatorRun):
        def _finish(self, plan: Any, analysis: Any, outputs: Any) -> Any:
            plan = super()._finish(plan, analysis, outputs)
            self._handle.outputs.clear()  # type: ignore[attr-defined]
            return plan


@fault(
    "test_a_replacement_of_several_ops", "test_changed_gradients_of_a_replacement_of_several_ops"
)
class DifferentiatesTheLastOperator(LoopbackDriver):
    """The gradients of a replacement's inputs are those of its last operator's."""

    class operator_class(OperatorRun):
        def _run_recorded(self, plan: Any, analysis: Any, acts: bool) -> Any:
            if plan.replace is None:
                return super()._run_recorded(plan, analysis, acts)
            outputs, plan = super()._run_recorded(plan, analysis, False)
            node = outputs[0].node
            whole = OperatorGradients(self._dispatcher, self._handle)
            last = DriverNode("Last", node.edges, lambda grads: whole.after(list(node.run(grads))))
            outputs = [outputs[0].alias()]
            tape.attach(last, outputs)
            return outputs, plan


@fault("test_around_backward_ops", "test_they_see_what_routines_of_backward_ops_return")
class EndsTheWholeOperatorTooEarly(LoopbackDriver):
    """Routines after the whole operator run before those after its last backward op."""

    class operator_class(OperatorRun):
        def _run_recorded(self, plan: Any, analysis: Any, acts: bool) -> Any:
            # Without what sees the gradients of the inputs when all backward ops have run.
            return super()._run_recorded(plan, analysis, False)

        def claim(self, name: str, input_names: Any) -> Any:
            claimed = super().claim(name, input_names)
            self._driver.whole[claimed] = OperatorGradients(self._dispatcher, self._handle)  # type: ignore[attr-defined]
            return claimed

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.whole: dict[Any, OperatorGradients] = {}

    def run_backward_operator(self, claimed: Any, grad_outputs: Any, vanilla: Any) -> Any:
        whole = self.whole.get(claimed)
        if whole is None:
            return super().run_backward_operator(claimed, grad_outputs, vanilla)

        def run(grads: Any) -> Any:
            return whole.after(list(vanilla(grads)))

        return super().run_backward_operator(claimed, grad_outputs, run)
