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
