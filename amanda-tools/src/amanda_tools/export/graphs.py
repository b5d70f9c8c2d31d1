"""Edits the graph of an exported program of PyTorch: rounds inputs of nodes, calls functions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda.errors import UnsupportedProgramError
from amanda.tools.alignment import AlignedOp
from amanda_tools._internals import quantizing_operators
from amanda_tools._values.tensors import Array
from amanda_tools.export.changes import Change, Function, Rounding
from amanda_tools.export.checks import changed, ungrouped, unknown

_SWAPPED = {"aten.embedding.default": (1, 0)}
"""Operators of programs whose first arguments have another order than the function's."""


class _Inexpressible(Exception):
    """The reason why a program cannot have a change."""


class EditedGraph:
    """The graph of an exported program.

    Args:
        module: the program's module, which is changed.
        aligned: the model's operators, with their nodes in the graph.
        is_onnx: the program will be one of ONNX, whose integers always have their type's range.
    """

    def __init__(self, module: Any, aligned: Mapping[str, AlignedOp], *, is_onnx: bool) -> None:
        self._torch = importlib.import_module("torch")
        self._ops = quantizing_operators()
        self._module, self._graph = module, module.graph
        self._aligned, self._is_onnx = aligned, is_onnx
        self._nodes = {node.name: node for node in module.graph.nodes}

    def change(self, changes: Sequence[Change]) -> str:
        """Change the inputs of one operator; return the reason if the program cannot have it.

        Raises:
            UnsupportedProgramError: the operator has not run, or with another shape.
        """
        op_id = changes[0].op
        found = self._aligned.get(op_id)
        if found is None:
            raise unknown(op_id)
        if not found.nodes:
            return found.reason
        node = self._nodes[found.nodes[-1]]
        try:
            places = [self._place(node, change) for change in changes]
        except _Inexpressible as reason:
            return str(reason)
        for change, place in zip(changes, places, strict=True):
            with self._graph.inserting_before(node):
                node.update_arg(place, self._changed(node.args[place], change))
        return ""

    def finished(self) -> Any:
        """Return the module, without parameters that nothing reads any more."""
        self._graph.eliminate_dead_code()
        self._graph.lint()
        self._module.recompile()
        read = {node.target for node in self._graph.nodes if node.op == "get_attr"}
        for name, _ in [*self._module.named_parameters(remove_duplicate=False)]:
            if name not in read:
                owner, _, last = name.rpartition(".")
                delattr(self._module.get_submodule(owner), last)
        return self._module

    def _place(self, node: Any, change: Change) -> int:
        """Return the position of an input among the arguments of a node.

        Raises:
            _Inexpressible: there is none, or it cannot be rounded so.
            UnsupportedProgramError: it has another shape.
        """
        order = _SWAPPED.get(str(node.target), ())
        place = order[change.input] if change.input < len(order) else change.input
        source = node.args[place] if place < len(node.args) else None
        value = getattr(source, "meta", {}).get("val")
        if not isinstance(value, self._torch.Tensor):
            raise _Inexpressible(f"input {change.input} is no argument of {node.target}")
        if isinstance(change, Rounding):
            if value.dtype != self._torch.float32:
                raise _Inexpressible(f"input {change.input} is of type {value.dtype}")
            if change.axis is None and np.size(change.scale) > 1:
                raise _Inexpressible("its channels are on several axes")
            if not change.fits(tuple(value.shape)):
                raise UnsupportedProgramError(
                    f"export: what rounds input {change.input} of op {change.op} is not for its "
                    f"shape {tuple(value.shape)}: the model has changed"
                )
            if self._is_onnx and self._integer_type(change) is self._torch.int16:
                raise _Inexpressible("torch.onnx writes integers of 8 bits at most")
        elif not isinstance(change, Function):
            raise _Inexpressible(f"{type(change).__name__} is no change that is known")
        return place

    def _changed(self, source: Any, change: Change) -> Any:
        """Add nodes for a change of a value; return the last one."""
        if isinstance(change, Function):
            return self._graph.call_function(change.function, (source,))
        assert isinstance(change, Rounding)
        parameter = self._parameter(source)
        limits = (change.low, change.high, self._integer_type(change))
        if change.integers is not None or parameter is not None:
            found = integers_of(change, parameter)
            if self._is_onnx and limits[2] is self._torch.int8 and not change.is_small:
                # On x86 without VNNI, ONNX Runtime's products of signed integers overflow.
                zero, found = np.add(change.zero_point, 128), np.add(found, 128)
                change = attrs.evolve(change, zero_point=zero, low=0, high=255)
                limits = (0, 255, self._torch.uint8)
            whole = self._integers(source, change, found)
        elif change.group:
            return self._graph.call_function(lambda value: changed(value, change), (source,))
        else:
            whole = self._quantized(source, change, limits)
        grid = self._grid(source, change)
        if not change.group:
            return self._call("dequantize", whole, change, grid, limits)
        if self._is_onnx:
            given = (whole, *grid, change.group, change.axis)
            return self._graph.call_function(_onnx_groups, given)
        return self._graph.call_function(ungrouped, (whole, *grid))

    def _integers(self, source: Any, change: Rounding, found: Array) -> Any:
        """Return a node of constant integers; small ones lie two to a byte in a program."""
        name = f"{source.target if source.op == 'get_attr' else source.name}_integers"
        dtype = self._integer_type(change)
        if self._is_onnx or not change.is_small:
            return self._constant(name, self._torch.tensor(found, dtype=dtype))
        flat = np.append(found, [0] * (found.size % 2)).astype(np.int8).view(np.uint8) & 15
        packed = self._constant(name, self._torch.tensor(flat[::2] | flat[1::2] << 4))
        return self._graph.call_function(_unpacked, (packed, list(found.shape)))

    def _integer_type(self, change: Rounding) -> Any:
        torch, low, high = self._torch, change.low, change.high
        if low >= -128 and high <= 127:
            return torch.int8
        return torch.uint8 if low >= 0 and high <= 255 else torch.int16

    def _quantized(self, source: Any, change: Rounding, limits: Sequence[Any]) -> Any:
        grid, aten = self._grid(source, change), self._torch.ops.aten
        is_full = (change.low, change.high) in ((-128, 127), (0, 255))
        if self._is_onnx and not is_full and change.axis is None:
            scale, zero = grid
            bounds = [(limit - zero) * scale for limit in (change.low, change.high)]
            source = self._graph.call_function(aten.clamp.default, (source, *bounds))
        if change.divides and not self._is_onnx and change.axis is None:
            source = self._graph.call_function(aten.div.Tensor, (source, grid[0]))
            grid = (1.0, grid[1])
        return self._call("quantize", source, change, grid, limits)

    def _call(self, what: str, source: Any, change: Rounding, grid: Any, limits: Any) -> Any:
        per = "tensor" if change.axis is None else "channel"
        axis = () if change.axis is None else (change.axis,)
        operator = getattr(self._ops, f"{what}_per_{per}").default
        return self._graph.call_function(operator, (source, *grid, *axis, *limits))

    def _grid(self, source: Any, change: Rounding) -> tuple[Any, Any]:
        """Return scale and zero point: numbers, or nodes of constants."""
        if change.axis is None:
            return float(np.ravel(change.scale)[0]), int(np.ravel(change.zero_point)[0])
        name = f"{source.target}_{change.input}" if source.op == "get_attr" else source.name
        shape = np.shape(change.scale) if change.group else -1
        kind = self._integer_type(change) if change.group else self._torch.int32
        scale = self._torch.tensor(np.reshape(change.scale, shape), dtype=self._torch.float32)
        zero = self._torch.tensor(np.reshape(change.zero_point, shape), dtype=kind)
        return self._constant(f"{name}_scale", scale), self._constant(f"{name}_zero", zero)

    def _constant(self, name: str, value: Any) -> Any:
        """Return a node of a new constant."""
        name, taken = name.replace(".", "_"), {n for n, _ in self._module.named_buffers()}
        free = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 10_000))) if n not in taken)
        self._module.register_buffer(free, value)
        node = self._graph.get_attr(free)
        node.meta["val"] = value
        return node

    def _parameter(self, source: Any) -> Any:
        """Return the parameter that a node reads; None for other nodes."""
        if source.op != "get_attr":
            return None
        owner, _, name = source.target.rpartition(".")
        return getattr(self._module.get_submodule(owner), name)


