"""Scopes, threads and the global state, beyond what the contract says."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import amanda
from amanda.state import ATTACHED, LIVE_SCOPES, STATE
from amanda.testing import loopback as lb
from tests.core.counting import Counter, work


class Failing(lb.LoopbackDriver):
    """Cannot be attached."""

    name = "failing"

    def attach(self) -> None:
        super().attach()
        self.detach()
        raise OSError("no way")


def test_a_failed_attach_leaves_nothing() -> None:
    """If a driver cannot be attached, those attached before it are detached again."""
    start = threading.Thread.start
    with pytest.raises(OSError, match="no way"):
        amanda.apply(Counter(), drivers=["loopback", Failing]).__enter__()
    assert not ATTACHED
    assert not LIVE_SCOPES
    assert STATE.scopes == ()
    assert threading.Thread.start is start
    work()


def test_a_failed_inner_scope_leaves_the_outer_one() -> None:
    """If an inner scope cannot be entered, the outer one goes on."""
    tool = Counter()
    with amanda.apply(tool, drivers=["loopback"]):
        with pytest.raises(OSError, match="no way"):
            amanda.apply(Counter(), drivers=["loopback", Failing]).__enter__()
        work()
    assert tool.calls == 1


def test_one_driver_serves_nested_scopes() -> None:
    """A driver is attached once, and detached with the last scope that uses it."""
    with amanda.apply(Counter()):
        driver = ATTACHED[lb.LoopbackDriver]
        with amanda.apply(Counter()):
            assert ATTACHED[lb.LoopbackDriver] is driver
        assert ATTACHED[lb.LoopbackDriver] is driver
    assert not ATTACHED


def test_exit_twice() -> None:
    """A scope that was left cannot be left again."""
    scope = amanda.apply(Counter())
    scope.__enter__()
    scope.__exit__(None, None, None)
    with pytest.raises(IndexError):
        scope.__exit__(None, None, None)
    assert not LIVE_SCOPES


def test_statistics_before_the_first_block() -> None:
    """Before its first block has ended, the statistics of apply are zero."""
    assert amanda.apply(Counter()).statistics.ops_seen == 0


def test_tool_seconds() -> None:
    """The time spent in tools is part of the statistics."""
    with amanda.apply(Counter()) as scope:
        work()
    assert scope.statistics.tool_seconds > 0


def test_exit_stack_in_a_generator() -> None:
    """A scope that a generator holds through contextlib pauses with the generator."""
    tool = Counter()

    def generator() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(amanda.apply(tool))
            work()
            yield
            work()

    running = generator()
    next(running)
    work()
    assert tool.calls == 1
    assert list(running) == []
    assert tool.calls == 2


@pytest.mark.parametrize("is_closed", [True, False])
def test_abandoned_generator(is_closed: bool) -> None:
    """A generator that is closed or dropped while suspended in a scope leaves nothing behind."""

    def generator() -> Iterator[None]:
        with amanda.apply(Counter()):
            yield

    running = generator()
    next(running)
    assert LIVE_SCOPES
    if is_closed:
        running.close()
    else:
        del running
    assert not LIVE_SCOPES
    assert not ATTACHED


def test_asynccontextmanager() -> None:
    """A scope in a coroutine that waits does not instrument what runs meanwhile."""
    tool = Counter()

    @contextlib.asynccontextmanager
    async def counted() -> AsyncIterator[None]:
        with amanda.apply(tool):
            yield

    async def waiting() -> None:
        async with counted():
            work()
            await _Pause()
            work()

    coroutine = waiting()
    coroutine.send(None)
    work()
    assert tool.calls == 1
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert tool.calls == 2


class _Pause:
    """Suspends a coroutine once."""

    def __await__(self) -> Iterator[None]:
        yield


def test_thread_subclasses_are_covered() -> None:
    """A thread class with a run of its own is covered, and is left as it was."""
    tool = Counter()

    class Worker(threading.Thread):
        def run(self) -> None:
            work()

    with amanda.apply(tool):
        thread = Worker()
        thread.start()
        thread.join()
    assert tool.calls == 1
    assert "run" not in vars(thread)


def test_threads_with_a_run_of_their_own() -> None:
    """A thread whose run is an attribute of the object is covered, and keeps it."""
    tool = Counter()
    thread = threading.Thread()
    thread.run = work  # type: ignore[method-assign]
    with amanda.apply(tool):
        thread.start()
        thread.join()
    assert tool.calls == 1
    assert vars(thread)["run"] is work


def test_thread_started_twice() -> None:
    """A thread that is started again inside of a scope is an error as ever, and left as it was."""
    thread = threading.Thread(target=work)
    with amanda.apply(Counter()):
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
    assert "run" not in vars(thread)


def test_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for which the system has no room is left as it was, and may be started later."""
    name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    thread, tool = threading.Thread(target=work), Counter()
    with amanda.apply(tool), monkeypatch.context() as patch:
        patch.setattr(threading, name, refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.start()
    assert "run" not in vars(thread)
    thread.start()
    thread.join()
    assert tool.calls == 0


def test_thread_started_by_a_tool() -> None:
    """A thread that a tool starts is vanilla."""
    inner = Counter()

    def analyse(context: amanda.OpContext) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, inner):
        work()
    assert inner.calls == 1


