"""Environment variables that choose one of several ways."""

from __future__ import annotations

import warnings

import pytest

from amanda.errors import CoverageWarning
from amanda.interface.settings import chosen, mistake

VARIABLE = "AMANDA_MOON"


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
