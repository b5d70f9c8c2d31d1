"""Threads started inside a scope are covered by it, until it ends."""

from __future__ import annotations

import threading
from typing import Any

from amanda import _state
from amanda._patching import PatchSet

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
        if _state.STATE.scopes and not _state.STATE.paused and self.ident is None:
            _inherit(self)
        vanilla(self)

    start.__wrapped__ = vanilla  # type: ignore[attr-defined]
    return start


def _inherit(thread: threading.Thread) -> None:
    parent = _state.STATE
    scopes, switches = parent.scopes, (parent.enabled, parent.cache, parent.ad)
    run, own = thread.run, vars(thread).get("run")

    def covered() -> None:
        # The instance attribute was only the way in.
        del vars(thread)["run"]
        if own is not None:
            vars(thread)["run"] = own
        state = _state.STATE
        live = tuple(scope for scope in scopes if scope.alive)
        drivers = list(dict.fromkeys(driver for scope in live for driver in scope.drivers))
        state.scopes = live
        state.enabled, state.cache, state.ad = switches
        for driver in drivers:
            driver.enter_thread()
        try:
            run()
        finally:
            state.scopes = ()
            for driver in drivers:
                driver.exit_thread()

    vars(thread)["run"] = covered