def test_exception_in_a_covered_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covered thread that fails does so as ever."""
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_type))

    def fail() -> None:
        raise KeyError

    with amanda.apply(Counter()):
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert caught == [KeyError]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_as_before_the_scope() -> None:
    """In a forked child no driver is attached, no scope open and no thread start patched."""
    start, finders = threading.Thread.start, list(sys.meta_path)
    tool = Counter()
    with amanda.apply(tool):
        child = os.fork()
        if child == 0:
            clean = not ATTACHED and not LIVE_SCOPES and not STATE.scopes
            same = threading.Thread.start is start and sys.meta_path == finders
            with amanda.apply(tool):
                work()
            os._exit(0 if clean and same and tool.calls == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        work()
    assert tool.calls == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_scope_can_be_left_in_a_forked_child() -> None:
    """A forked child that leaves the with-block it was born in does so quietly."""
    scope = amanda.apply(Counter())
    scope.__enter__()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            scope.__exit__(None, None, None)
            work()
            code = 0
        finally:
            os._exit(code)
    scope.__exit__(None, None, None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Companion(Counter):
    """Runs an operator of its own where a scope begins and ends."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.told: list[Any] = []
        self._fails_at = fails_at

    def enter_scope(self, drivers: Any) -> None:
        work()
        self.told.append([driver.name for driver in drivers])
        if self._fails_at == "begin":
            raise OSError("no begin")

    def exit_scope(self) -> None:
        work()
        self.told.append("end")
        if self._fails_at == "end":
            raise OSError("no end")


def test_tools_are_told_where_a_scope_begins_and_ends() -> None:
    """Once each, with the drivers; what they run there is vanilla, within outer scopes too."""
    outer, inner = Counter(), Companion()
    with amanda.apply(outer, drivers=["loopback"]):
        with amanda.apply(inner, drivers=["loopback"]):
            work()
            assert inner.told == [["loopback"]]
        assert inner.told == [["loopback"], "end"]
        work()
    assert (outer.calls, inner.calls) == (2, 1)


@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_tool_that_fails_where_a_scope_begins_or_ends(place: str) -> None:
    """Its error reaches the user; every tool hears of the end, and nothing is left attached."""
    first, second = Companion(place), Companion()
    with pytest.raises(OSError, match=f"no {place}"), amanda.apply(first, second):
        pass
    assert first.told[-1] == second.told[-1] == "end"
    assert not ATTACHED
    assert not LIVE_SCOPES
    assert STATE.paused == 0


def test_a_thread_that_never_ends_keeps_no_scope() -> None:
    """A thread that has inherited a scope, and waits on after its end, keeps neither the scope nor
    its tools alive; a scope that goes on covers it still."""
    waits, goes_on = threading.Event(), threading.Event()
    tool, outer = amanda.Tool(), amanda.Tool()
    reference = weakref.ref(tool)
    seen: list[int] = []

    def wait() -> None:
        waits.set()
        goes_on.wait()
        seen.append(len(STATE.scopes))

    with amanda.apply(outer):
        with amanda.apply(tool):
            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            waits.wait()
        del tool
        gc.collect()
        assert reference() is None
        goes_on.set()
        thread.join()
    assert seen == [1]


@pytest.mark.parametrize("shortage", [RecursionError, MemoryError])
@pytest.mark.parametrize("step", ["reason_unusable", "attach", "enter_thread"])
def test_a_shortage_of_the_program_is_no_fault_of_a_driver(
    monkeypatch: pytest.MonkeyPatch, step: str, shortage: type[Exception]
) -> None:
    """A scope that the stack or memory is too small for raises, and the next one is as ever."""
    driver = lb.LoopbackDriver

    def fail(*_: Any) -> None:
        raise shortage

    with monkeypatch.context() as patched:
        patched.setattr(driver, step, classmethod(fail) if step == "reason_unusable" else fail)
        with pytest.raises(shortage):
            amanda.apply(Counter()).__enter__()
    assert (dict(ATTACHED), list(LIVE_SCOPES), STATE.blocks) == ({}, [], ())
    with amanda.apply(tool := Counter()):
        work()
    assert tool.calls == 1


@pytest.mark.parametrize("wrong", [3, object(), str])
def test_drivers_are_names_or_classes(wrong: Any) -> None:
    """What is none is told as it is given."""
    with pytest.raises(TypeError, match=r"names or classes of drivers"):
        amanda.apply(Counter(), drivers=[wrong]).__enter__()
    with pytest.raises(TypeError, match=r"must be a list of names or classes of drivers"):
        amanda.apply(Counter(), drivers=lb.LoopbackDriver)  # type: ignore[arg-type]


def test_only_functions_are_decorated() -> None:
    """What cannot be called is told as it is given, not when it would be called."""
    with pytest.raises(TypeError, match=r"amanda.apply\(...\) decorates functions, got int 3"):
        amanda.apply(Counter())(3)


def test_reanalyse_takes_an_id() -> None:
    """A context, for instance, is none, and would be taken for an operator that is not there."""
    with pytest.raises(TypeError, match=r"Counter.reanalyse\(\) needs the id of an operator"):
        Counter().reanalyse(object())  # type: ignore[arg-type]
