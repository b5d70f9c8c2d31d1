"""Timers of operators that overlap, as an executor with several threads runs them."""

from __future__ import annotations

import threading

from amanda.inline import Timer


def test_executions_that_overlap_on_one_thread_are_counted() -> None:
    """Each beginning has an end, whichever comes first; the sum is that of all durations."""
    timer = Timer()
    timer.start()
    timer.start()
    timer.stop()
    timer.stop()
    assert timer.executions == 2
    assert timer.nanoseconds > 0
    timer.stop()
    assert timer.executions == 2


def test_an_execution_may_end_on_another_thread() -> None:
    """It is counted there."""
    timer = Timer()
    timer.start()
    thread = threading.Thread(target=timer.stop)
    thread.start()
    thread.join()
    assert timer.executions == 1


def test_operators_that_raise_are_forgotten() -> None:
    """They are not counted, and do not make the timer grow."""
    timer = Timer()
    for _ in range(1000):
        timer.start()
    assert len(timer._started) < 100  # noqa: SLF001
    timer.stop()
    assert timer.executions == 1
