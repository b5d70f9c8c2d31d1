"""Handlers of signals, and collections of garbage, while code of tools runs."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import inspect
import os
import signal
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from signal import raise_signal
from types import FrameType
from typing import Any

import pytest

import amanda
from amanda.scope.inheritance import FORKS
from amanda.testing import loopback as lb

NUMBER = signal.SIGUSR1
INSTALLED = signal.getsignal


class Analysing(amanda.Tool):
    """Calls a function in the analysis of each operator."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.add_inst_for_op(lambda context: function())


def analyse(function: Callable[[], Any]) -> None:
    """Call a function in one analysis."""
    with amanda.apply(Analysing(function), drivers=["loopback"]):
        lb.relu(lb.tensor([1.0]))


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    outer = signal.getsignal(NUMBER)
    yield
    assert signal.getsignal is INSTALLED
    signal.signal(NUMBER, outer)


def _is_restarting(number: int) -> bool:
    """True if the system restarts calls that a signal interrupts (SA_RESTART)."""
    action = (ctypes.c_char * 256)()
    ctypes.CDLL(None).sigaction(int(number), None, action)
    return bool(struct.unpack_from("i", bytes(action), 136)[0] & 0x10000000)


@pytest.mark.skipif(sys.platform != "linux", reason="the layout of sigaction is that of glibc")
def test_flags_of_handlers_stay() -> None:
    """What asyncio asks for at its handlers holds in a scope and after it."""

    async def program() -> list[bool]:
        asyncio.get_running_loop().add_signal_handler(NUMBER, int)
        found = [_is_restarting(NUMBER)]
        with amanda.apply(amanda.Tool(), drivers=["loopback"]):
            found.append(_is_restarting(NUMBER))
        return [*found, _is_restarting(NUMBER)]

    assert asyncio.run(program()) == [True] * 3


def test_a_scope_that_goes_on_in_another_thread() -> None:
    """Nothing is left in the main thread, where handlers run, once its scopes have ended."""

    def handle(number: int, frame: Any) -> None:
        pass

    signal.signal(NUMBER, handle)
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        with amanda.apply(amanda.Tool(), drivers=["loopback"]):
            begun.set()
            go.wait(10)

    thread = threading.Thread(target=work)
    with amanda.apply(amanda.Tool(), drivers=["loopback"]):
        thread.start()
        begun.wait(10)
        assert INSTALLED(NUMBER) is not handle
    assert INSTALLED(NUMBER) is handle
    assert signal.getsignal is INSTALLED
    go.set()
    thread.join()


class Handling:
    """Handlers of several kinds."""

    def __init__(self) -> None:
        self.handled: list[FrameType | None] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.handled.append(frame)

    def tagged(self, tag: str, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        lambda handling: handling,
        lambda handling: handling.handle,
        lambda handling: functools.partial(handling.tagged, "tag"),
        lambda handling: functools.wraps(min)(lambda *given: handling.handle(*given)),
    ],
)
def test_handlers_wait(kind: Callable[[Handling], Any], is_before: bool) -> None:
    """A handler that interrupts an analysis runs after it, with the program's frame, whether it was
    set before the scope or within it; the program sees what it has set."""
    handling = Handling()
    handler = kind(handling)
    seen: list[int] = []

    def look() -> None:
        raise_signal(NUMBER)
        seen.append(len(handling.handled))

    if is_before:
        signal.signal(NUMBER, handler)
    with amanda.apply(Analysing(look), drivers=["loopback"]):
        if not is_before:
            signal.signal(NUMBER, handler)
        assert signal.getsignal(NUMBER) is handler
        lb.relu(lb.tensor([1.0]))
    assert seen == [0]
    assert handling.handled == [inspect.currentframe()]


def test_a_second_signal_does_not_wait() -> None:
    """A watchdog that repeats its signal ends a tool that hangs; the handler runs once."""
    handled: list[int] = []
    sent: list[int] = []

    def stop(number: int, frame: Any) -> None:
        handled.append(number)
        raise TimeoutError

    def hang() -> None:
        for number in range(3):
            sent.append(number)
            raise_signal(NUMBER)

    signal.signal(NUMBER, stop)
    with pytest.raises(TimeoutError):
        analyse(hang)
    assert (len(sent), len(handled)) == (2, 1)


def test_a_tool_that_calls_the_function_of_a_handler() -> None:
    """It is a function as any other."""
    handled: list[Any] = []

    def save(number: int = 0, frame: Any = None) -> int:
        handled.append(frame)
        return len(handled)

    signal.signal(NUMBER, save)
    results: list[int] = []
    analyse(lambda: results.extend([save(), save(1), save(1, None)]))
    assert results == [1, 2, 3]


def test_handlers_of_the_past_are_not_kept() -> None:
    """A program may set a new handler in each step."""
    found: list[weakref.ref[Any]] = []
    with amanda.apply(amanda.Tool(), drivers=["loopback"]):
        for _ in range(5):

            def handle(number: int, frame: Any) -> None:
                # The handler refers to itself.
                signal.signal(NUMBER, handle)

            signal.signal(NUMBER, handle)
            found.append(weakref.ref(handle))
        gc.collect()
        assert [one() is None for one in found] == [True] * 4 + [False]


def test_handlers_that_wait_in_a_forked_child() -> None:
    """A signal of the parent's is none of the child's."""
    children: list[int] = []
    source, target = os.pipe()

    def fork() -> None:
        raise_signal(NUMBER)
        children.append(os.fork())

    signal.signal(NUMBER, lambda number, frame: os.write(target, b"handled;"))
    analyse(fork)
    if not children[0]:
        os._exit(0)
    os.waitpid(children[0], 0)
    assert os.read(source, 100) == b"handled;"


def test_collections_in_a_forked_child() -> None:
    """The collector is on in a child whose parent analyses in another thread."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(10)

    thread = threading.Thread(target=analyse, args=(wait,))
    thread.start()
    begun.wait(10)
    assert not gc.isenabled()
    child = os.fork()
    if not child:
        os._exit(gc.isenabled())
    go.set()
    thread.join()
    assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled()) == (1, True)


def test_programs_that_are_started_are_no_forks() -> None:
    """They do not run the program's operators."""
    count = len(FORKS)
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", ""])
    assert len(FORKS) == count
