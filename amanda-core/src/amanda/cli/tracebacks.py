"""Removes the frames of Amanda from the tracebacks of the program's exceptions.

``show(error)`` prints an exception as Python would without Amanda; all frames are shown with
``AMANDA_TRACEBACK=full``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterator
from types import TracebackType

from amanda.errors import AmandaError, CapabilityError, FileError, UnsupportedProgramError
from amanda.registry import drivers

_REFUSALS = (CapabilityError, FileError, UnsupportedProgramError)

HOW_TO_SEE_ALL = "AMANDA_TRACEBACK=full shows where"
"""Added to a line that replaces a traceback."""


def are_full() -> bool:
    """True if all frames are shown, even if one line would suffice."""
    return os.environ.get("AMANDA_TRACEBACK") == "full"


def hide_in_threads(tools: Collection[str] = ()) -> None:
    """Have uncaught exceptions of threads shown likewise, unless the program has a hook of its own.

    Args:
        tools: names of the modules of the applied tools, whose frames are always shown.
    """
    vanilla = threading.excepthook
    if vanilla is not threading.__excepthook__ or are_full():
        return

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if (error := args.exc_value) is not None:
            hide_frames(error, tools)
            args = threading.ExceptHookArgs(
                (args.exc_type, error, error.__traceback__, args.thread)
            )
        vanilla(args)

    threading.excepthook = excepthook


def is_refusal(error: BaseException, tools: Collection[str]) -> bool:
    """True if a tool refuses to run on this program, and the message says all that a user needs.

    Errors about the way a tool is written, and exceptions of the program, are no refusals.

    Args:
        error: the exception.
        tools: names of the modules of the applied tools.
    """
    if not (isinstance(error, _REFUSALS) or type(error) is AmandaError):
        return False
    traceback = error.__traceback__
    while traceback is not None:
        if _module(traceback) in tools:
            return not are_full()
        traceback = traceback.tb_next
    return False


def show(error: BaseException, tools: Collection[str] = ()) -> None:
    """Give an uncaught exception to ``sys.excepthook``, without the frames of Amanda.

    With ``AMANDA_TRACEBACK=full`` all frames are shown; so are those of an exception that Amanda
    itself raises.

    Args:
        error: the exception.
        tools: names of the modules of the applied tools, whose frames are always shown.
    """
    if not are_full():
        hide_frames(error, tools)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as failure:
        failure.__traceback__ = failure.__traceback__ and failure.__traceback__.tb_next
        # As Python reports an excepthook that fails.
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def hide_frames(error: BaseException, tools: Collection[str] = ()) -> None:
    """Remove Amanda's frames from the tracebacks of an exception, its causes and its contexts.

    Args:
        error: the exception, whose ``__traceback__`` is replaced.
        tools: names of the modules of the applied tools, whose frames are kept.
    """
    for part in _chain(error):
        kept = part.__traceback__
        # The frames of the command that has run the program come first.
        while kept is not None and _module(kept).startswith("amanda.cli."):
            kept = kept.tb_next
        if not isinstance(part, AmandaError):
            kept = _without(kept, _packages(), tools)
        part.__traceback__ = kept


def _without(
    traceback: TracebackType | None, packages: Collection[str], tools: Collection[str]
) -> TracebackType | None:
    entries: list[TracebackType] = []
    was_hidden = False
    while traceback is not None:
        module = _module(traceback)
        is_hidden = module.partition(".")[0] in packages and module not in tools
        if was_hidden and entries and _is_stand_in(entries[-1], traceback):
            is_hidden = True
        if not is_hidden:
            if was_hidden and _is_entered_again(entries, traceback):
                # The first call of the function, and the frame through which it called Amanda.
                del entries[-2:]
            entries.append(traceback)
        was_hidden = is_hidden
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_entered_again(entries: list[TracebackType], entry: TracebackType) -> bool:
    """True if a framework function has called Amanda, and Amanda the same function once more.

    Without Amanda the traceback has the frames of one call, not of two.
    """
    return len(entries) > 1 and entries[-2].tb_frame.f_code is entry.tb_frame.f_code


def _is_stand_in(entry: TracebackType, following: TracebackType) -> bool:
    """True if a frame is a driver's, which has the name and the line of the program's for warnings
    to be shown there."""
    of, code = entry.tb_frame.f_code, following.tb_frame.f_code
    is_same = (of.co_filename, of.co_qualname) == (code.co_filename, code.co_qualname)
    return is_same and of is not code and entry.tb_lineno == following.tb_lineno


def _packages() -> set[str]:
    """The packages whose frames are hidden: core's, and those of the registered drivers."""
    packages = (drivers.packages_of(cls) for cls, _ in drivers.registered_drivers())
    return {"amanda"}.union(*packages)


def _module(traceback: TracebackType) -> str:
    return str(traceback.tb_frame.f_globals.get("__name__", ""))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and contexts, and the members of groups."""
    waiting, seen = [error], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [e for e in (part.__cause__, part.__context__) if e is not None]
        if isinstance(part, BaseExceptionGroup):
            waiting += part.exceptions
