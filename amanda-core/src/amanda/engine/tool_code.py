"""Enters the code of tools; the only place in Python that does so, except for functions of sums,
which compiled code of PyTorch calls under the lock alone (``amanda_torch.compiled.deferred``).

Code of a tool runs alone, vanilla in all drivers, and isolated from automatic differentiation
unless it takes part in it; its time is charged to the scopes::

    code = ToolCode()
    code.bind(driver)
    result = code.enter(function, tensor)
    result = code.enter(run_analyses, record, contexts=(driver.vanilla(), driver.ad_isolated()))
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from amanda.interface.driver import Driver, ThreadSwitches
from amanda.state import ATTACHED, STATE, TOOL_LOCK, UNPAUSED, LiveScope, deliver, owns_tool_lock

_clock = time.perf_counter
_acquire = TOOL_LOCK.acquire
_release = TOOL_LOCK.release
_NO_SWITCHES = ThreadSwitches()


class ToolCode:
    """Enters the code of tools at operators of one driver."""

    def __init__(self) -> None:
        self._framework = ""
        self._is_unpaused = False
        self._switches = _NO_SWITCHES

    def bind(self, driver: Driver) -> None:
        """Set the driver for whose operators tools' code is entered."""
        self._framework = driver.framework
        self._is_unpaused = not driver.follows_pauses
        self._switches = driver.thread_switches

    # The extension of amanda-torch has the same once more, in C++: ToolCode of steps.cc.
    def enter(
        self,
        function: Callable[..., Any],
        *args: Any,
        contexts: Sequence[AbstractContextManager[Any]] = (),
        isolated: bool = False,
        scopes: Sequence[LiveScope] | None = None,
    ) -> Any:
        """Call a function of tools' code within `contexts`, isolated from automatic differentiation
        if `isolated`; its time is charged to `scopes`, by default to all scopes of the thread."""
        thread = vars(STATE)
        undo, owned, switches, start = thread["undo"], owns_tool_lock(), self._switches, 0.0
        mark = len(undo)
        undo.append((thread.__setitem__, ("paused", thread["paused"])))
        try:
            thread["paused"] += 1
            if switches.mode_depth():
                switches.leave_modes(undo)
            if isolated and switches.is_recording():
                undo.append((switches.set_recording, (True,)))
                switches.set_recording(False)
            if not owned:
                _acquire()
            # Under the lock, the sum is exact, and waiting is not charged to the tool.
            start = _clock()
            if contexts or len(UNPAUSED) != self._is_unpaused:
                return self._within(contexts, function, args)
            return function(*args)
        finally:
            if start:
                seconds = _clock() - start
                for scope in thread["scopes"] if scopes is None else scopes:
                    scope.statistics.tool_seconds += seconds
            if not owned and owns_tool_lock():
                _release()
            while len(undo) > mark:  # unwind(), without a function: at every point
                undo[-1][0](*undo[-1][1])
                del undo[-1]
            if thread["waiting"]:
                deliver()

    def _within(
        self,
        contexts: Sequence[AbstractContextManager[Any]],
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        """Call a function within contexts, and vanilla in the drivers of other frameworks."""
        with ExitStack() as stack:
            for driver in tuple(UNPAUSED.values()):
                if driver.framework != self._framework:
                    stack.enter_context(driver.vanilla())
            for context in contexts:
                stack.enter_context(context)
            return function(*args)


def is_in_tool_code() -> bool:
    """True if the current thread runs code of a tool, by its frames."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is ToolCode.enter.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def paused() -> Iterator[None]:
    """Within it, the current thread runs code of a tool, without the lock.

    It does not use the thread's undo list, which a block that ends within it would unwind.
    """
    thread = vars(STATE)
    outer = thread["paused"]
    try:
        thread["paused"] = outer + 1
        yield
    finally:
        thread["paused"] = outer
        deliver()


@contextmanager
def vanilla_thread() -> Iterator[None]:
    """As :func:`paused`, with notice to the drivers, for code outside of operators."""
    with paused(), ExitStack() as stack:
        for driver in tuple(ATTACHED.values()):
            stack.enter_context(driver.vanilla())
        yield
