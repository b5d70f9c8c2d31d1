"""PatchSet: replacing attributes and putting them back exactly."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amanda.patching import PatchSet


class Base:
    def inherited(self) -> str:
        return "base"


class Target(Base):
    attribute = 1

    def method(self) -> str:
        return "vanilla"

    @staticmethod
    def static() -> str:
        return "vanilla"

    @classmethod
    def of_class(cls) -> str:
        return "vanilla"

    @property
    def computed(self) -> str:
        return "vanilla"


NAMES = ["attribute", "method", "static", "of_class", "computed", "inherited"]


@given(st.lists(st.sampled_from(NAMES), max_size=8))
def test_undo_is_exact(names: list[str]) -> None:
    """After undo each attribute of a class is the very object it was, or inherited again."""
    before = dict(vars(Target))
    patches = PatchSet()
    for name in names:
        patches.set(Target, name, object())
    assert len(patches) == len(names)
    patches.undo()
    assert dict(vars(Target)) == before
    assert len(patches) == 0


def test_undo_twice() -> None:
    """undo is harmless when called twice."""
    patches = PatchSet()
    patches.set(Target, "attribute", 2)
    patches.undo()
    Target.attribute = 3
    try:
        patches.undo()
        assert Target.attribute == 3
    finally:
        Target.attribute = 1


def test_modules_and_objects() -> None:
    """Attributes of modules and objects come back too."""
    module = ModuleType("m")
    module.value = 1  # type: ignore[attr-defined]
    thing = Target()
    patches = PatchSet()
    patches.set(module, "value", 2)
    patches.set(thing, "method", lambda: "patched")
    assert module.value == 2
    assert thing.method() == "patched"
    patches.undo()
    assert vars(thing) == {}
    assert module.value == 1


def test_missing_attribute() -> None:
    """An attribute that is not there is an error, unless it may be created."""
    module = ModuleType("m")
    patches = PatchSet()
    with pytest.raises(AttributeError, match="'value' to patch"):
        patches.set(module, "value", 1)
    patches.set(module, "value", 1, create=True)
    patches.undo()
    assert not hasattr(module, "value")


@pytest.mark.parametrize("name", ["method", "inherited"])
def test_wrap(name: str) -> None:
    """wrap replaces a function by one made of it, and gives the vanilla one."""
    vanilla = inspect.getattr_static(Target, name)
    patches = PatchSet()

    def shouting(function: Any) -> Any:
        return lambda self: function(self).upper()

    assert patches.wrap(Target, name, shouting) is vanilla
    assert getattr(Target(), name)() == vanilla(None).upper()
    patches.undo()
    assert inspect.getattr_static(Target, name) is vanilla


def test_slots() -> None:
    """Attributes of objects with slots come back."""

    class Slotted:
        __slots__ = ("value",)

    thing = Slotted()
    thing.value = 1
    patches = PatchSet()
    patches.set(thing, "value", 2)
    assert thing.value == 2
    patches.undo()
    assert thing.value == 1
