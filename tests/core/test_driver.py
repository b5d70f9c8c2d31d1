"""The driver interface and the hookspecs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import amanda
from amanda.engine.dispatch import create_driver
from amanda.interface.driver import INTERFACE_VERSION, Capability, Driver
from amanda.namespace import Namespace
from amanda.registry import hookspecs
from amanda.testing import loopback as lb
from amanda.testing.loopback import LoopbackDriver, Tensor, tensor


def test_a_driver_has_to_say_what_it_does() -> None:
    """A driver without the abstract methods cannot be made."""
    with pytest.raises(TypeError, match="ad_isolated"):
        create_driver(Driver)


def test_create() -> None:
    """create_driver gives a driver with a dispatcher that serves it."""
    driver = create_driver(LoopbackDriver)
    assert driver.dispatcher.driver is driver
    assert isinstance(driver.namespace, Namespace)


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
    """Plain Python values are no tensors for any driver."""
    assert not Driver.is_tensor(create_driver(LoopbackDriver), value)


def test_what_may_be_a_tensor() -> None:
    """A driver that does not say what a tensor is takes any other object for one."""
    driver = create_driver(LoopbackDriver)
    assert Driver.is_tensor(driver, tensor(1.0))
    assert not driver.is_tensor(object())
    assert driver.is_tensor(tensor(1.0))


def test_detach_is_idempotent() -> None:
    """detach is harmless when called twice, or without attach."""
    driver = create_driver(LoopbackDriver)
    driver.detach()
    driver.attach()
    driver.detach()
    driver.detach()


def test_vanilla() -> None:
    """Within a driver's vanilla() the current thread's framework calls are not instrumented."""
    from amanda.state import ATTACHED
    from amanda.testing import loopback

    calls: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: calls.append(1))
    with amanda.apply(tool), ATTACHED[LoopbackDriver].vanilla():
        assert isinstance(loopback.add(tensor(1.0), 1.0), Tensor)
    assert calls == []


def test_capabilities_are_explained() -> None:
    """Each capability has an explanation of its own."""
    assert len({capability.value for capability in Capability}) == len(Capability)


def test_only_the_hook_that_draws_takes_an_argument() -> None:
    """There are five hooks; those that register take none."""
    hooks = {n: f for n, f in vars(hookspecs).items() if n.startswith("amanda_")}
    assert sorted(hooks) == [
        "amanda_register_drivers",
        "amanda_register_mapping_rules",
        "amanda_register_tools",
        "amanda_render_report",
        "amanda_report_header",
    ]
    arguments = {n: list(inspect.signature(f).parameters) for n, f in hooks.items()}
    assert {n: names for n, names in arguments.items() if names} == {
        "amanda_render_report": ["report"]
    }


def test_a_wrong_call_raises_the_operators_own_error() -> None:
    """Arguments that do not fit the signature are the operator's to refuse."""
    with pytest.raises(TypeError) as vanilla:
        lb.add()
    with amanda.apply(amanda.Tool()), pytest.raises(TypeError) as instrumented:
        lb.add()
    assert str(instrumented.value) == str(vanilla.value)