def _unpacked(packed: Any, shape: Sequence[int]) -> Any:
    """Return the signed integers of 4 bits of which each byte has two, the first one below."""
    torch = importlib.import_module("torch")
    both = torch.stack([packed & 15, packed >> 4], -1).flatten()[: math.prod(shape)]
    return ((both ^ 8).to(torch.int8) - 8).reshape(shape)


def _onnx_groups(whole: Any, scale: Any, zero: Any, group: int, axis: int) -> Any:
    """Do what :func:`checks.ungrouped` does in ONNX, by the operator of its set 21."""
    symbolic = importlib.import_module("torch.onnx.ops").symbolic
    how = {"axis": axis, "block_size": group}
    given = ("DequantizeLinear", (whole, scale, zero), how)
    return symbolic(*given, dtype=scale.dtype, shape=whole.shape, version=21)


def packed_in_onnx(model: Any) -> None:
    """Store the constant integers of 4 bits of a model of ONNX two to a byte."""
    onnx, graph = importlib.import_module("onnx"), model.graph
    int4, int8 = importlib.import_module("ml_dtypes").int4, onnx.TensorProto.INT8
    bytes_ = [each for each in graph.initializer if each.data_type == int8]
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in bytes_}
    for node in graph.node:
        # The integers, and the zero point, which has their type.
        names = [*node.input[::2]] if node.op_type == "DequantizeLinear" else []
        found = [constants[name] for name in names if name in constants]
        if found and len(found) == len(names) and all((a == a.clip(-8, 7)).all() for a in found):
            for place, name in enumerate(names):
                node.input[2 * place] = f"{name}_4"
                if f"{name}_4" not in constants:
                    new = onnx.numpy_helper.from_array(constants[name].astype(int4), f"{name}_4")
                    graph.initializer.append(new)
                    constants[new.name] = constants[name]
    read = {name for node in graph.node for name in node.input}
    for field in (graph.initializer, graph.value_info):
        for each in [each for each in field if each.name in constants and each.name not in read]:
            field.remove(each)


def integers_of(change: Rounding, value: Any) -> Any:
    """Return the integers that a tensor is rounded to, as an array."""
    if change.integers is not None:
        return change.integers
    array = value.detach().cpu().numpy()
    scale, zero = change.grid(array.ndim)
    scaled = array / scale if change.divides else array * (np.float32(1) / scale)
    return np.clip(np.round(scaled) + zero, change.low, change.high)
