"""Shows how far a long run is: one line that is updated on a terminal, or plain lines.

:func:`create_progress` chooses between the two; ``start()`` and ``stop()`` enclose the run.

A thread wakes up at intervals and reads the figures of the scope. It receives no signals, is not
in ``threading.enumerate()``, does not run while the process forks, and ends with the run. On a
terminal the line is shown only while the cursor is at the beginning of a line, so that it does not
disturb a progress bar or a prompt of the program.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from amanda.python.patching import PatchSet
from amanda.state import LiveScope

_ERASE = "\r\x1b[K"

_RUNNING: list[Progress] = []
"""The progress whose thread ends before a fork; read by hooks, which cannot be unregistered."""


def create_progress(scope: LiveScope, wanted: bool | None) -> Progress | None:
    """Choose how to show the progress of a run.

    Args:
        scope: the scope of the run.
        wanted: True if the user has asked for it; None to show it if stderr is a terminal.

    Returns:
        The progress, which has not started; None if it is not to be shown.
    """
    stream = sys.__stderr__
    if wanted is False or stream is None:
        return None
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    if os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb":
        return TerminalProgress(scope, descriptor)
    return Progress(scope, descriptor) if wanted else None


class Progress:
    """Writes a plain line at intervals.

    Args:
        scope: the scope whose operators are counted.
        descriptor: file descriptor to write to.

    Attributes:
        first, every: seconds until the first line, and between two lines.
    """

    first = every = 30.0

    def __init__(self, scope: LiveScope, descriptor: int) -> None:
        self._scope = scope
        self._descriptor = descriptor
        self._began = time.monotonic()
        self._known = 0, 0.0
        self._rate = ""
        self._stopping = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin; the time that lines show is counted from here."""
        self._began = time.monotonic()
        _watch_forks()
        _RUNNING.append(self)
        self.wake()

    def stop(self) -> None:
        """End, and leave the terminal as it was."""
        if self in _RUNNING:
            _RUNNING.remove(self)
            self.sleep()
            self.close()

    def wake(self) -> None:
        """Start the thread."""
        self._stopping.clear()
        self._ended.clear()
        # Not threading.Thread: a program that joins all threads would wait for this one.
        _thread.start_new_thread(self._work, ())

    def sleep(self) -> None:
        """End the thread, if it runs, and wait for its end."""
        self._stopping.set()
        self._ended.wait(2)

    def erase(self) -> None:
        """Remove the line that :meth:`show` has shown; a plain line stays."""

    def close(self) -> None:
        """Release all resources; called when the thread has ended."""

    def show(self, text: str) -> None:
        """Show a line."""
        self.write(f"amanda: {text}\n")

    def write(self, text: str) -> None:
        """Write to the descriptor itself: a fork may find the lock of a Python stream taken."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())

    def _work(self) -> None:
        # Signals are to interrupt the system calls of the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            due = max(self.first - (time.monotonic() - self._began), self.every)
            while not self._stopping.wait(due):
                # A dictionary has grown while it was read: the next line will have the figures.
                with contextlib.suppress(RuntimeError):
                    self.show(self.text())
                due = self.every
        finally:
            self._ended.set()

    def text(self) -> str:
        """The contents of a line: the time, the steps and their rate, the share of the tools.

        As long as no step has ended, operators stand in place of steps.
        """
        seconds = time.monotonic() - self._began
        share = 100 * self._scope.statistics.tool_seconds / max(seconds, 1e-9)
        done = self._steps() or self._ops()
        return f"{_duration(seconds)}, {done}, tools take {share:.0f}%"

    def _ops(self) -> str:
        forward, backward, _ = self._scope.cache.counts()
        return f"{forward + backward:,} ops seen ({forward:,} forward, {backward:,} backward)"

    def _steps(self) -> str:
        count, end = self._scope.iterations.count, self._scope.iterations.end
        known, since = self._known
        if known and known < count and since < end:
            rate = (count - known) / (end - since)
            self._rate = f", {rate:.3g} steps/s" if rate >= 1 else f", {1 / rate:.3g} s/step"
        self._known = count, end
        return f"{count:,} steps{self._rate}" if count else ""


class TerminalProgress(Progress):
    """Keeps one line on the terminal, below the output of the program."""

    first, every = 3.0, 1.0

    def __init__(self, scope: LiveScope, descriptor: int) -> None:
        super().__init__(scope, descriptor)
        # Reentrant: a signal handler may print while this thread is in write().
        self._lock = threading.RLock()
        self._is_shown = False
        self._is_free = True
        self._patches = PatchSet()

    def start(self) -> None:
        """Begin, and watch the output of the program."""
        for stream in dict.fromkeys((sys.stdout, sys.stderr)):
            if isinstance(stream, io.TextIOWrapper) and stream.isatty():
                self._patches.set(stream, "write", self._watched(stream.write))
        super().start()

    def close(self) -> None:
        """Remove the line and restore the streams."""
        self._patches.undo()
        self.erase()

    def forget(self) -> None:
        """Called in a forked child, where the line belongs to the parent."""
        self._is_shown = False
        self._lock = threading.RLock()
        self._patches.undo()

    def show(self, text: str) -> None:
        """Show the line if the cursor is at the beginning of a line."""
        with self._lock:
            if self._is_free and not _is_busy(self._descriptor):
                width = _width(self._descriptor)
                self.write(f"{_ERASE}amanda: {text}"[: len(_ERASE) + width - 1])
                self._is_shown = True

    def _watched(self, vanilla: Callable[[str], int]) -> Callable[[str], int]:
        def write(text: str, /) -> int:
            with self._lock:
                self.erase()
                written = vanilla(text)
                if text:
                    self._is_free = text.endswith("\n")
            return written

        return write

    def erase(self) -> None:
        """Remove the line."""
        with self._lock:
            if self._is_shown:
                self._is_shown = False
                self.write(_ERASE)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _width(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 80


def _is_busy(descriptor: int) -> bool:
    """True if another job has the terminal, or a line is being edited on it (readline)."""
    import termios

    try:
        # A background job must not write over the foreground one.
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return True
        # readline and other line editors switch the canonical mode off.
        return not termios.tcgetattr(descriptor)[3] & termios.ICANON
    except (OSError, termios.error):
        return False


# -- forks ----------------------------------------------------------------


@functools.cache
def _watch_forks() -> None:
    """End the thread before each fork: from Python 3.12 on, a fork warns of other threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child
        )


def _before_fork() -> None:
    for running in _RUNNING:
        running.sleep()
        running.erase()


def _after_fork() -> None:
    # Python 3.12 counts the threads after this hook and warns of more than one. Ours starts again
    # only where the program has others, of which Python warns anyway.
    if sys.version_info < (3, 12) or _count_native_threads() > 1:
        for running in _RUNNING:
            running.wake()


def _in_child() -> None:
    for running in _RUNNING:
        if isinstance(running, TerminalProgress):
            running.forget()
    _RUNNING.clear()


def _count_native_threads() -> int:
    """The threads of the process, those of others than Python included; 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
