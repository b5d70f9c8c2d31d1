"""Scopes that several threads open and close, at once and for each other."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import amanda
from amanda.engine.iterations import Iterations
from amanda.state import ATTACHED, LIVE_SCOPES, STATE
from tests.core.counting import Counter, work

ROUNDS = int(os.environ.get("AMANDA_STRESS", "15"))
"""Scopes of each thread in the stress tests; ``AMANDA_STRESS=2500`` is the soak."""
_PATIENCE = 30.0


@contextlib.contextmanager
def hasty_switching() -> Iterator[None]:
    """Let threads alternate after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(function: Callable[[], None], count: int = 8) -> None:
    """Run a function in several threads at once; the first exception is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        try:
            barrier.wait(_PATIENCE)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Yielding(str):
    """A key of a dictionary that lets other threads run between a read and a write."""

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def test_what_is_not_seen_is_counted_exactly_in_threads() -> None:
    """No thread's addition to the figures of a scope that several threads share is lost."""
    rounds, reason = 10 * ROUNDS, Yielding("a reason")

    def count_often() -> None:
        (driver,) = (d for d in ATTACHED.values() if d.name == "loopback")
        for _ in range(rounds):
            driver.dispatcher.not_seen(reason, 2)

    with hasty_switching(), amanda.apply(drivers=["loopback"]) as scope:
        in_threads(count_often)
    assert scope.statistics.not_seen == {reason: 8 * 2 * rounds}


def test_the_time_of_tools_is_no_time_of_waiting_for_them() -> None:
    """The routines of a tool run one at a time: together they take no more than has passed."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_before_op(lambda *tensors: time.sleep(0.002)))
    start = time.perf_counter()
    with amanda.apply(tool, drivers=["loopback"]) as scope:
        in_threads(lambda: [work() for _ in range(4)] and None, 8)
    assert 8 * 4 * 0.002 <= scope.statistics.tool_seconds <= time.perf_counter() - start


def test_one_apply_object_serves_threads_at_once() -> None:
    """Each entry of one ``apply`` object, or of a decorated function, is a scope of its own."""
    tool = Counter()
    block = amanda.apply(tool)

    @block
    def decorated(depth: int) -> None:
        work()
        if depth:
            decorated(depth - 1)

    def enter_often() -> None:
        for _ in range(ROUNDS):
            with block:
                work()
            decorated(1)

    with hasty_switching():
        in_threads(enter_often, 4)
    # The inner call of the decorated function runs under two scopes.
    assert tool.calls == 4 * ROUNDS * (1 + 1 + 2)
    assert not LIVE_SCOPES


def _there(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_switch_can_be_left_in_another_thread() -> None:
    """It is on again in the thread that has switched."""
    switch = amanda.disabled()
    switch.__enter__()
    assert not STATE.enabled
    _there(lambda: switch.__exit__(None, None, None))
    assert STATE.enabled


def test_an_iteration_is_shared_with_threads_that_have_not_ended() -> None:
    """Also with one that Python has not started: it stays out of ``threading.enumerate()``."""
    iterations, has_begun, may_end = Iterations(), threading.Event(), threading.Event()

    def begin() -> None:
        iterations.is_shared()
        has_begun.set()
        may_end.wait(_PATIENCE)

    in_threads(iterations.is_shared)
    assert not iterations.is_shared()
    before = threading.enumerate()
    _thread.start_new_thread(begin, ())
    assert has_begun.wait(_PATIENCE)
    assert (iterations.is_shared(), threading.enumerate()) == (True, before)
    may_end.set()
