"""PatchSet: replacing attributes and putting them back exactly."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amanda.python.patching import OWN_FRAMES_HIDDEN, PatchSet, hide_own_frames, named_as


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


class Described:
    """Attributes that the instance's ``__dict__`` does not hold, or holds in another form."""

    __slots__ = ("__dict__", "unset", "value")

    def __init__(self) -> None:
        self.value = 1
        self.calls: list[Any] = []
        self._kept = 1

    @property
    def kept(self) -> int:
        return self._kept

    @kept.setter
    def kept(self, value: int) -> None:
        self.calls.append(value)
        self._kept = value

    @property
    def doubled(self) -> int:
        return self.__dict__["doubled"] // 2

    @doubled.setter
    def doubled(self, value: int) -> None:
        self.__dict__["doubled"] = 2 * value


def sample(first: int, second: int = 2, *, third: int = 3) -> int:
    """A function to be patched."""
    return first + second + third


def other(first: int, second: int = 5, *, third: int = 7) -> int:
    return -first


OF_FUNCTIONS = [
    ("__code__", other.__code__), ("__defaults__", (9,)), ("__defaults__", None),
    ("__kwdefaults__", {"third": 9}), ("__doc__", "patched"), ("__name__", "patched"),
    ("__qualname__", "patched"), ("__module__", "patched"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OF_FUNCTIONS)
def test_attributes_of_functions(name: str, value: Any) -> None:
    """What a function keeps outside of its ``__dict__`` comes back as the very object it was."""
    vanilla, before = getattr(sample, name), dict(vars(sample))
    patches = PatchSet()
    patches.set(sample, name, value)
    assert getattr(sample, name) == value
    patches.undo()
    assert getattr(sample, name) is vanilla
    assert vars(sample) == before
    assert sample(1) == 6


def test_patches_of_one_attribute_are_undone_in_reverse() -> None:
    """Of several patches of one attribute, the first one's old value is the last to come back."""
    vanilla = sample.__code__
    patches = PatchSet()
    for code in (other.__code__, (lambda first: 0).__code__, other.__code__):
        patches.set(sample, "__code__", code)
    patches.undo()
    assert sample.__code__ is vanilla


def test_code_can_be_wrapped() -> None:
    """wrap gives the code itself, not the descriptor that keeps it."""
    patches = PatchSet()
    vanilla = sample.__code__
    assert patches.wrap(sample, "__code__", lambda code: code.replace(co_name="x")) is vanilla
    assert sample.__code__.co_name == "x"
    patches.undo()
    assert sample.__code__ is vanilla


def test_an_unset_slot_is_unset_again() -> None:
    """A slot that holds nothing is emptied at undo."""
    thing = Described()
    patches = PatchSet()
    patches.set(thing, "unset", 1, create=True)
    patches.set(thing, "value", 2)
    patches.undo()
    assert not hasattr(thing, "unset")
    assert thing.value == 1


def test_properties_are_set_and_put_back_by_their_setters() -> None:
    """Also one that keeps another form of the value under its own name."""
    thing = Described()
    thing.doubled = 3
    before = dict(vars(thing))
    patches = PatchSet()
    patches.set(thing, "kept", 5)
    patches.set(thing, "doubled", 7)
    assert (thing.kept, thing.doubled) == (5, 7)
    patches.undo()
    assert thing.calls == [5, 1]
    assert vars(thing) == before
    assert (thing.kept, thing.doubled) == (1, 3)


class Redirecting:
    """Keeps some attributes elsewhere, as ``torch.nn.Module`` keeps its parameters."""

    def __init__(self) -> None:
        self.__dict__["_parameters"] = {"first": 1, "second": 2}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._parameters[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._parameters[name] = value

    def __delattr__(self, name: str) -> None:
        del self._parameters[name]


def test_attributes_that_are_kept_elsewhere() -> None:
    """An object that redirects attributes gets them back where it keeps them."""
    thing = Redirecting()
    patches = PatchSet()
    patches.set(thing, "first", 3)
    patches.wrap(thing, "second", lambda value: -value)
    patches.set(thing, "third", 3, create=True)
    assert thing._parameters == {"first": 3, "second": -2, "third": 3}  # noqa: SLF001
    patches.undo()
    assert list(thing._parameters.items()) == [("first", 1), ("second", 2)]  # noqa: SLF001


@pytest.mark.parametrize(
    ("name", "value"),
    [("__name__", "x"), ("__qualname__", "x"), ("__doc__", "x"), ("__bases__", (Base,))],
)
def test_attributes_that_types_keep(name: str, value: Any) -> None:
    """A class that is patched where its metaclass keeps the value is exactly as it was."""

    class Fresh(Target):
        pass

    before, vanilla = dict(vars(Fresh)), (Fresh.__name__, Fresh.__qualname__, Fresh.__bases__)
    patches = PatchSet()
    patches.set(Fresh, name, value)
    assert getattr(Fresh, name) == value
    patches.undo()
    assert (Fresh.__name__, Fresh.__qualname__, Fresh.__bases__) == vanilla
    assert dict(vars(Fresh)) == before


def test_one_that_cannot_be_put_back_does_not_keep_the_others() -> None:
    """All others are put back before its error is raised."""

    class Stubborn:
        first, second = 1, 2

        def __delattr__(self, name: str) -> None:
            if name == "second":
                raise TypeError("stays")
            super().__delattr__(name)

    thing = Stubborn()
    patches = PatchSet()
    for name in ("first", "second"):
        patches.set(thing, name, 3)
    with pytest.raises(TypeError, match="stays"):
        patches.undo()
    assert vars(thing) == {"second": 3}
    patches.undo()


def test_an_attribute_that_cannot_be_set_leaves_nothing_to_undo() -> None:
    """A property without a setter raises, and undo has nothing to put back."""
    patches = PatchSet()
    with pytest.raises(AttributeError):
        patches.set(Target(), "computed", 1)
    assert len(patches) == 0
    patches.undo()


def test_a_wrapper_is_named_as_what_it_replaces() -> None:
    """Errors about wrong arguments name the framework's function, and the wrapper keeps its own
    module; what has no name of its own leaves the wrapper's."""

    def vanilla(tensor: int) -> int:
        return tensor

    def wrapper(tensor: int) -> int:
        return vanilla(tensor) + 1

    messages = []
    named = named_as(vanilla, wrapper)
    for function in (vanilla, named):
        with pytest.raises(TypeError) as raised:
            function(1, 2)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert named.__module__ == __name__
    assert named_as(object(), lambda: None).__name__ == "<lambda>"


def test_a_patch_that_passes_an_exception_on_is_not_in_its_traceback() -> None:
    """Its own frames are removed, and no others; those of an exception of its own stay."""

    def names(call: Callable[[], Any]) -> list[str]:
        with pytest.raises(KeyError) as raised:
            call()
        return [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:]

    def compiled(source: str, **names: Any) -> Any:
        found = {"__name__": "framework", **names}
        exec(source, found)
        return found["vanilla"]

    def patched(vanilla: Any) -> Any:
        def inner() -> Any:
            return vanilla()

        def patch() -> Any:
            with OWN_FRAMES_HIDDEN:
                return inner()

        return lambda: patch()

    def own() -> None:
        raise KeyError

    def of_c() -> Any:
        try:
            return {}.pop("no entry")
        except BaseException as error:
            hide_own_frames(error)
            raise

    raises = compiled("def vanilla():\n raise KeyError")
    assert names(patched(raises)) == ["<lambda>", "vanilla"]
    calls_back = compiled("def vanilla():\n own()", own=own)
    assert names(patched(calls_back)) == ["<lambda>", "vanilla", "own"]
    assert names(patched(own)) == ["<lambda>", "patch", "inner", "own"]
    assert names(of_c) == []
