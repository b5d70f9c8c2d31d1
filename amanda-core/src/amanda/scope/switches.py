"""Switches of the current thread: instrumentation, action cache, AD of routines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from amanda.registry import drivers
from amanda.state import ATTACHED, STATE, invalidate

if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def _switched(switch: str, value: bool) -> Iterator[None]:
    state = STATE
    old = getattr(state, switch)
    setattr(state, switch, value)
    invalidate()
    try:
        yield
    finally:
        setattr(state, switch, old)
        invalidate()


def disabled() -> contextlib.AbstractContextManager[None]:
    """Within it, the current thread runs uninstrumented."""
    return _switched("enabled", False)


def enabled() -> contextlib.AbstractContextManager[None]:
    """Within it, instrumentation is on again, inside of a ``disabled()`` block."""
    return _switched("enabled", True)


def cache_disabled() -> contextlib.AbstractContextManager[None]:
    """Within it, analysis routines run at every execution."""
    return _switched("cache", False)


def cache_enabled() -> contextlib.AbstractContextManager[None]:
    """Within it, the action cache is on again, inside of a ``cache_disabled()`` block."""
    return _switched("cache", True)


def ad_enabled() -> contextlib.AbstractContextManager[None]:
    """Routines recorded within it take part in automatic differentiation."""
    return _switched("ad", True)


def ad_disabled() -> contextlib.AbstractContextManager[None]:
    """Routines recorded within it are isolated from automatic differentiation."""
    return _switched("ad", False)


def new_iteration() -> None:
    """Restart the counters of operator ids in the current thread."""
    for driver in tuple(ATTACHED.values()):
        drivers.attempt(driver, "new_iteration")


@contextlib.contextmanager
def vanilla() -> Iterator[None]:
    """Within it, the current thread's framework calls are not instrumented.

    Routines run like that anyhow. It is for code of a tool that a framework calls,
    such as a hook that the tool has registered; far cheaper than :func:`disabled`.
    """
    state = STATE
    state.paused += 1
    try:
        with contextlib.ExitStack() as stack:
            for driver in tuple(ATTACHED.values()):
                stack.enter_context(driver.vanilla())
            yield
    finally:
        state.paused -= 1
