"""The contract kit finds out drivers that break the contract, and keeps itself whole."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import amanda.testing
from amanda.interface.driver import Capability
from amanda.testing import DriverContract, framework, loopback
from amanda.testing.contract.base import ContractTests
from tests.core import broken_backward, broken_forward
from tests.core.faults import FAULTS

pytest_plugins = ["pytester"]

BROKEN = """
from amanda.testing import DriverContract
from tests.core import broken_backward, broken_forward
from tests.core.faults import FAULTS
from tests.core.loopback_framework import FunctionalLoopback, LoopbackFramework
from amanda.testing.loopback import LoopbackDriver

TESTS = [name for name in dir(DriverContract) if name.startswith("test_")]
for fault, (driver, tests) in {"Sound": (LoopbackDriver, None), **FAULTS}.items():
    tests = tests or [name for _, names in FAULTS.values() for name in names]
    dropped = set(TESTS) - {*tests, "test_contract_is_not_weakened"}
    members = dict.fromkeys(dropped)  # pytest does not collect None
    functional = getattr(driver, "differentiates_functions", False)
    toy = FunctionalLoopback if functional else LoopbackFramework
    members |= {"driver_cls": driver, "framework_cls": toy}
    globals()[f"Test{fault}"] = type(f"Test{fault}", (DriverContract,), members)
"""


def test_the_kit_fails_broken_drivers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each fault the contract tests that state the broken rule fail; without it they pass."""
    # One of the drivers leaves its patch behind.
    monkeypatch.setattr(loopback.ops, "rng_state", loopback.ops.rng_state)
    path = pytester.makepyfile(test_broken=BROKEN)
    record = pytester.inline_run(path, "-q", "--tb=no", "-k", "not weakened", "-p", "no:randomly")
    failed: dict[str, set[str]] = {}
    for report in record.getreports("pytest_runtest_logreport"):
        if report.failed:
            _, cls, name = report.nodeid.split("::")
            failed.setdefault(cls.removeprefix("Test"), set()).add(name.partition("[")[0])
    assert failed == {fault: set(tests) for fault, (_, tests) in FAULTS.items()}


def weakened(**members: Any) -> Any:
    """An instance of a contract class that changes some members."""
    return type("Weak", (DriverContract,), members)()


@pytest.mark.parametrize(
    "members",
    [
        {"test_replace_op": None},
        {"test_replace_op": lambda self: None},
        {"test_replace_op": pytest.mark.xfail(lambda self: None)},
        {"pytestmark": pytest.mark.skip("no")},
        {"pytestmark": [pytest.mark.xfail(reason="all of them")]},
        {"_prepared": None},
    ],
    ids=["dropped", "overridden", "xfail without a reason", "skip", "xfail", "fixture"],
)
def test_a_weakened_contract_fails(members: dict[str, Any]) -> None:
    """A subclass that drops or overrides a contract test, or marks them all, is found out."""
    with pytest.raises(AssertionError):
        weakened(**members).test_contract_is_not_weakened()


def test_an_xfail_with_a_reason_is_allowed() -> None:
    """A subclass may override a contract test that it expects to fail, if it says why."""

    @pytest.mark.xfail(reason="not yet")
    def test_replace_op(self: Any) -> None:
        raise AssertionError

    weakened(test_replace_op=test_replace_op).test_contract_is_not_weakened()


def test_the_check_itself_cannot_be_overridden() -> None:
    """A subclass that overrides the check for a weakened contract is an error at once."""
    with pytest.raises(TypeError, match="test_contract_is_not_weakened"):
        type("Weak", (DriverContract,), {"test_contract_is_not_weakened": lambda self: None})


MODES = """
from amanda.testing import DriverContract
from tests.core.loopback_framework import LoopbackFramework
from amanda.testing.loopback import LoopbackDriver

class Adapter(LoopbackFramework):
    modes = []

    def global_state(self):
        return len(self.modes)

class Leaving(LoopbackDriver):
    def exit_thread(self):
        super().exit_thread()
        Adapter.modes.append(None)

class TestLeaving(DriverContract):
    driver_cls = Leaving
    framework_cls = Adapter
"""


def test_a_mode_that_is_left_behind_fails_each_test(pytester: pytest.Pytester) -> None:
    """A driver that does not restore the thread's modes fails in the test that has found it."""
    path = pytester.makepyfile(test_modes=MODES)
    record = pytester.inline_run(path, "-k", "test_forward_only or test_random_numbers")
    failed = [str(report.longrepr) for report in record.getfailures()]
    assert len(failed) == 2
    assert all("modes of the framework, which are" in text for text in failed)


