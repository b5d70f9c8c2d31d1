"""Scopes in threads and forked processes: threads inherit them, forked children do not."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from amanda._internals import reset_lock
from amanda.patching import PatchSet
from amanda.registry import drivers
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, TOOL_LOCK

if TYPE_CHECKING:
    pass

_PATCHES = PatchSet()


def cover_new_threads(wanted: bool) -> None:
    """Let threads inherit the scopes of the thread that starts them, or stop doing so."""
    if wanted and not len(_PATCHES):
        _PATCHES.wrap(threading.Thread, "start", _inheriting)
    elif not wanted:
        _PATCHES.undo()


def _inheriting(vanilla: Any) -> Any:
    def start(self: threading.Thread) -> None:
        # A thread that was started before is an error, which is vanilla's to raise.
        if STATE.scopes and not STATE.paused and self.ident is None:
            _inherit(self)
        vanilla(self)

    start.__wrapped__ = vanilla  # type: ignore[attr-defined]
    return start


def _inherit(thread: threading.Thread) -> None:
    parent = STATE
    scopes, switches = parent.scopes, (parent.enabled, parent.cache, parent.ad)
    run, own = thread.run, vars(thread).get("run")

    def covered() -> None:
        # The instance attribute was only the way in.
        del vars(thread)["run"]
        if own is not None:
            vars(thread)["run"] = own
        state = STATE
        live = tuple(scope for scope in scopes if scope.alive)
        attached = list(dict.fromkeys(driver for scope in live for driver in scope.drivers))
        state.scopes = live
        state.enabled, state.cache, state.ad = switches
        for driver in attached:
            drivers.attempt(driver, "enter_thread")
        try:
            run()
        finally:
            state.scopes = ()
            for driver in attached:
                drivers.attempt(driver, "exit_thread")

    vars(thread)["run"] = covered


def _vanilla_child() -> None:
    """Leave a forked child without instrumentation."""
    # Another thread of the parent may have held it, and does not exist here.
    reset_lock(TOOL_LOCK)
    STATE.scopes = ()
    STATE.paused = 0
    for scope in LIVE_SCOPES:
        scope.abandon()
    LIVE_SCOPES.clear()
    cover_new_threads(False)
    with contextlib.ExitStack() as stack:
        # Last, also if a driver raises.
        stack.callback(ATTACHED.clear)
        for driver in ATTACHED.values():
            stack.callback(drivers.attempt, driver, "detach")
            stack.callback(drivers.attempt, driver, "exit_thread")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_vanilla_child)
