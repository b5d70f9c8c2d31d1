"""Exports a PyTorch model with what a tool has changed.

Any tool with a method ``changes()`` can be exported::

    class Halving(amanda.Tool):
        ...

        def changes(self):
            return [Function("Net.fc/linear:0", 0, lambda x: x / 2)]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from amanda.errors import UnsupportedProgramError
from amanda_tools.export.changes import Change, ChangingTool, Exported, Function, Mask, Rounding

__all__ = [
    "FORMATS",
    "Change",
    "ChangingTool",
    "Exported",
    "Function",
    "Mask",
    "Rounding",
    "export_model",
]

FORMATS = (".onnx", ".pt2", ".safetensors")
"""Suffixes of files that a model is exported to."""


def export_model(
    tool: Any,
    model: Any,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    fallback: bool = False,
) -> Exported:
    """Write a model with the changes of a tool into a file, which needs no Amanda.

    The model is exported in evaluation mode, and is not changed. The file is read again, runs on
    the example inputs, and must give the outputs of the model under the tool: the same bits from
    ``.pt2`` and ``.safetensors``, within 2e-6 of their largest value from ``.onnx`` in ONNX Runtime
    without its optimizer.

    Args:
        tool: the tool, which has run the model.
        model: the module.
        example_inputs: a tuple of arguments, a dictionary of keyword arguments, or a tensor.
        path: the file; its suffix is the format, one of `FORMATS`. ``.safetensors`` holds the
            state dictionary.
        fallback: leave an operator whose change the format cannot express as it is.

    Raises:
        UnsupportedProgramError: the exporter refuses the model, the format cannot express a change,
            the model has changed, or the outputs differ; the message names the first operator.
        AmandaError: the tool is not ready.
        OSError: the file cannot be written. An earlier file is as it was.
    """
    from amanda_tools.export.pytorch import Exporter

    target, name = Path(path), getattr(tool, "name", type(tool).__name__)
    if target.suffix not in FORMATS:
        raise UnsupportedProgramError(
            f"{name}: {target} has none of the suffixes {', '.join(FORMATS)}"
        )
    if example_inputs is None:
        raise UnsupportedProgramError(f"{name}: an export needs example inputs of the model")
    if not (changes := list(tool.changes())):
        raise UnsupportedProgramError(
            f"{name}: there is nothing to export; run the model under the tool first"
        )
    exporter = Exporter(name, tool, model, example_inputs, fallback=fallback)
    return exporter.write(target, changes)
