"""Values that are kept within a bound."""

from __future__ import annotations

from types import SimpleNamespace

from amanda.interface import specs
from amanda.python.memo import Memo


def test_a_full_memo_begins_anew() -> None:
    """Later keys are remembered like the first ones; setting a known key drops nothing."""
    sizes: Memo[str, int] = Memo(2)
    sizes["a"], sizes["b"] = 1, 2
    sizes["b"] = 3
    assert sizes == {"a": 1, "b": 3}
    sizes["c"] = 4
    assert sizes == {"c": 4}


def test_descriptions_are_shared_however_many_shapes_there_were() -> None:
    """A program with ever new shapes keeps one description of equal tensors."""

    def described(size: int) -> specs.Specs:
        return specs.specs_of([SimpleNamespace(shape=(size, 7), dtype="float32", device="cpu")])

    for size in range(5000):
        found = described(size)
        assert described(size) is found
