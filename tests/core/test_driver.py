"""The driver interface and the hookspecs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import amanda
from amanda.engine.dispatch import create_driver
from amanda.interface.driver import INTERFACE_VERSION, Capability, Driver
from amanda.interface.namespace import Namespace
from amanda.registry import hookspecs
from amanda.state import ATTACHED, UNPAUSED
from amanda.testing import loopback as lb
from amanda.testing.loopback import LoopbackDriver, Tensor, tensor


def test_a_driver_has_to_say_what_it_does() -> None:
    """A driver without the abstract methods cannot be made."""
    with pytest.raises(TypeError, match="ad_isolated"):
        create_driver(Driver)


def test_defaults() -> None:
    """A driver is usable, eager, of priority 0 and not opt-in unless it says otherwise."""
    assert LoopbackDriver.reason_unusable() == ""
    assert (LoopbackDriver.mode, LoopbackDriver.priority, LoopbackDriver.opt_in) == (
        "eager",
        0,
        False,
    )
    assert LoopbackDriver.interface_version == INTERFACE_VERSION


@pytest.mark.parametrize("value", [None, True, 1, 1.0, 1j, "x", b"x", [1], (1,), {"a": 1}, {1}])
def test_what_is_no_tensor(value: Any) -> None:
    """Plain Python values are not tensors for any driver."""
    assert not Driver.is_tensor(create_driver(LoopbackDriver), value)


def test_detach_is_idempotent() -> None:
    """detach is harmless when called twice, or without attach."""
    driver = create_driver(LoopbackDriver)
    driver.detach()
    driver.attach()
    driver.detach()
    driver.detach()


def test_what_connects_gradients_is_no_operator_of_the_program() -> None:
    """``with_vjp()`` is called within ``vanilla()``: what it computes with is not seen."""

    class Computing(LoopbackDriver):
        def with_vjp(self, outputs: Any, inputs: Any, vjp: Any) -> Any:
            made = super().with_vjp(outputs, inputs, vjp)
            lb.relu(lb.tensor([1.0]))
            return made

    seen: list[str] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.get_op().__name__)
        context.insert_after_op(lambda y: lb.mul(y, 2.0))

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, drivers=[Computing]):
        lb.mul(lb.tensor([1.0], requires_grad=True), 3.0)
    assert seen == ["mul"]


def test_vanilla() -> None:
    """Within a driver's vanilla() the current thread's framework calls are not instrumented."""
    from amanda.testing import loopback

    calls: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: calls.append(1))
    with amanda.apply(tool), ATTACHED[LoopbackDriver].vanilla():
        assert isinstance(loopback.add(tensor(1.0), 1.0), Tensor)
    assert calls == []


class OtherDriver(Driver):
    """A driver of another framework, which notes when it is made vanilla, and what tools raise."""

    name = "other"
    framework = "sys"
    interface_version = INTERFACE_VERSION
    namespace = Namespace("other/1/eager")
    entered = 0
    told: ClassVar[list[BaseException]] = []

    def attach(self) -> None:
        """Nothing is patched."""

    @contextlib.contextmanager
    def vanilla(self) -> Iterator[None]:
        """Counts the entries."""
        type(self).entered += 1
        yield

    def ad_isolated(self) -> Any:
        """There is no AD."""
        return contextlib.nullcontext()


class FollowingDriver(OtherDriver):
    """One that does without ``vanilla()``, and is told what tools raise."""

    name = "following"
    follows_pauses = True
    entered = 0

    def tool_raised(self, error: BaseException) -> None:
        """Note it."""
        self.told.append(error)


def test_another_driver_is_vanilla_in_tool_code() -> None:
    """Analyses and routines run within vanilla() of each other framework's driver, unless that
    says that it follows what core pauses."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *tensors: None))
    with amanda.apply(tool, drivers=[LoopbackDriver, OtherDriver, FollowingDriver]):
        lb.add(tensor(1.0), 1.0)
        lb.add(tensor(1.0), 1.0)
        assert set(UNPAUSED) == {LoopbackDriver, OtherDriver}
    assert (OtherDriver.entered, FollowingDriver.entered) == (4, 0)
    assert (UNPAUSED, ATTACHED) == ({}, {})


def test_another_driver_is_told_what_a_tool_raises() -> None:
    """A driver is told of an exception of a tool at an operator of another framework."""

    def fail(*tensors: Any) -> None:
        raise LookupError("in a routine")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fail))
    FollowingDriver.told.clear()
    with (
        amanda.apply(tool, drivers=[LoopbackDriver, FollowingDriver]),
        pytest.raises(LookupError) as raised,
    ):
        lb.add(tensor(1.0), 1.0)
    assert FollowingDriver.told == [raised.value]
    FollowingDriver.told.clear()


def test_capabilities_are_explained() -> None:
    """Each capability has an explanation of its own."""
    assert len({capability.value for capability in Capability}) == len(Capability)


def test_hooks_that_register_take_no_argument() -> None:
    """There are eleven hooks; those that register answer without knowing of a program."""
    hooks = {n: f for n, f in vars(hookspecs).items() if n.startswith("amanda_")}
    arguments = {n: list(inspect.signature(f).parameters) for n, f in sorted(hooks.items())}
    assert arguments == {
        "amanda_explain_unseen": ["frameworks"],
        "amanda_open_cluster": ["address"],
        "amanda_open_tables": [],
        "amanda_record_graph": ["tools"],
        "amanda_register_drivers": [],
        "amanda_register_mapping_rules": [],
        "amanda_register_tools": [],
        "amanda_render_report": ["report"],
        "amanda_report_problems": ["frameworks"],
        "amanda_suggest_drivers": [],
        "amanda_suggest_page_tools": [],
    }


def test_a_wrong_call_raises_the_operators_own_error() -> None:
    """Arguments that do not fit the signature are the operator's to refuse."""
    with pytest.raises(TypeError) as vanilla:
        lb.add()
    with amanda.apply(amanda.Tool()), pytest.raises(TypeError) as instrumented:
        lb.add()
    assert str(instrumented.value) == str(vanilla.value)


class ReferringDriver(LoopbackDriver):
    """Reads tensors again by a reference of its own, as if they took none that is weak."""

    def reference(self, tensor: Tensor) -> Any:
        values = tensor.tolist()
        if values == [3.0, 3.0]:
            raise TypeError("no reference to this one")
        return lambda: lb.tensor(values)


def test_a_driver_says_how_forward_tensors_are_referred_to() -> None:
    """A backward analysis reads what the driver's reference gives; without one it is released."""
    seen: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        inputs = context.get_inputs()
        seen.append(inputs[0].tolist())
        with pytest.raises(amanda.errors.TensorReleased):
            inputs[1]

    tool = amanda.Tool()
    tool.add_inst_for_op(look, backward=True)
    x, factor = lb.tensor([1.0, 2.0], requires_grad=True), lb.tensor([3.0, 3.0])
    with amanda.apply(tool, drivers=[ReferringDriver]):
        lb.grad([lb.mul(x, factor)], [x])
    assert seen
    assert seen[0] == [1.0, 2.0]
