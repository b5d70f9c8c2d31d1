"""Interrupts in Amanda's code, with the toy framework."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from types import CodeType
from typing import Any

import pytest

import amanda
from amanda.python.interrupts import deferred
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, TOOL_LOCK, Lock, owned_locks
from amanda.testing import interrupts
from amanda.testing import loopback as lb
from amanda.tool import cache_disabled, vanilla


def test_an_interrupt_of_a_begin_or_an_end_leaves_no_scope_open() -> None:
    """Also where the user keeps the ``apply`` object; the handler of interrupts is as before."""
    is_ours = interrupts.in_packages("amanda")
    blocks = []

    def program() -> None:
        with amanda.apply(amanda.Tool(), drivers=["loopback"]) as block, amanda.disabled():
            blocks.append(block)

    found = [p for p in interrupts.points(program, is_ours) if "/scope/" in p.place[0]]
    assert len(found) > 20
    for point in found:
        assert interrupts.run(program, is_ours, point)
        assert (ATTACHED, LIVE_SCOPES, STATE.blocks) == ({}, [], ())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_until_a_block_has_ended() -> None:
    """What ends a scope is done when it is raised."""
    told: list[int] = []

    class Interrupting(amanda.Tool):
        def exit_scope(self) -> None:
            told.append(len(ATTACHED))

    def program() -> None:
        with amanda.apply(Interrupting(), drivers=["loopback"]):
            scope = LIVE_SCOPES[-1]
            invalidate = scope.drivers[0].invalidate

            def interrupted() -> None:
                invalidate()
                signal.raise_signal(signal.SIGINT)

            scope.drivers[0].invalidate = interrupted

    with pytest.raises(KeyboardInterrupt):
        program()
    assert told == []
    assert (ATTACHED, LIVE_SCOPES, STATE.blocks) == ({}, [], ())


def test_an_interrupt_of_a_tools_end_does_not_wait() -> None:
    """A tool that takes long to write its results can be interrupted; the other tools still end."""
    told: list[str] = []

    class Writing(amanda.Tool):
        def exit_scope(self) -> None:
            signal.raise_signal(signal.SIGINT)
            told.append("written")

    class Other(amanda.Tool):
        def exit_scope(self) -> None:
            told.append("other")

    with pytest.raises(KeyboardInterrupt), amanda.apply(Other(), Writing(), drivers=["loopback"]):
        pass
    assert told == ["other"]
    assert (ATTACHED, LIVE_SCOPES, STATE.blocks) == ({}, [], ())


def test_a_handler_that_a_tool_has_saved_stays_in_force_when_it_is_set_again() -> None:
    """Each interrupt after the scope is raised, and later scopes defer interrupts as before."""

    class Handling(amanda.Tool):
        def enter_scope(self, drivers: Any) -> None:
            self.saved = signal.signal(signal.SIGINT, lambda *_: None)

        def exit_scope(self) -> None:
            signal.signal(signal.SIGINT, self.saved)

    try:
        for _ in range(2):
            with amanda.apply(Handling(), drivers=["loopback"]):
                pass
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        with amanda.apply(amanda.Tool(), drivers=["loopback"]):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_deferred_in_another_thread_does_nothing() -> None:
    """Only the main thread takes interrupts."""
    handlers: list[Any] = []

    def work() -> None:
        with deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_the_end_of_a_scope_restores_what_an_interrupt_has_left() -> None:
    """Of the thread's state, the last change first; the tools' lock is free."""
    undone: list[int] = []
    with amanda.apply(amanda.Tool(), drivers=["loopback"]):
        STATE.undo.append((undone.append, (1,)))
        STATE.undo.append((undone.append, (2,)))
        TOOL_LOCK.acquire()
    assert (undone, STATE.undo, owned_locks()) == ([2, 1], [], 0)


def test_a_scope_that_a_routine_ends_leaves_its_code_entered() -> None:
    """What a routine that is running will restore is not restored before."""
    depths: list[int] = []
    scope = amanda.apply(amanda.Tool(), drivers=["loopback"])

    def end() -> None:
        depths.append(STATE.paused)
        scope.__exit__(None, None, None)
        depths.append(STATE.paused)

    scope.__enter__()
    next(iter(ATTACHED.values())).dispatcher.tool_code.enter(end)
    assert (depths, STATE.paused) == ([1, 1], 0)


def test_a_block_that_ends_in_vanilla_code_leaves_that_vanilla() -> None:
    """Also one that a tool leaves in its exit_scope()."""
    seen: list[str] = []
    depths: list[int] = []
    watching, leaving = amanda.Tool(), cache_disabled()
    watching.add_inst_for_op(lambda context: seen.append(context.get_op_id()))

    class Leaving(amanda.Tool):
        def exit_scope(self) -> None:
            leaving.__exit__(None, None, None)
            depths.append(STATE.paused)

    x = lb.tensor([1.0])
    with amanda.apply(watching, drivers=["loopback"]):
        block = cache_disabled()
        block.__enter__()
        with vanilla():
            block.__exit__(None, None, None)
            lb.mul(x, x)
        assert seen == []
        leaving.__enter__()
        with amanda.apply(Leaving(), drivers=["loopback"]):
            pass
    assert (depths, STATE.paused, STATE.undo) == ([1], 0, [])


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
    gc.collect()  # locks of other tests, which are counted
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
    found = [interrupts.InterruptPoint(("file", line), 0) for line in range(23)]

    def tried(wanted: str) -> list[interrupts.InterruptPoint]:
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
