"""Switches of the current code: instrumentation, action cache, AD of routines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

from amanda.engine.tool_code import vanilla_thread
from amanda.registry import drivers
from amanda.scope.blocks import WithBlock, caller_frame, suspendable_frame
from amanda.state import ATTACHED, Block, invalidate, open_block


class _Switched(WithBlock):
    """A with-block in which a switch has a value."""

    def __init__(self, name: str, switch: str, value: bool) -> None:
        super().__init__()
        self._name = name
        self._switch = switch
        self._value = value

    def __str__(self) -> str:
        return self._name

    def open(self, frame: FrameType | None, task: Any) -> Block:
        return Block(None, self._switch, self._value, frame, task)

    def start(self, opened: Block) -> None:
        open_block(opened)
        invalidate()


def disabled() -> _Switched:
    """A with-block in which the current thread runs uninstrumented.

    In a generator or a coroutine, as with all switches, it affects the code of that generator or
    coroutine only, not other code that runs while it is suspended; see contract rule 10.
    """
    return _Switched("disabled", "enabled", False)


def enabled() -> _Switched:
    """A with-block inside of ``disabled()`` in which instrumentation is on again."""
    return _Switched("enabled", "enabled", True)


def cache_disabled() -> _Switched:
    """A with-block in which analysis routines run at every execution."""
    return _Switched("cache_disabled", "cache", False)


def cache_enabled() -> _Switched:
    """A with-block inside of ``cache_disabled()`` in which the action cache is on again."""
    return _Switched("cache_enabled", "cache", True)


def ad_enabled() -> _Switched:
    """A with-block; routines recorded in it take part in automatic differentiation."""
    return _Switched("ad_enabled", "ad", True)


def ad_disabled() -> _Switched:
    """A with-block; routines recorded in it are isolated from automatic differentiation."""
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
    """A with-block in which the current thread's framework calls are not instrumented.

    Routines always run like that. The block is for a tool's code that a framework calls, such as
    a hook that the tool has registered. It is far cheaper than :func:`disabled`, except in a
    generator or a coroutine, where it is the same.
    """
    if suspendable_frame(caller_frame(1)) is not None:
        with disabled():
            yield
        return
    with vanilla_thread():
        yield
