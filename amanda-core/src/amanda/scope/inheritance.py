"""Scopes in threads and forked processes: threads inherit them, forked children do not."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from amanda.engine.garbage import forget_threads
from amanda.engine.signals import defer_handlers
from amanda.python.patching import PatchSet
from amanda.registry import drivers, import_hook
from amanda.state import (
    ATTACHED,
    LIVE_SCOPES,
    SCOPE_LOCK,
    STATE,
    Block,
    LiveScope,
    close_block,
    find_active,
    locked,
    note_detached,
    owns_tool_lock,
    reset_locks,
)

_PATCHES = PatchSet()
_INHERITED: list[Block] = []
"""The blocks of scopes in threads that have inherited them and have not ended."""
FORKS: list[str] = []
"""For each child that the program has forked by ``os.fork``, the module that called it."""
_FORK_PATIENCE = 10.0
"""Seconds that a fork waits for another thread that enters or leaves a scope."""


def cover_new_threads(wanted: bool) -> None:
    """Let threads inherit the scopes of the thread that starts them, or stop doing so."""
    if wanted and not len(_PATCHES):
        _PATCHES.wrap(threading.Thread, "start", _inheriting)
    elif not wanted:
        _PATCHES.undo()


def _inheriting(vanilla: Any) -> Any:
    def start(self: threading.Thread) -> None:
        if STATE.held:
            find_active(vars(STATE))
        # A thread that was started before is an error, which is vanilla's to raise.
        put_back = None
        if STATE.scopes and not STATE.paused and self.ident is None:
            put_back = _inherit(self)
        try:
            vanilla(self)
        except Exception:
            # The system has no room for it; it may be started later, outside of the scope.
            if put_back is not None:
                put_back()
            raise

    start.__wrapped__ = vanilla  # type: ignore[attr-defined]
    return start


def _inherit(thread: threading.Thread) -> Callable[[], None]:
    """Let a thread run under the scopes of this one; returns a function that undoes it."""
    parent = STATE
    # The list is emptied when the thread starts: the frame of a thread may live longer than scopes.
    given = [parent.scopes]
    switches = {"enabled": parent.enabled, "cache": parent.cache, "ad": parent.ad}
    run, own = thread.run, vars(thread).get("run")

    def put_back() -> None:
        vars(thread).pop("run", None)
        if own is not None:
            vars(thread)["run"] = own

    def covered() -> None:
        # The instance attribute is needed only until the thread runs.
        put_back()
        attached: list[Any] = []
        try:
            locked(_cover, given.pop(), switches, attached)
            run()
        except BaseException as error:
            # The traceback of a thread is that of its own code: without the frame of this function.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        finally:
            try:
                locked(_uncover)
            finally:
                for driver in attached:
                    drivers.attempt(driver, "exit_thread")

    vars(thread)["run"] = covered
    return put_back


def _cover(scopes: tuple[LiveScope, ...], switches: dict[str, Any], attached: list[Any]) -> None:
    """Give the current thread scopes and switches; add the drivers that have entered it."""
    live = tuple(scope for scope in scopes if scope.alive)
    blocks = [Block(scope) for scope in live]
    _INHERITED.extend(blocks)
    blocks += [Block(None, switch, value) for switch, value in switches.items()]
    STATE.blocks = tuple(blocks)
    find_active(vars(STATE))
    for driver in dict.fromkeys(driver for scope in live for driver in scope.drivers):
        attached.append(driver)
        drivers.attempt(driver, "enter_thread")


def _uncover() -> None:
    for block in STATE.blocks:
        if block in _INHERITED:
            _INHERITED.remove(block)
    STATE.blocks = ()
    find_active(vars(STATE))


def release(scope: LiveScope) -> None:
    """Drop an ended scope from the threads that have inherited it. A thread that waits for ever,
    such as a library's monitor, would keep its tools alive.
    """
    for block in [block for block in _INHERITED if block.scope is scope]:
        _INHERITED.remove(block)
        close_block(block)


# -- forked processes -----------------------------------------------------------


def _before_fork() -> None:
    """Let no other thread be in the middle of attaching: the child would have half of it."""
    _FORKING.is_locked = SCOPE_LOCK.acquire(timeout=_FORK_PATIENCE)


def _after_fork_in_parent() -> None:
    _after_fork()
    frame = inspect.currentframe()
    caller = str(frame and frame.f_back and frame.f_back.f_globals.get("__name__"))
    # multiprocessing counts its own; the others, such as os.spawnv(), run another program.
    if caller.partition(".")[0] not in {"multiprocessing", "os", "pty", "subprocess"}:
        FORKS.append(caller)


def _after_fork() -> None:
    if _FORKING.is_locked:
        _FORKING.is_locked = False
        SCOPE_LOCK.release()


class _Forking(threading.local):
    is_locked: bool = False


_FORKING = _Forking()


def _vanilla_child() -> None:
    """Leave a forked child without instrumentation."""
    _after_fork()
    # Other threads of the parent may have held these, and do not exist here. A routine that has
    # forked holds one itself, and goes on to its end in the child.
    if not owns_tool_lock():
        STATE.paused = 0
    reset_locks()
    forget_threads()
    STATE.waiting.clear()
    for block in STATE.blocks:
        block.is_open = block.scope is None
    find_active(vars(STATE))
    for scope in LIVE_SCOPES:
        scope.abandon()
    LIVE_SCOPES.clear()
    _INHERITED.clear()
    cover_new_threads(False)
    if threading.current_thread() is threading.main_thread():
        defer_handlers(False)
    import_hook.await_nothing()
    with contextlib.ExitStack() as stack:
        # This comes last, also if a driver raises.
        for cls in tuple(ATTACHED):
            stack.callback(note_detached, cls)
        for driver in ATTACHED.values():
            stack.callback(drivers.attempt, driver, "detach")
            stack.callback(drivers.attempt, driver, "exit_thread")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_vanilla_child
    )
