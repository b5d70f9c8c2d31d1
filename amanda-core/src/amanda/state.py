"""The only global state: scopes and switches of the current thread, and the attached drivers.

``STATE`` holds the scopes and switches of the current thread; the drivers' hot paths read it
directly. The classes that fill it lie in higher layers and are known here by protocol only.

Do not reload this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class CurrentCall(Protocol):
    """The execution of an operator that a replacement stands in for."""

    op_id: str

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """A function of flat inputs that runs the operator with the attributes of this call."""


class AttachedDriver(Protocol):
    """The part of a driver that core calls without knowing its class."""

    framework: str

    def detach(self) -> None:
        """Restore the framework."""

    def enter_thread(self) -> None:
        """The current thread has entered a scope."""

    def exit_thread(self) -> None:
        """The current thread has left its last scope."""

    def invalidate(self) -> None:
        """Plans may be out of date."""

    def new_iteration(self) -> None:
        """Restart the counters of operator ids in the current thread."""

    def vanilla(self) -> AbstractContextManager[Any]:
        """Within it, the current thread is not instrumented."""


class LiveScope(Protocol):
    """The part of a scope that the engine and the drivers use.

    Attributes:
        alive: False once the scope has ended.
        cache: records of the operators that its tools have analysed.
        tools: its tools in the order in which they act.
        op_filter: restricts its tools to some operators and executions; None for no filter.
        drivers: the attached drivers that it uses.
        statistics: figures about the run under it.
    """

    alive: bool
    cache: Any
    tools: tuple[Any, ...]
    op_filter: Any
    drivers: list[Any]
    statistics: Any

    @property
    def is_bound(self) -> bool:
        """Whether a generator holds the scope, so that it pauses while that is suspended."""

    def covers(self, driver: Any) -> bool:
        """Whether operators of `driver` are instrumented right now."""

    def analyses_at(self, point: Any) -> bool:
        """Whether any tool has an analysis routine at `point`."""

    def analyses_backward(self) -> bool:
        """Whether any tool analyses backward operators."""

    def exit(self) -> None:
        """End the scope."""

    def abandon(self) -> None:
        """End the scope in a forked child."""


class ThreadState(threading.local):
    """Scopes and switches of one thread.

    ``vars(STATE)`` is the dictionary of the current thread. A driver may hold it where an
    attribute lookup through the thread-local object is too slow: at every routine.

    Attributes:
        scopes: the active scopes, outermost first.
        enabled: False within ``amanda.disabled()``.
        cache: False within ``amanda.cache_disabled()``.
        ad: the switch of ``ad_enabled()``/``ad_disabled()``; None outside of both.
        paused: depth of tool code running in this thread; its framework calls
            are vanilla.
        call: the execution whose replacement runs in this thread, None if none does.
    """

    def __init__(self) -> None:
        self.scopes: tuple[LiveScope, ...] = ()
        self.enabled: bool = True
        self.cache: bool = True
        self.ad: bool | None = None
        self.paused: int = 0
        self.call: CurrentCall | None = None


STATE = ThreadState()

TOOL_LOCK = threading.RLock()
"""Held while a tool's code runs, so that it never runs in two threads at once."""

ATTACHED: dict[type[Any], Any] = {}
"""Attached drivers by class: one instance serves all scopes."""

FAILED: dict[type[Any], str] = {}
"""Drivers that could not be attached in this process, and the reason for each."""

LIVE_SCOPES: list[LiveScope] = []
"""Scopes of all threads that have not ended, in the order of their entry."""


def invalidate() -> None:
    """Tell every attached driver that plans may be out of date."""
    for driver in tuple(ATTACHED.values()):
        driver.invalidate()
