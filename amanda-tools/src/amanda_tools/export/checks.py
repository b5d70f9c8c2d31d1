"""Compares an exported model with the model under the tool."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

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


def outputs_under(model: Any, inputs: Any, *tools: amanda.Tool, op_filter: Any) -> list[Any]:
    """Return the outputs of a model under tools."""
    with amanda.apply(*tools, op_filter=op_filter or None):
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


def run_onnx(model: Any, inputs: Any) -> list[Any]:
    """Return the outputs of a model, a path or bytes, in ONNX Runtime without its optimizer."""
    torch, ort = importlib.import_module("torch"), importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    values = [value.detach().cpu().numpy() for value in flat(inputs)]
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, dict(zip(names, values, strict=True)))
    return [torch.from_numpy(np.asarray(each)) for each in found]


class _Outputs(amanda.Tool):
    """Keeps the first output of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: OpContext) -> None:
        context.insert_after_op(self._keep, outputs=[0], op_id=context.get_op_id())

    def _keep(self, output: Any, op_id: str) -> None:
        """Instrumentation routine: copy an output."""
        self.values[op_id] = None if output is None else output.detach().clone()


def first_difference(
    model: Any, inputs: Any, *tools: amanda.Tool, op_filter: Any, program: Any, tolerance: float
) -> str:
    """Return the id of the first operator whose output in a program is another one than under
    tools, and how large the difference is; "" if there is none.

    Args:
        model, inputs, tools, op_filter: as for :func:`outputs_under`.
        program: of torch.export, or a model of ONNX.
        tolerance: as for :func:`difference`.
    """
    expected = _Outputs()
    outputs_under(model, inputs, *tools, expected, op_filter=op_filter)
    aligned = amanda.align(model, inputs, program)
    # A node of several operators computes the outputs of the last one.
    last = {found.nodes[-1]: op_id for op_id, found in aligned.items() if found.nodes}
    is_onnx = not hasattr(program, "module")
    values = (_values_in_onnx if is_onnx else _values_in_graph)(program, inputs, {*last})
    for node, op_id in last.items():
        one, other = values.get(node), expected.values.get(op_id)
        if one is None or other is None or one.shape != other.shape:
            continue
        if difference([one], [other], tolerance) is None:
            gap = (one.double() - other.double()).abs().max().item()
            return f"{op_id}, by {gap:.2g}"
    return ""


def _values_in_graph(program: Any, inputs: Any, names: set[str]) -> dict[str, Any]:
    """Return the values of nodes of a program of torch.export."""
    module, values = program.module(), dict[str, Any]()
    fx = importlib.import_module("torch.fx")

    class Keeping(fx.Interpreter):  # type: ignore[name-defined,misc]
        def run_node(self, n: Any) -> Any:
            found = super().run_node(n)
            if n.name in names and hasattr(found, "detach"):
                values[n.name] = found.detach().clone()
            return found

    Keeping(module).run(*leaves_of(inputs))
    return values


def _values_in_onnx(model: Any, inputs: Any, names: set[str]) -> dict[str, Any]:
    """Return the first outputs of nodes of a model of ONNX."""
    onnx = importlib.import_module("onnx")
    given, count = onnx.ModelProto(), len(model.graph.output)
    given.CopyFrom(model)
    own = {node.name: node.output[0] for node in given.graph.node if node.name in names}
    given.graph.output.extend(onnx.ValueInfoProto(name=name) for name in own.values())
    found = run_onnx(given.SerializeToString(), inputs)
    return dict(zip(own, found[count:], strict=True))
