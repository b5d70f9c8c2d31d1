"""The contract that every driver keeps, as tests: a class for each subject.

``docs/contract.md`` has the rules, numbered as they are cited here. A driver's
author makes an adapter of the framework and subclasses the tests::

    from amanda.testing import DriverContract

    class TestMyDriver(DriverContract):
        driver_cls = MyDriver
        framework_cls = MyFramework

Tests that need a capability which the driver does not state are skipped, and
the skip names it. A rule that a driver breaks for now is overridden with
``@pytest.mark.xfail(reason=...)``; no test can be dropped without a word.
"""

from __future__ import annotations

import inspect
from typing import Any

from amanda.testing.contract.analyses import AnalysisTests
from amanda.testing.contract.backward_ops import BackwardOpTests
from amanda.testing.contract.contexts import ContextTests
from amanda.testing.contract.differentiation import DifferentiationTests
from amanda.testing.contract.failures import FailureTests
from amanda.testing.contract.inline import InlineTests
from amanda.testing.contract.order import OrderTests
from amanda.testing.contract.points import PointTests
from amanda.testing.contract.replacements import ReplacementTests
from amanda.testing.contract.routines import RoutineTests
from amanda.testing.contract.scopes import ScopeTests
from amanda.testing.contract.soak import SoakTests
from amanda.testing.contract.threads import ThreadTests
from amanda.testing.contract.transparency import TransparencyTests
from amanda.testing.contract.whole_ops import WholeOpTests

__all__ = ["DriverContract"]


class DriverContract(
    AnalysisTests,
    BackwardOpTests,
    ContextTests,
    DifferentiationTests,
    FailureTests,
    InlineTests,
    OrderTests,
    PointTests,
    ReplacementTests,
    RoutineTests,
    ScopeTests,
    SoakTests,
    ThreadTests,
    TransparencyTests,
    WholeOpTests,
):
    """All contract tests; see the module's docstring for how to use it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "test_contract_is_not_weakened" in vars(cls):
            raise TypeError(f"{cls.__name__} must not override test_contract_is_not_weakened")

    def test_contract_is_not_weakened(self) -> None:
        """A driver's tests leave out no contract test without an xfail that gives a reason."""
        contract = {n for n in dir(DriverContract) if n.startswith("test_")}
        changed = [n for n in contract if _is_overridden(type(self), n)]
        excused = [n for n in changed if _excuse(getattr(type(self), n))]
        assert sorted(set(changed) - set(excused)) == []
        assert not [m for m in _marks(type(self)) if m.name in ("skip", "skipif", "xfail")]
        assert "_prepared" not in _own_names(type(self))


def _own_names(cls: type) -> set[str]:
    below = cls.__mro__[: cls.__mro__.index(DriverContract)]
    return {name for c in below for name in vars(c)}


def _is_overridden(cls: type, name: str) -> bool:
    return inspect.getattr_static(cls, name, None) is not inspect.getattr_static(
        DriverContract, name
    )


def _marks(item: Any) -> list[Any]:
    marks = getattr(item, "pytestmark", [])
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


def _excuse(test: Any) -> str:
    """The reason why a test is expected to fail, "" if it is not."""
    reasons = [m.kwargs.get("reason", "") for m in _marks(test) if m.name == "xfail"]
    return reasons[0] if reasons else ""
