"""Frames of the program: the line that has called Amanda, and warnings at that line.

``warn_at(calling_frame(("torch",)), "...")`` warns at the line that has called PyTorch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from amanda.errors import CoverageWarning
from amanda.state import STATE, WeakMembers

_TOLD = WeakMembers[Any]()


def calling_frame(packages: Sequence[str]) -> FrameType | None:
    """The innermost frame whose code is neither Amanda's nor in one of these packages."""
    frame = inspect.currentframe()
    while frame is not None and module_of(frame).startswith(("amanda", *packages)):
        frame = frame.f_back
    return frame


def module_of(frame: FrameType | None) -> str:
    """The name of the module whose code a frame runs; "" without a frame."""
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def warn_at(frame: FrameType | None, text: str) -> None:
    """Warn (CoverageWarning) at a frame's line, for any number of frames between."""
    file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    registry = {} if frame is None else frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, CoverageWarning, file, line, module_of(frame), registry)


def warn_of_lost_changes(packages: Sequence[str]) -> None:
    """Warn where the program saves a model under tools that can export what they change, once for
    each tool; `packages` as of :func:`calling_frame`."""
    tools = [tool for scope in STATE.scopes for tool in scope.tools if tool not in _TOLD]
    if named := {tool: type(tool).__name__ for tool in tools if hasattr(tool, "export_model")}:
        for tool in named:
            _TOLD.add(tool)
        warn_at(
            calling_frame(packages),
            f"the model is saved without the changes of {', '.join(named.values())}; after the "
            "with-block tool.export_model(model, example_inputs, path) writes it with them",
        )
