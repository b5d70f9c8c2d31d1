"""Compares an exported model with the model under the tool."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import UnsupportedProgramError
from amanda.python.nested import leaves
from amanda.tools.alignment import AlignedOp, run_example
from amanda_tools._internals import is_onnx_operator, leaves_of, quantizing_operators
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.export.changes import Change, Function, Mask


class Applied(amanda.Tool):
    """Makes changes that are given as data.

    Attributes:
        drivers: those of its last scope.
        seen: ids of the operators that it has met.
    """

    # Without a straight-through gradient, which a SavedModel cannot hold.
    differentiable = True

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__()
        self._changes = changes
        self.drivers: Sequence[Any] = ()
        self.seen = set[str]()
        self.add_inst_for_op(self._analyse)

    def enter_scope(self, drivers: Sequence[Any]) -> None:
        self.drivers = drivers

    def check(self, changes: Sequence[Change]) -> None:
        """Check that the operators of some changes have run.

        Raises:
            UnsupportedProgramError: one has not.
        """
        for change in changes:
            if change.op not in self.seen:
                raise unknown(change.op)

    def _analyse(self, context: OpContext) -> None:
        self.seen.add(context.get_op_id())
        for change in self._changes:
            if change.op == context.get_op_id():
                context.insert_before_op(changed, inputs=[change.input], change=change)


def unknown(op_id: str) -> UnsupportedProgramError:
    """The error for an operator that has not run."""
    return UnsupportedProgramError(
        f"export: op {op_id} has not run: the model has changed since the tool ran it"
    )


@amanda.traceable
def changed(value: Any, change: Change) -> Any:
    """Instrumentation routine: make one change.

    Raises:
        UnsupportedProgramError: a mask has another shape than the value.
    """
    if isinstance(change, Function):
        return change.function(value)
    arithmetic = arithmetic_of(value)
    if isinstance(change, Mask):
        if shape_of(value) != change.mask.shape:
            raise UnsupportedProgramError(
                f"export: the mask of op {change.op} has the shape {change.mask.shape}, and its "
                f"weight {shape_of(value)}: the model has changed"
            )
        return value * arithmetic.constant(change.mask, value)
    wide = arithmetic.widen(value)
    scale, zero = (arithmetic.constant(part, wide) for part in change.grid(len(value.shape)))
    if change.integers is not None:
        given = arithmetic.constant(change.integers, wide)
        return arithmetic.cast_like((given - zero) * scale, value)
    scaled = arithmetic.divide(wide, scale) if change.divides else wide * (1 / scale)
    whole = arithmetic.round(scaled) + zero
    rounded = (arithmetic.clip(whole, change.low, change.high) - zero) * scale
    return arithmetic.cast_like(rounded, value)


def outputs_under(model: Any, inputs: Any, *tools: amanda.Tool, op_filter: Any = None) -> list[Any]:
    """Return the outputs of a model under tools."""
    with amanda.apply(*tools, op_filter=op_filter or None):
        return flat(run_example(model, inputs))


def tensors(values: Any) -> list[Any]:
    """Return the tensors of what a model takes or returns, in order."""
    # A flat list, as those of Keras come, has the same order for both.
    found = leaves_of(values) if "torch" in sys.modules else leaves(values)
    return [leaf for leaf in found if hasattr(leaf, "dtype")]


def flat(values: Any) -> list[Array]:
    """Return the tensors of what a model takes or returns as arrays."""
    return [arithmetic_of(tensor).wide_numpy(tensor) for tensor in tensors(values)]


def difference(found: Sequence[Array], expected: Sequence[Array], tolerance: float) -> float | None:
    """Return the largest absolute difference; None if it is over the tolerance. NaN and infinities
    are equal to themselves.

    Args:
        found, expected: arrays.
        tolerance: the largest difference that is allowed, relative to the largest expected value
            where that is over 1; for float16 as many units in the last place; 0 for equal arrays.
    """
    largest = 0.0
    if len(found) != len(expected):
        return None
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return None
        gap, is_allowed = _gap(one, other, tolerance)
        if not is_allowed:
            return None
        largest = max(largest, gap)
    return largest


def _gap(one: Array, other: Array, tolerance: float) -> tuple[float, bool]:
    """Return the largest difference of two arrays of one shape, and True if it is allowed."""
    units = 2**13 if one.dtype == np.float16 else 1
    size = np.abs(other[np.isfinite(other)]).max(initial=1)
    one, other = (part.astype(np.result_type(part, np.float64)) for part in (one, other))
    with np.errstate(invalid="ignore"):
        is_same = (one == other) | (np.isnan(one) & np.isnan(other))
        gap = float(np.where(is_same, 0, np.abs(one - other)).max(initial=0))
    return gap, bool(gap <= units * tolerance * size)


def run_onnx(
    model: Any,
    inputs: Any,
    given: Mapping[str, Array] = MappingProxyType({}),
    *,
    is_optimized: bool = False,
) -> list[Any]:
    """Return the outputs of a model, a path or bytes, in ONNX Runtime.

    Args:
        inputs: the first inputs, in order.
        given: the other ones, by name.
        is_optimized: with its optimizer.
    """
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    if not is_optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs() if value.name not in given]
    values = [arithmetic_of(value).numpy(value) for value in tensors(inputs)]
    found: list[Any] = session.run(None, {**dict(zip(names, values, strict=True)), **given})
    return found


class Outputs(amanda.Tool):
    """Keeps the first output of each operator.

    Args:
        name: gives its name among the values.
    """

    def __init__(self, name: Callable[[OpContext], str] = OpContext.get_op_id) -> None:
        super().__init__()
        self.values: dict[str, Array] = {}
        self._name = name
        self.add_inst_for_op(self._analyse, require_outputs=True)

    def _analyse(self, context: OpContext) -> None:
        if context.get_outputs():
            context.insert_after_op(self._keep, outputs=[0], name=self._name(context))

    def _keep(self, output: Any, name: str) -> None:
        """Instrumentation routine: copy an output."""
        if output is not None and arithmetic_of(output).is_readable_float(output):
            self.values[name] = np.array(arithmetic_of(output).wide_numpy(output))


def by_op(aligned: Mapping[str, AlignedOp], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the values of nodes by the ids of the operators whose outputs they compute."""
    # A node of several operators computes the outputs of the last one.
    last = {found.nodes[-1]: op_id for op_id, found in aligned.items() if found.nodes}
    return {op_id: values[node] for node, op_id in last.items() if node in values}


