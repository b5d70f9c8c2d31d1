"""With-blocks that end whatever happens, each entry with a state of its own.

``apply`` and the switches are such blocks::

    class Noted(WithBlock):
        def open(self, caller):
            return Note(caller)         # the state of this entry; its exit() ends it

One object may be entered again, recursively, and in several threads and coroutines at once.

An interrupt may come at any line, also at the first one of ``__exit__``, where nothing has been
undone yet. Python does not call ``__exit__`` again. So a with-statement does not hold a method, but
an object of its own, a :class:`_Exit`, which ends the entry at the latest when the statement lets
go of it.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, Self

from amanda.errors import described
from amanda.state import current_task

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = ("contextlib", "contextlib2", "async_exit_stack")
_METHODS = ("__enter__", "__exit__", "__aenter__", "__aexit__")


class Opened(Protocol):
    """A scope or switch that one entry into a block has opened."""

    def exit(self) -> None:
        """End it; harmless when called twice."""


class _Entry:
    """One entry into a block.

    Attributes:
        block: the block that is entered; None before that.
        opened: what it has opened; None before, and after its end.
        frame: the generator or coroutine that has entered; None for other code.
        thread: the thread that has entered.
        guard: ends the entry at the latest when the with-statement has ended.
    """

    __slots__ = ("block", "frame", "guard", "opened", "thread")

    def __init__(self) -> None:
        self.block: WithBlock | None = None
        self.opened: Opened | None = None
        self.frame: FrameType | None = None
        self.thread = 0
        self.guard: weakref.ref[_Exit] | None = None


class _Last(threading.local):
    """The last :class:`_Exit` that was made in a thread, weakly."""

    exit: weakref.ref[_Exit] | None = None


_LAST = _Last()


class _Exit(functools.partial[None]):
    """``__exit__`` of one with-statement, which takes it before it calls ``__enter__``.

    Called in C, so that no traceback holds it: it dies as the statement ends. An entry that is
    still open then is ended, as its exit was kept from running.
    """


def _end_by(made: _Exit, entry: _Entry) -> None:
    """End an entry as soon as `made` has died, unless it has ended before."""

    def died(_: weakref.ref[_Exit]) -> None:
        if entry.block is not None:
            entry.block.leave(entry)

    entry.guard = weakref.ref(made, died)


class _ExitDescriptor:
    """Gives each with-statement, and each :class:`contextlib.ExitStack`, a :class:`_Exit`."""

    def __get__(self, block: WithBlock | None, owner: type | None = None) -> Callable[..., None]:
        # A method that is only looked at, or called by hand, has an entry that is never opened.
        made = _Exit(_leave, _Entry(), *([] if block is None else [block]))
        _LAST.exit = weakref.ref(made)
        return made


def _leave(entry: _Entry, block: WithBlock, *raised: Any) -> None:
    if entry.block is None:
        entry = block.find(suspendable_frame(caller_frame(1)))
    block.leave(entry)


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
        entry = self._new_entry()
        entry.frame = suspendable_frame(caller_frame(1))
        entry.thread = threading.get_ident()
        try:
            self._entries.append(entry)
            entry.opened = self.open(entry.frame, task_of(entry.frame))
            self.start(entry.opened)
            return self
        except BaseException:
            self.leave(entry)
            raise

    if TYPE_CHECKING:

        def __exit__(self, *raised: object) -> None: ...

    else:
        __exit__ = _ExitDescriptor()

    def find(self, frame: FrameType | None) -> _Entry:
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

    def leave(self, entry: _Entry) -> None:
        """End an entry; harmless when called twice."""
        opened = entry.opened
        if opened is None:
            self._forget(entry)
            return
        try:
            opened.exit()
            self._forget(entry)
        except BaseException:
            # Nothing is done twice; an interrupt may have come before anything was.
            opened.exit()
            self._forget(entry)
            raise
        finally:
            self.finished(opened)

    def _new_entry(self) -> _Entry:
        """The entry of the with-statement that is about to enter, or a new one without it."""
        last = _LAST.exit
        made = None if last is None else last()
        # It has no second argument where it was read from the class.
        if made is not None and made.args[0].block is None and made.args[1:] in ((), (self,)):
            entry: _Entry = made.args[0]
            _end_by(made, entry)
        else:
            entry = _Entry()
        entry.block = self
        return entry

    def _forget(self, entry: _Entry) -> None:
        with contextlib.suppress(ValueError):
            self._entries.remove(entry)
        entry.opened = entry.frame = entry.guard = None


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
