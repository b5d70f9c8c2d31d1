"""Ends scopes and drivers that a test has left open: a failed test must not make others fail.

A pytest fixture calls it after each test, and reports its findings as an error::

Yield:
    assert leftovers.end() == []
"""

from __future__ import annotations

from amanda.scope.inheritance import cover_new_threads
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, ThreadState, note_detached


def end() -> list[str]:
    """End open scopes, detach drivers and reset the switches of this thread.

    Returns:
        One line for each of them; nothing where everything was closed. An exception that a
        tool or a driver raises while it is ended is a line too.
    """
    found: list[str] = []
    for scope in reversed(tuple(LIVE_SCOPES)):
        names = ", ".join(type(tool).__name__ for tool in scope.tools) or "no tool"
        found.append(f"a scope is open, of {names}")
        try:
            scope.exit()
        except Exception as error:
            found.append(f"its exit raised {error!r}")
    for cls, driver in tuple(ATTACHED.items()):
        found.append(f"{cls.name} is attached")
        note_detached(cls)
        try:
            driver.detach()
        except Exception as error:
            found.append(f"its detach() raised {error!r}")
    cover_new_threads(bool(LIVE_SCOPES))
    STATE.blocks = tuple(block for block in STATE.blocks if block.scope is None)
    for switch, value in vars(ThreadState()).items():
        if getattr(STATE, switch) != value:
            if switch != "blocks":  # the scopes of open blocks are named
                found.append(f"STATE.{switch} is {getattr(STATE, switch)!r}")
            setattr(STATE, switch, value)
    return found