def first_difference(
    model: Any,
    inputs: Any,
    *tools: amanda.Tool,
    op_filter: Any,
    found: Mapping[str, Array],
    tolerance: float,
) -> str:
    """Return the id of the first operator whose output in a program is another one than under
    tools, and how large the difference is; "" if there is none.

    Args:
        model, inputs, tools, op_filter: as for :func:`outputs_under`.
        found: the outputs in the program, by the id of the operator.
        tolerance: as for :func:`difference`.
    """
    expected = Outputs()
    outputs_under(model, inputs, *tools, expected, op_filter=op_filter)
    for op_id, other in expected.values.items():
        one = found.get(op_id)
        if one is None or one.shape != other.shape:
            continue
        gap, is_allowed = _gap(one, other, tolerance)
        if not is_allowed:
            return f"{op_id}, by {gap:.2g}"
    return ""


def ungrouped(whole: Any, scale: Any, zero: Any) -> Any:
    """Return the numbers that integers of a module stand for, with a scale for each group."""
    for axis, (size, groups) in enumerate(zip(whole.shape, scale.shape, strict=True)):
        if groups != size:
            scale, zero = (part.repeat_interleave(size // groups, axis) for part in (scale, zero))
    return (whole.to(scale.dtype) - zero) * scale


def values_in_graph(program: Any, inputs: Any, *, divides: bool = False) -> dict[str, Array]:
    """Return the floating-point values of nodes of a program of torch.export.

    Args:
        divides: values are divided by the scale that they are quantized by, as ONNX Runtime does;
            PyTorch's operators multiply by its reciprocal.
    """
    values = dict[str, Array]()
    torch, fx = map(importlib.import_module, ("torch", "torch.fx"))
    ops = quantizing_operators()
    per_tensor, per_channel = ops.quantize_per_tensor.default, ops.quantize_per_channel.default

    class Keeping(fx.Interpreter):  # type: ignore[name-defined,misc]
        def run_node(self, n: Any) -> Any:
            found = super().run_node(n)
            if n.op == "call_function" and hasattr(found, "detach") and found.is_floating_point():
                values[n.name] = np.array(arithmetic_of(found).numpy(found))
            return found

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if divides and target is per_tensor:
                value, scale, *rest = args
                args = (value / scale, 1.0, *rest)
            elif divides and target is per_channel:
                value, scale, zero, axis, *rest = args
                shape = [-1 if each == axis else 1 for each in range(value.dim())]
                args = (value / scale.reshape(shape), torch.ones_like(scale), zero, axis, *rest)
            elif is_onnx_operator(target):
                return ungrouped(*args[0])
            return super().call_function(target, args, kwargs)

    Keeping(program.module().requires_grad_(False)).run(*tensors(inputs))
    return values


def first_difference_in_onnx(
    program: Any,
    inputs: Any,
    exported: Any,
    tolerance: float,
    aligned: Callable[[], Mapping[str, AlignedOp]],
) -> str:
    """Return the first operator that ONNX Runtime computes otherwise than a program of
    torch.export from the same inputs, and how large the difference is; "" if there is none.

    Each node gets what the program has computed, so that differences do not add up: rounding to
    integers would enlarge them.

    Args:
        program, inputs: the program, and inputs of it.
        exported: the model of ONNX.
        tolerance: as for :func:`difference`.
        aligned: gives the model's operators, with their nodes in the program.
    """
    onnx = importlib.import_module("onnx")
    values, made = values_in_graph(program, inputs, divides=True), dict[str, str]()
    edited = onnx.ModelProto()
    edited.CopyFrom(exported)
    graph = edited.graph
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name in values:
                node.output[i] = made[name] = f"{name}/made"
    del graph.output[:], graph.value_info[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made.values())
    given = {name: values[name] for name in made}
    to_type, info = onnx.helper.np_dtype_to_tensor_dtype, onnx.helper.make_tensor_value_info
    graph.input.extend(info(name, to_type(v.dtype), v.shape) for name, v in given.items())
    found = run_onnx(edited.SerializeToString(), inputs, given)
    for name, one in zip(made, found, strict=True):
        gap, is_allowed = _gap(one, given[name], tolerance)
        if not is_allowed:
            return f"{_readers(program, aligned())[name]}, by {gap:.2g}"
    return ""


def _readers(program: Any, aligned: Mapping[str, AlignedOp]) -> dict[str, str]:
    """Return the operator that each node is of, or that reads it: of changes of its inputs."""
    found = {name: op_id for op_id, op in aligned.items() for name in op.nodes}
    for node in reversed(program.graph.nodes):
        for user in node.users:
            found.setdefault(node.name, found.get(user.name, user.name))
    return found
