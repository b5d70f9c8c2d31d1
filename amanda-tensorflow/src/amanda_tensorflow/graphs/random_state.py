"""Random operators with a seed: a copy of one draws its sequence from the beginning.

``tf.random.uniform`` and others keep their state in the kernel that runs them. Without a seed
the numbers differ in each run anyway; with one, a copy repeats the first numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from amanda_tensorflow import _internals
from amanda_tensorflow.operators.types import CALLS, CONTROL_FLOW, is_random


def is_seeded(op: Any) -> bool:
    """True if a random operator draws the same numbers in each session."""
    return is_random(op.type) and bool(op.get_attr("seed") or op.get_attr("seed2"))


def first_seeded(operations: Iterable[Any], only_in_bodies: bool = False) -> Any:
    """A seeded random operator among these and in the functions that they run; None without any.

    Args:
        only_in_bodies: of those in loops and branches only.
    """
    return next(_seeded(operations, not only_in_bodies, set()), None)


def _seeded(operations: Iterable[Any], counts: bool, seen: set[tuple[int, bool]]) -> Iterator[Any]:
    for op in operations:
        if counts and is_seeded(op):
            yield op
        counts_there = counts or op.type in CONTROL_FLOW
        if op.type in CALLS or op.type in CONTROL_FLOW or _internals.is_function_call(op):
            # A copy replays them.
            for _, callee in _internals.known_callees(op):
                if (id(callee.graph), counts_there) not in seen:
                    seen.add((id(callee.graph), counts_there))
                    yield from _seeded(callee.graph.get_operations(), counts_there, seen)
