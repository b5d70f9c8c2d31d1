"""The functions that are called while something runs, for tests of what it costs."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs


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


def sources() -> tuple[str, ...]:
    """The folders of Amanda's packages that are imported."""
    packages = {name.partition(".")[0] for name in sys.modules if name.startswith("amanda")}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(packages)]
    return tuple(str(Path(file).parent) + "/" for file in files if file)


@attrs.frozen
class Run:
    """The functions of ours that were called, in order."""

    codes: list[CodeType]

    def __len__(self) -> int:
        return len(self.codes)

    def count(self, name: str) -> int:
        """How often functions and methods of this name were called."""
        return sum(code.co_name == name for code in self.codes)

    def __str__(self) -> str:
        calls = collections.Counter(code.co_qualname for code in self.codes)
        return "\n".join(f"{count:5} {name}" for name, count in calls.most_common())


def profiled(function: Callable[[], Any]) -> tuple[Any, Run]:
    """Call a function; its result and its calls, among which resumed generators count."""
    with called(sources()) as codes:
        result = function()
    return result, Run(codes)
