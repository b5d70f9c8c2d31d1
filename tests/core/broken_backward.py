"""Loopback drivers that each break a rule about gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda.driver import Dispatcher, OperatorRun, PastTensor
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
    """Gradient accumulation is no backward op for it."""

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


@fault("test_tensors_die")
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
