"""Interrupts at any line of Amanda's code, with the toy framework."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType

import pytest

import amanda
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, Lock, owned_locks
from amanda.testing import interrupts
from amanda.testing import loopback as lb


def test_an_interrupt_at_the_first_line_of_an_exit_ends_the_scope() -> None:
    """Also where the user keeps the exception and the ``apply`` object."""
    is_ours = interrupts.in_packages("amanda")
    blocks = []

    def program() -> None:
        with amanda.apply(amanda.Tool(), drivers=["loopback"]) as block, amanda.disabled():
            blocks.append(block)

    exits = [p for p in interrupts.points(program, is_ours) if "scope/blocks.py" in p.place[0]]
    assert len(exits) > 20
    for point in exits:
        assert interrupts.run(program, is_ours, point)
        assert (ATTACHED, LIVE_SCOPES, STATE.blocks) == ({}, [], ())


class Telling(amanda.Tool):
    """Tells whether anything is attached when its scope ends."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[int] = []

    def exit_scope(self) -> None:
        self.attached.append(len(ATTACHED))
        raise KeyboardInterrupt


def test_everything_is_undone_before_tools_hear_of_the_end() -> None:
    """A tool that is interrupted while it summarises leaves nothing attached."""
    tool = Telling()
    with pytest.raises(KeyboardInterrupt), amanda.apply(tool, drivers=["loopback"]):
        pass
    assert set(tool.attached) == {0}
    assert not LIVE_SCOPES


def test_an_interrupt_leaves_no_lock_taken() -> None:
    """A thread that is interrupted while it takes, holds or leaves a lock has left it."""
    lock = Lock()
    entries: list[int] = []

    def program() -> None:
        lock.hold(lambda: lock.hold(entries.append, owned_locks()))

    program()
    assert entries == [1]
    for point in interrupts.points(program, interrupts.in_packages("amanda")):
        assert interrupts.run(program, interrupts.in_packages("amanda"), point)
        assert (owned_locks(), lock.is_owned()) == (0, False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_leaves_no_lock_taken() -> None:
    """A lock that another thread holds is free in a forked child, and what it holds itself is its
    own."""
    lock, own = Lock(), Lock()
    taken, done = threading.Event(), threading.Event()

    def wait() -> None:
        taken.set()
        done.wait(30)

    other = threading.Thread(target=lock.hold, args=(wait,))
    other.start()
    assert taken.wait(30)
    child = own.hold(os.fork)
    if child == 0:
        os._exit(0 if lock.acquire(timeout=0) and not own.is_owned() else 1)
    done.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_parts_of_a_sweep_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sweep can be made in parts: together they try each point once."""
    found = [interrupts.Point(("file", line), 0) for line in range(23)]

    def tried(wanted: str) -> list[interrupts.Point]:
        monkeypatch.setenv(interrupts.VARIABLE, wanted)
        return list(interrupts.sample(found))

    assert tried("all") == found
    assert 3 <= len(tried("3")) <= 4
    assert sorted(tried("1/3") + tried("2/3") + tried("3/3")) == found


def test_points_are_lines_of_ours() -> None:
    """Of core the framework to test with is not ours, but its driver is."""
    is_ours = interrupts.in_packages("amanda.testing.loopback")
    assert is_ours(amanda.apply.__init__.__code__)
    assert is_ours(lb.LoopbackDriver.claim_nodes.__code__)
    assert not is_ours(lb.Tensor.tolist.__code__)
    assert not is_ours(test_points_are_lines_of_ours.__code__)
    outer = sys.gettrace()
    with pytest.raises(ZeroDivisionError):
        interrupts.points(lambda: 1 // 0, is_ours)
    assert sys.gettrace() is outer


def test_points_are_returns_of_calls_within_a_line() -> None:
    """Beside the begin of each line, where C code returns into one: a function that has changed
    something may be kept from noting it. Python code that is called has lines of its own."""

    def note(value: int) -> int:
        return value

    def program() -> None:
        done.append((len("a"), note(len("ab"))))

    def is_program(code: CodeType) -> bool:
        return code is program.__code__

    done: list[tuple[int, int]] = []
    found = interrupts.points(program, is_program)
    # The line, and the returns of both calls of len(); append() returns as the function does.
    within = [point for point in found if point.place[2]]
    assert len(found) - len(within) == 1
    assert 2 <= len(within) <= 3
    done.clear()
    for point in found:
        assert interrupts.run(program, is_program, point)
    assert len(done) == len(within) - 2


def test_an_interrupt_in_an_exception_handler_leaves_no_current_exception() -> None:
    """What a program handles when it is interrupted is not handled any more afterwards."""

    def program() -> None:
        try:
            raise IndexError
        except IndexError:
            pass

    def is_program(code: CodeType) -> bool:
        return code is program.__code__

    for point in interrupts.points(program, is_program):
        assert interrupts.run(program, is_program, point)
        assert sys.exception() is None
