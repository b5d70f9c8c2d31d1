"""When the proofs of a driver are made, and what follows from one that fails."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import ClassVar

import pytest

import amanda
from amanda.cli import doctor
from amanda.errors import CoverageWarning
from amanda.interface.proofs import Proof
from amanda.registry import proofs
from amanda.testing.loopback import LoopbackDriver

NEEDED = "amanda_needed_by_a_proof"


class UntestedDriver(LoopbackDriver):
    """A driver of a framework that it was not tested with."""

    made: ClassVar[list[str]] = []
    version: ClassVar[str] = ""
    broken: ClassVar[str] = "late"

    @classmethod
    def untested_version(cls) -> str:
        """Another one for each test."""
        return cls.version

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """One that can be made at once, and one that waits."""
        return [
            Proof("early", lambda: cls._make("early"), "it is not early"),
            Proof("late", lambda: cls._make("late"), "it is not late", NEEDED),
        ]

    @classmethod
    def _make(cls, mechanism: str) -> Iterator[str]:
        cls.made.append(mechanism)
        if mechanism == cls.broken:
            yield "it is broken"


@pytest.fixture(autouse=True)
def _untested(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(UntestedDriver, "made", [])
    monkeypatch.setattr(UntestedDriver, "version", f"loopback of {request.node.name}")


def _scope() -> amanda.apply:
    return amanda.apply(amanda.Tool(), drivers=[UntestedDriver])


def _import_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NEEDED, ModuleType(NEEDED))


def _told(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, CoverageWarning)]


def test_a_proof_waits_for_the_module_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope that has imported the module makes the proof as it ends, and tells what fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _scope():
            pass
        scope = _scope()
        with scope:
            _import_needed(monkeypatch)
            assert UntestedDriver.made == ["early"]
        assert UntestedDriver.made == ["early", "late"]
    (text,) = _told(caught)
    assert text.startswith("late: switched off in the driver")
    assert "this scope ran before that was detected" in text
    assert "from now on it is not late" in text
    assert caught[0].filename == __file__
    assert "late did not work in loopback" in scope.statistics.not_seen


def test_a_mechanism_that_has_failed_late_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scopes after it do without, and say so in what they have not seen."""
    with pytest.warns(CoverageWarning, match="late: switched off"), _scope():
        _import_needed(monkeypatch)
    scope = _scope()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with scope:
            pass
    assert UntestedDriver.made == ["early", "late"]
    assert list(scope.statistics.not_seen) == ["late switched off in loopback: it is not late"]


def test_a_module_imported_between_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scope makes the proof before it begins."""
    with _scope():
        pass
    _import_needed(monkeypatch)
    scope = _scope()
    with pytest.warns(CoverageWarning, match=r"late: .*\(it is broken\); it is not late"), scope:
        pass
    assert UntestedDriver.made == ["early", "late"]
    assert list(scope.statistics.not_seen) == ["late switched off in loopback: it is not late"]


def test_an_inner_scope_leaves_late_proofs_to_the_outer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver is not proven while a scope uses it."""

    def program() -> None:
        with _scope():
            with _scope():
                _import_needed(monkeypatch)
            assert UntestedDriver.made == ["early"]

    with pytest.warns(CoverageWarning, match="late: switched off"):
        program()
    assert UntestedDriver.made == ["early", "late"]


def test_no_proof_is_made_for_a_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a scope begins nor as it ends."""
    monkeypatch.setattr(UntestedDriver, "version", "")
    _import_needed(monkeypatch)
    with _scope():
        pass
    assert UntestedDriver.made == []


def test_a_mechanism_that_is_switched_off_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second proof of the same mechanism says nothing new."""
    found = [
        Proof("one", lambda: ["broken"], "it is off"),
        Proof("one", lambda: ["broken"], "it is off", NEEDED),
    ]
    monkeypatch.setattr(UntestedDriver, "proofs", classmethod(lambda cls: found))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _scope():
            _import_needed(monkeypatch)
    assert len(_told(caught)) == 1


def test_the_doctor_makes_proofs_with_nothing_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a mechanism has failed before: the outcome is that of the mechanism itself."""
    active: list[bool] = []
    found = [Proof("one", lambda: active.append(proofs.is_proving()) or [], "it is off")]  # type: ignore[func-returns-value]
    monkeypatch.setattr(UntestedDriver, "proofs", classmethod(lambda cls: found))
    problems: list[str] = []
    lines = list(doctor.check_driver(UntestedDriver, problems))
    assert problems == []
    assert f"loopback: was not tested with {UntestedDriver.version}" in lines
    assert active
    assert all(active)
    assert proofs.failures(UntestedDriver) == {}
