"""Loopback drivers that each break a rule about gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import Action
from amanda.testing.loopback import LoopbackDriver, Tensor, tape
from amanda.testing.loopback.execution import DriverNode, Execution, WeakTensor
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

    class execution_cls(Execution):
        def _returned(self, outputs: Any) -> Any:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)


# -- backward ops -------------------------------------------------------------


@fault("test_all_backward_ops", "test_owner_of_an_accumulation")
class MissesAccumulation(LoopbackDriver):
    """Gradient accumulation is no backward op for it."""

    class execution_cls(Execution):
        def _claim(self, handle: OpHandle, inputs: Any, outputs: Any, first: int) -> None:
            super()._claim(handle, inputs, outputs, first)
            for node in list(self._driver.claims):
                if isinstance(node, tape.AccumulateGrad):
                    del self._driver.claims[node]


@fault("test_all_backward_ops")
class SeesOneBackwardOp(LoopbackDriver):
    """It sees the last node of the gradient graph and no other."""

    class execution_cls(Execution):
        def _claim(self, handle: OpHandle, inputs: Any, outputs: Any, first: int) -> None:
            super()._claim(handle, inputs, outputs, first)
            for node in list(self._driver.claims):
                if node is not outputs[0].node:
                    del self._driver.claims[node]


@fault("test_gradients_of_the_inputs", "test_changed_gradients_of_the_inputs")
class IgnoresInputGradients(LoopbackDriver):
    """Routines on the gradients of an operator's inputs never run."""

    class execution_cls(Execution):
        def _with_input_gradients(self, handle: OpHandle, inputs: Any) -> Any:
            return inputs


@fault("test_recorded_after_the_op")
class ForgetsLateActions(LoopbackDriver):
    """What an after-analysis records for the backward does not reach the first one."""

    class execution_cls(Execution):
        def _is_analysed_after(self) -> bool:
            return False


@fault("test_released_tensor")
class HoldsTensors(LoopbackDriver):
    """It keeps the forward tensors for a backward analysis."""

    class execution_cls(Execution):
        def _handle(self) -> OpHandle:
            handle = super()._handle()
            kept = self._arguments.inputs
            handle.inputs = [t if t is None else _Strong(t) for t in kept]
            return handle


class _Strong(WeakTensor):
    def __init__(self, source: Tensor) -> None:
        super().__init__(source)
        self._kept = source


@fault("test_tensors_die")
class HoldsTheGraph(LoopbackDriver):
    """It holds the nodes of the gradient graph for as long as it is attached."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.claims = {}  # type: ignore[assignment]


@fault("test_forward_outside_of_the_scope")
class KeepsSilent(LoopbackDriver):
    """It does not say what it has not seen."""

    @classmethod
    def create(cls) -> Any:
        driver = super().create()
        driver.dispatcher.not_seen = lambda reason, count=1: None
        return driver


@fault("test_no_backward_routine_under_disabled")
class IgnoresDisabled(LoopbackDriver):
    """A backward under disabled() is instrumented."""

    @classmethod
    def create(cls) -> Any:
        driver = super().create()
        driver.dispatcher.is_paused = lambda: False
        return driver
