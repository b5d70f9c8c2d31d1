"""With-blocks that end whatever happens, each entry with a state of its own.

``apply`` and the switches are such blocks::

    class Noted(WithBlock):
        def open(self, frame, task):
            return Note(frame)          # the state of this entry; its exit() ends it

One object may be entered again, recursively, and in several threads and coroutines at once.

An interrupt waits while a block begins or ends. An interrupt that Python takes as it calls
``__exit__``, before its first line, keeps it from ending the block, as in any with-statement.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import threading
from types import FrameType
from typing import Any, Protocol, Self

import attrs

from amanda.engine.tool_code import is_in_tool_code
from amanda.errors import described
from amanda.python.interrupts import deferred
from amanda.state import STATE, TOOL_LOCK, current_task, owns_tool_lock, unwind

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = ("contextlib", "contextlib2", "async_exit_stack")
_METHODS = ("__enter__", "__exit__", "__aenter__", "__aexit__")


class Opened(Protocol):
    """A scope or switch that one entry into a block has opened."""

    def exit(self) -> None:
        """End it; harmless when called twice."""


@attrs.define(eq=False, repr=False)
class _Entry:
    """One entry into a block.

    Attributes:
        opened: what it has opened; None before, and after its end.
        frame: the generator or coroutine that has entered; None for other code.
        thread: the thread that has entered.
        mark: how many changes of the thread's state were to be undone then.
    """

    frame: FrameType | None
    opened: Opened | None = None
    thread: int = attrs.field(factory=threading.get_ident)
    mark: int = attrs.field(factory=lambda: len(STATE.undo))


class WithBlock(contextlib.ContextDecorator, abc.ABC):
    """A context manager and decorator, each of whose entries has a state of its own."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    @abc.abstractmethod
    def open(self, frame: FrameType | None, task: Any) -> Opened:
        """Make the state of one entry; :meth:`start` is called next.

        Args:
            frame: the generator or coroutine that the block belongs to; None for other code.
            task: the task of asyncio whose own code it belongs to; None for none.
        """

    def start(self, opened: Any) -> None:
        """Begin what :meth:`open` has made; if it raises, that is ended."""

    def finished(self, opened: Any) -> None:
        """Called when an entry has ended."""

    def __call__(self, func: Any) -> Any:
        """Decorate a function.

        Raises:
            TypeError: `func` cannot be called, or is a coroutine or generator function, whose body
                runs after the call that would be covered.
        """
        if not callable(func):
            raise TypeError(f"amanda.{self}(...) decorates functions, got {described(func)}")
        if (
            inspect.iscoroutinefunction(func)
            or inspect.isgeneratorfunction(func)
            or inspect.isasyncgenfunction(func)
        ):
            name = f"amanda.{self}"
            raise TypeError(
                f"@{name}() on {func.__qualname__} would cover only its call, not its "
                f"body; write `with {name}(...):` in the body instead"
            )
        return super().__call__(func)

    def __enter__(self) -> Self:
        entry = _Entry(suspendable_frame(caller_frame(1)))
        try:
            with deferred():
                self._entries.append(entry)
                entry.opened = self.open(entry.frame, task_of(entry.frame))
                self.start(entry.opened)
            return self
        except BaseException:
            self._leave(entry)
            raise

    def __exit__(self, *raised: object) -> None:
        with deferred():
            self._leave(self._find(suspendable_frame(caller_frame(1))))

    def _find(self, frame: FrameType | None) -> _Entry:
        """The entry that code in `frame` leaves by hand: its own one, the last of these.

        Raises:
            IndexError: the block is not open.
        """
        entries = tuple(self._entries)
        thread = threading.get_ident()
        for entry in reversed(entries):
            if entry.frame is frame and (frame is not None or entry.thread == thread):
                return entry
        for entry in reversed(entries):
            if entry.thread == thread:
                return entry
        if not entries:
            raise IndexError(f"{self} is left without having been entered")
        return entries[-1]

    def _leave(self, entry: _Entry) -> None:
        """End an entry; harmless when called twice."""
        with deferred():
            opened, entry.opened = entry.opened, None
            try:
                restore_thread(entry)
                if opened is not None:
                    opened.exit()
            finally:
                # An interrupt may also have stopped the tools' code at the end.
                restore_thread(entry)
                with contextlib.suppress(ValueError):
                    self._entries.remove(entry)
                entry.frame = None
                if opened is not None:
                    self.finished(opened)


def restore_thread(entry: _Entry) -> None:
    """Undo the changes of the thread that interrupted code left behind since an entry."""
    undo = STATE.undo
    is_left = len(undo) > entry.mark or (not STATE.paused and owns_tool_lock())
    if is_left and entry.thread == threading.get_ident() and not is_in_tool_code():
        unwind(undo, entry.mark)
        if not STATE.paused and owns_tool_lock():
            TOOL_LOCK.release()


# -- where a block was entered -----------------------------------------------


def suspendable_frame(frame: FrameType | None) -> FrameType | None:
    """The generator or coroutine that a with-block at `frame` belongs to, if any.

    A generator that contextlib drives is looked through: its scope belongs to
    the with-statement's caller.
    """
    while frame is not None:
        if _is_contextlib(frame) or frame.f_code.co_name in _METHODS:
            frame = frame.f_back
        elif frame.f_code.co_flags & _SUSPENDABLE:
            if frame.f_back is None or not _is_contextlib(frame.f_back):
                return frame
            frame = frame.f_back
        else:
            return None
    return None


def task_of(frame: FrameType | None) -> Any:
    """The running task of asyncio, if `frame` is a coroutine that only awaiting code has called.

    While that is suspended, the whole task is.
    """
    if frame is None or not frame.f_code.co_flags & inspect.CO_COROUTINE:
        return None
    task = current_task()
    root = None if task is None else getattr(task.get_coro(), "cr_frame", None)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_flags & _SUSPENDABLE:
        if outer is root:
            return task
        outer = outer.f_back
    return None


def _is_contextlib(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _CONTEXTLIB


def caller_frame(depth: int) -> FrameType | None:
    """The frame `depth` levels above the function that calls this."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    return frame
