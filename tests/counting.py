"""The functions that are called while something runs, for tests of what it costs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running: when it does, and whose finalizers it calls then,
    depends on what ran before. What it would free is freed at the beginning."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def called(sources: tuple[str, ...] = ("",)) -> Iterator[list[CodeType]]:
    """The code of the Python functions that the current thread enters, in order; a generator that
    is resumed is among them, the end of this context is not.

    Args:
        sources: what the paths of their files begin with.
    """
    codes: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(sources):
            codes.append(frame.f_code)

    outer = sys.getprofile()
    with no_collection():
        sys.setprofile(profile)
        try:
            yield codes
        finally:
            sys.setprofile(outer)
            while codes and codes[-1] in _END:
                codes.pop()


_END = (called.__wrapped__.__code__, type(called()).__exit__.__code__)
