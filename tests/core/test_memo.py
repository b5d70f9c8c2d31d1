"""Values that are kept within a bound."""

from __future__ import annotations

from amanda.python.memo import Memo


def test_a_full_memo_begins_anew() -> None:
    """Later keys are remembered like the first ones; setting a known key drops nothing."""
    sizes: Memo[str, int] = Memo(2)
    sizes["a"], sizes["b"] = 1, 2
    sizes["b"] = 3
    assert sizes == {"a": 1, "b": 3}
    sizes["c"] = 4
    assert sizes == {"c": 4}
