"""Optional extensions in C: whether one is used, and why not."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest

from amanda.errors import CoverageWarning
from amanda.interface.compiled_extension import Extension, chosen, mistake

VARIABLE = "AMANDA_MOON"
EXTENSION = Extension("amanda-moon", "amanda_moon_accel", interface=3, newest_python=(3, 14))


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The extension's package, installed."""
    made = types.SimpleNamespace(VERSION=3, load=lambda: made.native, native=object())
    monkeypatch.setitem(sys.modules, "amanda_moon_accel", made)
    monkeypatch.setattr("sys.platform", "linux")
    return made


def test_one_that_fits_is_loaded(package: types.SimpleNamespace) -> None:
    """Nothing speaks against an extension that fits."""
    assert EXTENSION.refusal() == ""
    assert EXTENSION.load() is package.native


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("platform.python_implementation", lambda: "PyPy", "needs CPython, and this is PyPy"),
        ("amanda.python._internals.has_gil", lambda: False, "a free-threaded build"),
        ("amanda.python._internals.has_jit", lambda: True, "the JIT of this Python"),
        ("sys.version_info", (3, 10, 0), "was not tested with Python 3.10"),
        ("sys.version_info", (3, 99, 0), "was not tested with Python 3.99"),
        ("sys.platform", "plan9", "was not tested on plan9"),
    ],
)
def test_what_was_not_tested_is_refused(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thing that speaks against it is a reason, which names the distribution."""
    with monkeypatch.context() as patched:
        patched.setattr(name, value)
        found = EXTENSION.refusal()
    assert reason in found
    assert "amanda-moon-accel" in found


def test_untested_frameworks_are_refused() -> None:
    """A driver says with which version of its framework the extension was not tested."""
    assert EXTENSION.refusal("Moon 9") == "amanda-moon-accel was not tested with Moon 9"


def test_packages_that_do_not_fit_are_refused(
    package: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without its extension, one of another release, and none: each says what to do."""

    def load() -> None:
        raise ImportError("it was built for Moon 1: install it anew")

    package.load = load
    assert EXTENSION.refusal() == (
        "the extension of amanda-moon-accel cannot be loaded: it was built for Moon 1: install it "
        "anew"
    )
    package.VERSION = 2
    assert EXTENSION.refusal().startswith(
        "amanda-moon-accel and amanda-moon are of different releases"
    )
    monkeypatch.setitem(sys.modules, "amanda_moon_accel", None)
    advice = "try: pip install --no-build-isolation --no-binary :all: amanda-moon-accel"
    assert EXTENSION.refusal().endswith(f"is not installed; {advice}")


@pytest.mark.parametrize(("asked", "name"), [("", "auto"), ("off", "off"), ("auto", "auto")])
def test_a_variable_chooses_among_names(
    asked: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the names counts as it is; nothing as the default."""
    monkeypatch.setenv(VARIABLE, asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(VARIABLE, ("auto", "off")) == name
    assert mistake(VARIABLE, ("auto", "off")) == ""


def test_another_word_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is none of the names counts as the default, and is told of."""
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.warns(CoverageWarning, match="'fast', not one of auto, off: auto is used"):
        assert chosen(VARIABLE, ("auto", "off")) == "auto"
    assert mistake(VARIABLE, ("auto", "off")) == "AMANDA_MOON=fast is not one of auto, off"
