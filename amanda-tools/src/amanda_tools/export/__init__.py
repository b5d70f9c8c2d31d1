"""Exports a model of PyTorch or Keras with what a tool has changed.

Any tool with a method ``changes()`` can be exported::

    class Halving(amanda.Tool):
        ...

        def changes(self):
            return [Function("Net.fc/linear:0", 0, lambda x: x / 2)]
"""

from __future__ import annotations

import importlib.util
import operator
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from amanda.errors import UnsupportedProgramError
from amanda.files import check_place
from amanda.state import STATE
from amanda_tools.export.changes import Change, Exported, Function, Mask, Rounding

__all__ = [
    "FORMATS",
    "Change",
    "Exported",
    "Function",
    "Mask",
    "Rounding",
    "export_model",
]

SAVED_MODEL = ("saved_model.pb", "fingerprint.pb", "variables", "assets", "keras_metadata.pb")
"""What the folder of a SavedModel can hold, first what it always holds."""

FORMATS = {"pytorch": (".onnx", ".pt2", ".safetensors"), "keras": (".keras", ".tflite", "")}
"""By framework, suffixes of what a model is exported to; a folder, a SavedModel, has none."""


def export_model(
    tool: Any,
    model: Any,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    fallback: bool = False,
    op_filter: Any = None,
    name: str = "export",
) -> Exported:
    """Write a model with the changes of a tool into a file, which needs no Amanda.

    The model is exported in evaluation mode, and is not changed. A copy runs several times, with
    its hooks. The file is read again, runs on the example inputs, and must give the outputs of the
    model under the tool: the same bits; from ``.onnx`` in ONNX Runtime without its optimizer within
    2e-6 of their largest value (float16: 2e-2); from ``.tflite`` as close as the outputs without
    rounding. From ``.onnx`` more may differ where each operator agrees on equal inputs: the runtime
    divides by a scale, where PyTorch multiplies by its reciprocal, which rounds a few values to the
    next integer.

    Args:
        tool: the tool, which has run the model; None exports it as it is.
        model: the module of PyTorch, or the model of Keras.
        example_inputs: a tuple of arguments, a dictionary of keyword arguments, or a tensor.
        path: the file; its suffix is the format, one of `FORMATS`. ``.safetensors`` holds the
            state dictionary. A path without one is the folder of a SavedModel.
        fallback: leave an operator whose change the format cannot express as it is.
        op_filter: that of the scope under which the tool has run the model.
        name: for messages, where there is no tool.

    Raises:
        UnsupportedProgramError: the exporter refuses the model, the format cannot express a change,
            the model has changed, or is random, or the outputs differ; the message names the first
            operator, where the format tells it. Or a scope is open.
        AmandaError: the tool is not ready.
        OSError: the file cannot be written. An earlier file is as it was.
    """
    target, name = Path(path), getattr(tool, "name", type(tool).__name__) if tool else name
    exporter = _exporter_of(model, target, name)
    if example_inputs is None:
        raise UnsupportedProgramError(f"{name}: an export needs example inputs of the model")
    if STATE.scopes:
        raise UnsupportedProgramError(f"{name}: a model is exported after the with-block has ended")
    given = name, tool, model, example_inputs
    made: Exported = exporter(*given, fallback=fallback, op_filter=op_filter).write(target)
    return made


def _exporter_of(model: Any, path: Path, name: str) -> Any:
    """Return the class that exports a model to a path.

    Raises:
        UnsupportedProgramError: there is none.
    """
    classes = {"pytorch": ("torch", "nn.Module"), "keras": ("keras", "Model")}
    for framework, (module, cls) in classes.items():
        found = sys.modules.get(module)
        if found is not None and isinstance(model, operator.attrgetter(cls)(found)):
            _check_suffix(path, framework)
            return importlib.import_module(f"amanda_tools.export.{framework}").Exporter
    raise UnsupportedProgramError(f"{name}: only models of PyTorch and Keras can be exported")


def check_target(path: Path) -> None:
    """Check, before a program runs, that its model can be written at its end.

    Raises:
        UnsupportedProgramError: its suffix is no format, or packages are missing.
        OSError: it cannot be written.
    """
    modules = {"pytorch": "torch", "keras": "tensorflow"}
    _check_suffix(path, *(each for each, name in modules.items() if importlib.util.find_spec(name)))
    needed = ("onnx", "onnxscript", "onnxruntime") if path.suffix == ".onnx" else ()
    if missing := [each for each in needed if importlib.util.find_spec(each) is None]:
        raise UnsupportedProgramError(
            f"{path.name}: {', '.join(missing)} not found: pip install 'amanda-tools[onnx]'"
        )
    check_place(path, () if path.suffix else SAVED_MODEL)
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"amanda")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


def _check_suffix(path: Path, *frameworks: str) -> None:
    suffixes = [suffix for each in frameworks for suffix in FORMATS[each]]
    if path.suffix not in suffixes:
        names = " or ".join(each.title().replace("torch", "Torch") for each in frameworks)
        raise UnsupportedProgramError(
            f"{path} has none of the suffixes {', '.join(filter(None, suffixes))}, as which "
            f"a model of {names} is written"
        )
