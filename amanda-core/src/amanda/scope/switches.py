"""Switches of the current code: instrumentation, action cache, AD of routines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

from amanda.registry import drivers
from amanda.scope.blocks import WithBlock, caller_frame, suspendable_frame
from amanda.state import ATTACHED, STATE, Block, close_block, invalidate, open_block


class _Switched(WithBlock):
    """A with-block in which a switch has a value."""

    def __init__(self, name: str, switch: str, value: bool) -> None:
        super().__init__()
        self._name = name
        self._switch = switch
        self._value = value

    def __str__(self) -> str:
        return self._name

    def open(self, frame: FrameType | None, task: Any) -> _OpenSwitch:
        return _OpenSwitch(Block(None, self._switch, self._value, frame, task))

    def start(self, opened: _OpenSwitch) -> None:
        opened.start()


class _OpenSwitch:
    """One entry into the block of a switch."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        self._block = block

    def start(self) -> None:
        open_block(self._block)
        invalidate()

    def exit(self) -> None:
        try:
            close_block(self._block)
            invalidate()
        except BaseException:
            # Also after an interrupt, which may have come before anything was done.
            close_block(self._block)
            invalidate()
            raise


def disabled() -> _Switched:
    """Within it, the current thread runs uninstrumented.

    In a generator or a coroutine, within it the code of that runs uninstrumented, and no other
    code that runs while it is suspended; see contract rule 10. So for all switches.
    """
    return _Switched("disabled", "enabled", False)


def enabled() -> _Switched:
    """Within it, instrumentation is on again, inside of a ``disabled()`` block."""
    return _Switched("enabled", "enabled", True)


def cache_disabled() -> _Switched:
    """Within it, analysis routines run at every execution."""
    return _Switched("cache_disabled", "cache", False)


def cache_enabled() -> _Switched:
    """Within it, the action cache is on again, inside of a ``cache_disabled()`` block."""
    return _Switched("cache_enabled", "cache", True)


def ad_enabled() -> _Switched:
    """Routines recorded within it take part in automatic differentiation."""
    return _Switched("ad_enabled", "ad", True)


def ad_disabled() -> _Switched:
    """Routines recorded within it are isolated from automatic differentiation."""
    return _Switched("ad_disabled", "ad", False)


def new_iteration() -> None:
    """End an iteration: restart the counters of operator ids in the current thread."""
    for driver in tuple(ATTACHED.values()):
        drivers.attempt(driver, "new_iteration")
    told: list[object] = []
    for driver in tuple(ATTACHED.values()):
        for scope in driver.dispatcher.scopes():
            if scope not in told:
                told.append(scope)
                driver.dispatcher.points.iteration_ends(scope)


@contextlib.contextmanager
def vanilla() -> Iterator[None]:
    """Within it, the current thread's framework calls are not instrumented.

    Routines run like that anyhow. It is for code of a tool that a framework calls,
    such as a hook that the tool has registered; far cheaper than :func:`disabled`, which it is
    in a generator or a coroutine.
    """
    if suspendable_frame(caller_frame(1)) is not None:
        with disabled():
            yield
        return
    thread = vars(STATE)
    outer = thread["paused"]
    try:
        thread["paused"] = outer + 1
        with contextlib.ExitStack() as stack:
            for driver in tuple(ATTACHED.values()):
                stack.enter_context(driver.vanilla())
            yield
        thread["paused"] = outer
    except BaseException:
        # Not in a finally clause, at whose line an interrupt would leave it undone.
        thread["paused"] = outer
        raise
