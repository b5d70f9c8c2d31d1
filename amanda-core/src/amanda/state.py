"""The only global state: what applies to the current thread, and what is attached.

Do not reload this module.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda.interface.calls import OpCall
    from amanda.interface.driver import Driver
    from amanda.scope.scope import Scope


class ThreadState(threading.local):
    """Scopes and switches of one thread.

    ``vars(STATE)`` is a dictionary of the current thread, which a driver may keep
    where the way through the object is too long: at every routine.

    Attributes:
        scopes: the active scopes, outermost first.
        enabled: False within ``amanda.disabled()``.
        cache: False within ``amanda.cache_disabled()``.
        ad: what ``ad_enabled()``/``ad_disabled()`` say; None outside of both.
        paused: depth of tool code running in this thread; its framework calls
            are vanilla.
        call: the operator whose replacement runs in this thread, None if none does.
    """

    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()
        self.enabled: bool = True
        self.cache: bool = True
        self.ad: bool | None = None
        self.paused: int = 0
        self.call: OpCall | None = None


STATE = ThreadState()

TOOL_LOCK = threading.RLock()
"""Held while a tool's code runs, so that it never runs in two threads at once."""

ATTACHED: dict[type[Driver], Driver] = {}
"""Drivers that are attached, by class: one instance serves all scopes."""

FAILED: dict[type[Driver], str] = {}
"""Drivers that could not be attached in this process, and why."""

LIVE_SCOPES: list[Scope] = []
"""Scopes of all threads that have not ended, in the order of their entry."""


def invalidate() -> None:
    """Tell every attached driver that plans may be out of date."""
    for driver in tuple(ATTACHED.values()):
        driver.invalidate()
