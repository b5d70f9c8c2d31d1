"""Containers in one another."""

from __future__ import annotations

import attrs
import pytest

from amanda.python.nested import leaves, plain


def test_a_container_that_is_held_twice_is_gone_into_once() -> None:
    """A container may also hold itself; a leaf counts at each place."""
    twice = (2, {"a": 3})
    every = [1, twice, [1, twice]]
    every.append(every)
    assert list(leaves(every)) == [1, 2, 3, 1]
    assert list(leaves("no container")) == ["no container"]


def test_what_is_a_container_is_up_to_the_caller() -> None:
    """Items may be made when they are asked for."""
    assert list(leaves(4, lambda n: [n - 1, [n]] if isinstance(n, int) and n > 2 else None)) == [
        *(2, [3], [4])
    ]


def test_plain_data_shows_where_a_container_holds_itself() -> None:
    """What is held twice is shown twice, and there is an ellipsis for what is around it."""
    twice = (2, {"a": 3})
    every = [twice, twice]
    every.append(every)  # type: ignore[arg-type]
    assert plain(every) == [[2, {"a": 3}], [2, {"a": 3}], "..."]


def test_objects_are_text_in_plain_data() -> None:
    """Classes have their names, and a failing ``str()`` fails nothing."""

    class Failing:
        def __str__(self) -> str:
            raise ValueError

    @attrs.frozen
    class Own:
        number: int

    assert plain([Failing, Failing(), 80 * "ab"])[1:] == ["<Failing>", 80 * "ab"]
    assert plain(pytest.raises) == "raises"
    assert plain(Own(1)).endswith("Own(number=1)")
