"""Binding a call to flat inputs and attributes, and calling again with other inputs."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amanda.driver import Signature


class Tensor:
    """A tensor that can be neither hashed nor referenced weakly."""

    __slots__ = ("number",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int = 0) -> None:
        self.number = number


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def function(x, w, bias=None, *rest, flag=1, mask=None, **more):  # type: ignore[no-untyped-def]
    """Has every kind of parameter."""
    return x, w, bias, rest, flag, mask, more


SIGNATURE = Signature(function, is_tensor, ["x", "w", "bias", "mask"])

TENSOR = st.builds(Tensor)
VALUE = TENSOR | st.integers() | st.lists(TENSOR | st.integers(), max_size=3)
CALLS = st.tuples(
    st.lists(VALUE, min_size=2, max_size=5),
    st.dictionaries(st.sampled_from(["flag", "mask", "other", "more_still"]), VALUE, max_size=3),
)


def identities(value: Any) -> Any:
    """The structure of a value, with tensors by identity."""
    if isinstance(value, (list, tuple)):
        return [type(value), *map(identities, value)]
    if isinstance(value, dict):
        return {key: identities(item) for key, item in value.items()}
    return id(value) if is_tensor(value) else value


@given(CALLS)
def test_the_call_is_rebuilt_as_it_was(call: tuple[list[Any], dict[str, Any]]) -> None:
    """Positional arguments stay positional, keywords keywords, and defaults are left out."""
    args, kwargs = call
    bound = SIGNATURE.bind(args, kwargs)
    again = bound.rebuild(bound.inputs)
    assert identities(again[0]) == identities(args)
    assert identities(again[1]) == identities(kwargs)
    assert identities(bound.call(function, bound.inputs)) == identities(function(*args, **kwargs))


@given(CALLS)
def test_nothing_of_the_call_is_kept(call: tuple[list[Any], dict[str, Any]]) -> None:
    """Without tensors, the arguments can be filled with others, and hold none of the old ones."""
    args, kwargs = call
    bound = SIGNATURE.bind(args, kwargs)
    others = [Tensor(i) for i, _ in enumerate(bound.inputs)]
    filled = SIGNATURE.bind(*bound.without_tensors().rebuild(others))
    assert [id(t) for t in filled.inputs if t is not None] == [id(t) for t in others]
    assert filled.attributes == bound.attributes
    assert bound.without_tensors().inputs == []


@pytest.mark.parametrize(
    ("args", "kwargs", "names"),
    [
        ([1, 2], {}, ["x", "w", "bias", "mask"]),
        ([1], {"w": 2}, ["x", "w", "bias", "mask"]),
        ([], {"w": 2, "x": 1, "mask": 3}, ["x", "w", "bias", "mask"]),
        ([1, [2, None, 3]], {}, ["x", "w", "w", "w", "bias", "mask"]),
        ([1, 2, 3, 4, 5], {}, ["x", "w", "bias", "rest", "rest", "mask"]),
    ],
)
def test_inputs_are_in_declared_order(
    args: list[Any], kwargs: dict[str, Any], names: list[str]
) -> None:
    """However they are passed, lists are expanded in place, and absent tensors are None."""

    def tensors(value: Any) -> Any:
        if isinstance(value, list):
            return [tensors(item) for item in value]
        return None if value is None else Tensor(value)

    bound = SIGNATURE.bind(tensors(args), {n: tensors(v) for n, v in kwargs.items()})
    assert bound.names == names
    numbers = [t.number for t in bound.inputs if t is not None]
    assert numbers == sorted(numbers)
    assert bound.attributes == {"flag": 1}


def test_a_tensor_for_an_absent_input_is_a_keyword() -> None:
    """A routine may give a value for an optional input that the caller left out."""
    bound = SIGNATURE.bind([Tensor(1), Tensor(2)], {})
    bias = Tensor(3)
    assert bound.call(function, [*bound.inputs[:2], bias, None])[2] is bias


def test_tensors_in_dictionaries_and_named_tuples() -> None:
    """They come back in a dictionary of the same keys and a tuple of the same class."""
    Pair = collections.namedtuple("Pair", "left right")
    left, right = Tensor(), Tensor()
    bound = SIGNATURE.bind([Pair(left, 1), {"a": right, "b": 2}], {})
    pair, table, *_ = bound.call(function, bound.inputs)
    assert type(pair) is Pair
    assert pair.left is left
    assert table["a"] is right
    assert table["b"] == 2


def test_constants_among_variable_arguments_are_attributes() -> None:
    """Each has a name of its own."""
    bound = SIGNATURE.bind([Tensor(), Tensor(), None, Tensor(), 4], {})
    assert bound.attributes == {"rest[1]": 4, "flag": 1}
    bound = SIGNATURE.bind([Tensor(), Tensor(), None, 3, 4], {})
    assert bound.attributes == {"rest": (3, 4), "flag": 1}


def test_tensor_parameters_are_learned() -> None:
    """Where nothing is declared, None is an absent tensor once the parameter has got one."""
    signature = Signature(lambda x, bias=None: None, is_tensor)
    assert signature.bind([Tensor()], {}).names == ["x"]
    assert signature.bind([Tensor(), Tensor()], {}).names == ["x", "bias"]
    assert signature.bind([Tensor()], {}).names == ["x", "bias"]


@pytest.mark.parametrize("unknown", [None, print, object()])
def test_without_a_signature_the_order_is_the_callers(unknown: Any) -> None:
    """A function that tells no signature, or none at all."""
    signature = Signature(None if unknown is print else unknown, is_tensor)
    x, y = Tensor(), Tensor()
    bound = signature.bind([x, 2, y], {"axis": 1})
    assert bound.inputs == [x, y]
    assert bound.names == ["", ""]
    assert bound.attributes == {"argument0": 2, "axis": 1}
    given: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    assert bound.call(given, [x, y]) == ((x, 2, y), {"axis": 1})


def test_wrong_arguments_raise_as_the_call_would() -> None:
    """A call that does not fit the signature is a TypeError."""
    with pytest.raises(TypeError, match="missing a required argument"):
        SIGNATURE.bind([Tensor()], {})