UNABLE = """
from amanda.testing import DriverContract
from tests.core.loopback_framework import LoopbackFramework
from amanda.testing.loopback import LoopbackDriver

class Unable(LoopbackDriver):
    capabilities = frozenset()

class TestUnable(DriverContract):
    driver_cls = Unable
    framework_cls = LoopbackFramework
"""


def test_a_missing_capability_skips(pytester: pytest.Pytester) -> None:
    """A test that needs a capability which the driver lacks is skipped, and the skip names it."""
    path = pytester.makepyfile(test_unable=UNABLE)
    record = pytester.inline_run(path, "-k", "test_replace_the_whole_backward")
    _, skipped, _ = record.listoutcomes()
    assert "lacks Capability.REPLACE_BACKWARD_OP" in str(skipped[0].longrepr)


def test_every_contract_test_states_its_rule() -> None:
    """The docstring of every contract test is a sentence."""
    for name in dir(DriverContract):
        if name.startswith("test_"):
            assert (getattr(DriverContract, name).__doc__ or "").strip().endswith("."), name


def test_parts_of_the_contract_do_not_collide() -> None:
    """No two parts of the contract define the same name."""
    parts = [cls for cls in DriverContract.__mro__ if cls not in (DriverContract, object)]
    names = [n for cls in parts for n in vars(cls) if not n.startswith("__")]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []


def test_every_capability_is_used_or_about_graphs() -> None:
    """Each capability that a driver can lack gates at least one contract test."""
    used = {
        capability
        for name in dir(DriverContract)
        for capability in getattr(getattr(DriverContract, name), "requires", ())
    }
    asked = (
        {Capability.STATIC_GRAPH} if "STATIC_GRAPH" in inspect.getsource(ContractTests) else set()
    )
    assert set(Capability) - used - asked == {Capability.COMPILED}


def test_unknown_names_of_the_kit() -> None:
    """amanda.testing has the names that it lists and no others."""
    assert amanda.testing.DriverContract is DriverContract
    with pytest.raises(AttributeError, match="nonsense"):
        _ = amanda.testing.nonsense


def test_there_are_faults_of_every_kind() -> None:
    """The broken drivers of both modules are registered, and each fault names its tests."""
    modules = {cls.__module__ for cls, _ in FAULTS.values()}
    assert modules == {broken_forward.__name__, broken_backward.__name__}
    assert all(hasattr(DriverContract, name) for _, names in FAULTS.values() for name in names)


def test_the_kit_is_documented() -> None:
    """The guide names all that an adapter may have, and every capability."""
    text = (Path(__file__).parents[2] / "amanda-core/docs/contract-kit.md").read_text()
    words = set(re.findall(r"\w+", text))
    public = {
        name
        for cls in (framework.EagerFramework, framework.Program)
        for name in (*vars(framework.Framework), *vars(cls), *cls.__annotations__)
        if not name.startswith("_")
    }
    assert public > {"tensor", "second_backward", "relu_consumes", "forward"}
    assert public - words == set()
    assert {capability.name for capability in Capability} - words == set()


LEAKY = """
from amanda.testing import DriverContract
from amanda.testing.loopback import LoopbackDriver
from amanda.tool import disabled
from tests.core.loopback_framework import LoopbackFramework

class Stubborn(LoopbackDriver):
    def detach(self):
        super().detach()
        raise RuntimeError("not now")

class TestLeaky(DriverContract):
    driver_cls = Stubborn
    framework_cls = LoopbackFramework

    def test_that_leaves_everything_open(self):
        self.switch = disabled()
        self.switch.__enter__()
        for _ in range(2):
            self.apply(self.probe()).__enter__()
        self.multiplication().run()

class TestAfterIt(DriverContract):
    driver_cls = LoopbackDriver
    framework_cls = LoopbackFramework
"""


def test_a_test_that_leaves_scopes_open_is_one_error(pytester: pytest.Pytester) -> None:
    """Scopes, drivers and switches that a test leaves are ended, and the error of that test."""
    path = pytester.makepyfile(test_leaky=LEAKY)
    tests = ["TestLeaky::test_that_leaves_everything_open", "TestAfterIt"]
    record = pytester.inline_run(
        *(f"{path}::{test}" for test in tests), "-q", "-p", "no:randomly", "-k", "not weakened"
    )
    passed, _, failed = record.listoutcomes()
    assert len(passed) > 200
    (report,) = failed
    assert (report.when, report.nodeid.split("::")[1:]) == ("teardown", tests[0].split("::"))
    assert str(report.longrepr) == (
        "the test left behind: a scope is open, of Probe; a scope is open, of Probe; "
        "its exit raised RuntimeError('not now'); STATE.enabled is False"
    )
