"""Ends this process by a signal: ``by_signal(signal.SIGINT)`` after Ctrl-C, as Python does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def by_signal(number: int) -> None:
    """End this process by a signal, whatever handler it has; what is printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def remember_interrupt() -> None:
    """Have Python end by SIGINT after the KeyboardInterrupt that ends the program, as it does.

    Python notes such an end where the exception leaves the code of ``__main__``, and forgets it
    where an exit function runs code that is a text (seen in 3.11), as attrs, ``namedtuple`` and
    data classes do for each new class: the status would be 1. Raised within such code, it is noted
    anew.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
