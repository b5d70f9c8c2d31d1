"""Compares an exported model with the model under the tool."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
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
        gap = _gap(one, other)
        if not gap <= tolerance * max(1.0, other.double().abs().max().item()):
            return None
        largest = max(largest, gap)
    return largest


def run_onnx(model: Any, inputs: Any, given: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a model, a path or bytes, in ONNX Runtime without its optimizer.

    Args:
        inputs: the first inputs, in order.
        given: the other ones, by name.
    """
    torch, ort = importlib.import_module("torch"), importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs() if value.name not in given]
    values = {**dict(zip(names, flat(inputs), strict=True)), **given}
    found = session.run(
        None, {name: value.detach().cpu().numpy() for name, value in values.items()}
    )
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
    model: Any, inputs: Any, *tools: amanda.Tool, op_filter: Any, program: Any
) -> str:
    """Return the id of the first operator whose output in a program of torch.export is another one
    than under tools, and how large the difference is; "" if there is none.

    Args:
        model, inputs, tools, op_filter: as for :func:`outputs_under`.
        program: the program.
    """
    expected = _Outputs()
    outputs_under(model, inputs, *tools, expected, op_filter=op_filter)
    values = _values_in_graph(program, inputs)
    for op_id, found in amanda.align(model, inputs, program).items():
        one = values.get(found.nodes[-1]) if found.nodes else None
        other = expected.values.get(op_id)
        is_known = one is not None and other is not None and one.shape == other.shape
        if is_known and not one.equal(other):
            return f"{op_id}, by {_gap(one, other):.2g}"
    return ""


def first_difference_in_onnx(
    model: Any, inputs: Any, program: Any, exported: Any, tolerance: float
) -> str:
    """Return the first operator that ONNX Runtime computes otherwise than a program of
    torch.export from the same inputs, and how large the difference is; "" if there is none.

    Each node gets what the program has computed, so that differences do not add up: rounding to
    integers would enlarge them. A runtime divides by a scale, where the program multiplies by its
    reciprocal, which rounds a few values to the next integer.

    Args:
        model, inputs: what is exported.
        program: the program.
        exported: the model of ONNX.
        tolerance: as for :func:`difference`.
    """
    onnx = importlib.import_module("onnx")
    values, changed, made = _values_in_graph(program, inputs), onnx.ModelProto(), dict[str, str]()
    changed.CopyFrom(exported)
    graph = changed.graph
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name in values:
                node.output[i] = made[name] = f"{name}/made"
    del graph.output[:], graph.value_info[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made.values())
    given = {name: values[name] for name in made}
    kinds = {
        name: onnx.helper.np_dtype_to_tensor_dtype(v.numpy().dtype) for name, v in given.items()
    }
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, kinds[name], v.shape) for name, v in given.items()
    )
    found = run_onnx(changed.SerializeToString(), inputs, given)
    for name, one in zip(made, found, strict=True):
        rounded = int((one != given[name]).sum()) if name.startswith("dequantize") else one.numel()
        if difference([one], [given[name]], tolerance) is None and rounded > one.numel() / 1000 + 1:
            aligned = amanda.align(model, inputs, program).items()
            where = next((op_id for op_id, op in aligned if name in op.nodes), name)
            return f"{where}, by {_gap(one, given[name]):.2g}"
    return ""


def _gap(one: Any, other: Any) -> float:
    return float((one.double() - other.double()).abs().max())


def _values_in_graph(program: Any, inputs: Any) -> dict[str, Any]:
    """Return the floating-point values of nodes of a program of torch.export."""
    module, values = program.module(), dict[str, Any]()
    fx = importlib.import_module("torch.fx")

    class Keeping(fx.Interpreter):  # type: ignore[name-defined,misc]
        def run_node(self, n: Any) -> Any:
            found = super().run_node(n)
            if n.op == "call_function" and hasattr(found, "detach") and found.is_floating_point():
                values[n.name] = found.detach().clone()
            return found

    Keeping(module).run(*leaves_of(inputs))
    return values
