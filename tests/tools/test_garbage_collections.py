"""Garbage collections of Python in the times of operators."""

from __future__ import annotations

import threading

import numpy as np

from amanda_tools._timelines.garbage_collections import COLLECTION, Collections

THREAD = threading.get_native_id()


def noted(*intervals: tuple[int, int]) -> Collections:
    collections = Collections()
    for start, end in intervals:
        collections.note("start", start)
        collections.note("stop", end)
    return collections


def durations(collections: Collections, *intervals: tuple[int, int], thread: int) -> list[int]:
    """The durations of operators without the collections within them."""
    rows = [(0, start, end - start, thread) for start, end in intervals]
    records = np.array(rows, np.int64).reshape(-1, 4)
    collections.subtract_gc_pauses(records)
    found: list[int] = records[:, 2].tolist()
    return found


def test_all_collections_within_an_operator_are_subtracted() -> None:
    """Also the later ones, which end after the shortened operator; and no other ones."""
    collections = noted((10, 30), (85, 95))
    operators = (0, 100), (10, 30), (20, 90), (31, 95), (12, 13), (96, 99)
    assert durations(collections, *operators, thread=THREAD) == [70, 0, 70, 54, 1, 3]
    assert durations(collections, (0, 100), thread=THREAD + 1) == [100]


def test_a_collection_is_subtracted_from_operators_that_are_recorded_later() -> None:
    """An operator may be open while others are counted; a collection itself is given once."""
    collections = noted((10, 30))
    assert durations(collections, (40, 50), thread=THREAD) == [10]
    assert collections.take_new().tolist() == [[COLLECTION, 10, 20, THREAD]]
    assert durations(collections, (0, 100), thread=THREAD) == [80]
    assert durations(collections, thread=THREAD) == []
    assert collections.take_new().tolist() == []
    assert (collections.calls, collections.nanoseconds) == (1, 20)
