"""Compares an exported model with the model under the tool."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda import OpContext
from amanda.tools.alignment import run_example
from amanda_tools._internals import leaves_of
from amanda_tools.export.changes import Change, Function, Rounding


class Applied(amanda.Tool):
    """Makes changes that are given as data."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__()
        self._changes = changes
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: OpContext) -> None:
        for change in self._changes:
            if change.op == context.get_op_id():
                context.insert_before_op(_changed, inputs=[change.input], change=change)


def _changed(value: Any, change: Change) -> Any:
    """Instrumentation routine: make one change."""
    torch = importlib.import_module("torch")
    if isinstance(change, Function):
        return change.function(value)
    if not isinstance(change, Rounding):
        return value * torch.as_tensor(change.mask, device=value.device)
    shape = [1] * value.dim()
    if change.axis is not None:
        shape[change.axis] = -1
    scale, zero = (
        torch.as_tensor(part, dtype=torch.float32, device=value.device).reshape(shape)
        for part in (change.scale, change.zero_point)
    )
    scaled = value / scale if change.divides else value * (1 / scale)
    return ((scaled.round() + zero).clamp(change.low, change.high) - zero) * scale


def outputs_under(tool: amanda.Tool, model: Any, inputs: Any) -> list[Any]:
    """Return the outputs of a model under a tool."""
    with amanda.apply(tool):
        return flat(run_example(model, inputs))


def flat(outputs: Any) -> list[Any]:
    """Return the tensors of outputs."""
    return [leaf.detach() for leaf in leaves_of(outputs) if hasattr(leaf, "detach")]


def difference(found: Sequence[Any], expected: Sequence[Any], tolerance: float) -> float | None:
    """Return the largest absolute difference; None if it is over the tolerance.

    Args:
        found, expected: tensors.
        tolerance: the largest difference that is allowed, relative to the largest expected value
            where that is over 1; 0 for equal tensors.
    """
    largest = 0.0
    if len(found) != len(expected):
        return None
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return None
        if one.equal(other) or not one.numel():
            continue
        gap = (one.double() - other.double()).abs().max().item()
        if not gap <= tolerance * max(1.0, other.double().abs().max().item()):
            return None
        largest = max(largest, gap)
    return largest


def run_onnx(path: Path, inputs: Any) -> list[Any]:
    """Return the outputs of a model in ONNX Runtime without its optimizer."""
    torch, ort = importlib.import_module("torch"), importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    values = [value.detach().cpu().numpy() for value in flat(inputs)]
    names = [value.name for value in session.get_inputs()]
    return [
        torch.from_numpy(each) for each in session.run(None, dict(zip(names, values, strict=True)))
    ]
