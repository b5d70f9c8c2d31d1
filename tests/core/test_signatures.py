"""Signatures and annotations, which from Python 3.14 on are computed when they are asked for."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

from amanda.python.signatures import annotations_of, signature_of

FROM_3_14 = pytest.mark.skipif(
    sys.version_info < (3, 14), reason="this Python computes annotations where they are written"
)


def defined(source: str, **names: Any) -> dict[str, Any]:
    """The names of a program without ``from __future__ import annotations``."""
    exec(compile(source, "program", "exec", dont_inherit=True), names)
    return names


def test_signatures_are_those_of_python() -> None:
    """Parameters, defaults and annotations are as ``inspect.signature`` gives them."""
    function = defined("def f(a: int, *rest, b: 'text' = 2, **more) -> list[int]: pass")["f"]
    assert signature_of(function) == inspect.signature(function)
    with pytest.raises((TypeError, ValueError)):
        signature_of(type)


@FROM_3_14
def test_a_signature_needs_no_name_that_is_not_there() -> None:
    """What is imported for type checkers only stays a reference, and all else is computed."""
    parameters = signature_of(defined("def f(a: Missing, b: int): pass")["f"]).parameters
    assert list(parameters) == ["a", "b"]
    assert "Missing" in str(parameters["a"].annotation)
    assert parameters["b"].annotation is int


PLAIN = "class Thing(Base):\n    first: int\n"
TEXT = "from __future__ import annotations\n" + PLAIN


@pytest.mark.parametrize("source", [PLAIN, TEXT, "class Thing(Base): pass"])
def test_annotations_of_a_class_are_read_only(source: str) -> None:
    """They are those of the class itself, and the class is as before."""
    base = defined("class Base:\n    inherited: int\n")["Base"]
    thing = defined(source, Base=base)["Thing"]
    before = dict(vars(thing))
    found = annotations_of(thing)
    assert dict(vars(thing)) == before
    assert found == {PLAIN: {"first": int}, TEXT: {"first": "int"}}.get(source, {})


@FROM_3_14
def test_annotations_of_a_class_may_name_what_is_not_there() -> None:
    """They are references then."""
    assert list(annotations_of(defined("class Thing:\n    a: Missing\n")["Thing"])) == ["a"]
