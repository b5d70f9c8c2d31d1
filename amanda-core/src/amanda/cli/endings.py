"""How this process ends: by a signal, as Python does after Ctrl-C, or without its exit functions.

``by_signal(signal.SIGINT)`` ends it; ``watch(function)`` has a function called before the program
ends it by ``os._exit`` or replaces it by another one, so that no exit function runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from amanda.cli.messages import complain
from amanda.engine.signals import is_unhandled

_ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")

ENDING = tuple(number for name in _ENDING if (number := getattr(signal, name, None)))
"""Signals that end a program which does not handle them, so that its results can be given before:
the signals that schedulers send before they kill it, and SIGHUP of a terminal that is closed.
Windows has SIGTERM only."""


def handle_signals(handler: Callable[..., None]) -> None:
    """Have `handler` called at the signals of :data:`ENDING` that nobody handles or ignores yet."""
    # ValueError: handlers are set in the main thread only, and another thread has called main().
    with contextlib.suppress(ValueError):
        for number in ENDING:
            if is_unhandled(number):
                signal.signal(number, handler)


def restore_signals(handler: Callable[..., None]) -> None:
    """Undo :func:`handle_signals`, where the program has not set another handler since."""
    with contextlib.suppress(ValueError):
        for number in ENDING:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)


def watch(leaving: Callable[[str], None]) -> None:
    """Call `leaving` before ``os._exit`` ends this process, or a function of ``os`` replaces the
    process by another program.

    It is called in the main thread only, and not in forked children: another thread may end the
    process because the main one hangs, with locks that `leaving` would wait for.

    Args:
        leaving: gets the name of the function. An exception of it is printed, and ends nothing.
    """
    leave = functools.partial(_leave, leaving, os.getpid())

    def ending(vanilla: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(vanilla)
        def _exit(*args: Any, **kwargs: Any) -> Any:
            leave("os._exit()")
            return vanilla(*args, **kwargs)

        return _exit

    def replacing(vanilla: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(vanilla)
        def execute(path: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_program(path):
                leave(f"os.{vanilla.__name__}()")
            return vanilla(path, *args, **kwargs)

        return execute

    _replace("_exit", ending)
    # The other functions of this family, such as os.execvp(), call these two.
    for name in ("execv", "execve"):
        _replace(name, replacing)


def _leave(leaving: Callable[[str], None], process: int, how: str) -> None:
    """Call `leaving` in the main thread of the process of this number."""
    if os.getpid() != process:
        return
    if threading.current_thread() is not threading.main_thread():
        complain(f"the results are lost: a thread has ended the program by {how}")
        return
    try:
        leaving(how)
    except Exception as error:
        complain(f"the results are lost: {type(error).__name__}: {error}")


def _is_program(path: Any) -> bool:
    """True if a path or descriptor is a program; with another one ``os.execv`` fails, and this
    process goes on."""
    try:
        return isinstance(path, int) or os.access(path, os.X_OK)
    except (TypeError, ValueError):
        return False


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    vanilla = getattr(os, name)
    wrapped = wrap(vanilla)
    # Also set in the module from which os imports it: the function is pickled by that name.
    for module in (os, sys.modules[vanilla.__module__]):
        setattr(module, name, wrapped)


def by_signal(number: int, error: BaseException | None = None) -> None:
    """End this process by a signal, whatever its handler is; streams are flushed before.

    Args:
        number: the signal.
        error: the exception that it has raised, whose notes are printed.
    """
    for note in getattr(error, "__notes__", ()):
        complain(note)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def remember_interrupt() -> None:
    """Make Python end by SIGINT after the KeyboardInterrupt that ends the program, as without
    Amanda.

    Python notes such an end where the exception leaves the code of ``__main__``, and forgets it
    where an exit function runs code that is a text (seen in 3.11), as attrs, ``namedtuple`` and
    data classes do for each new class: the status would be 1. Raised within such code, it is noted
    anew.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
