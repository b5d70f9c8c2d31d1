"""Edits the graph of an exported program of PyTorch: rounds inputs of nodes, calls functions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amanda.tools.alignment import AlignedOp
from amanda_tools._internals import quantizing_operators
from amanda_tools.export.changes import Change, Function, Rounding
from amanda_tools.export.checks import unknown

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
            UnsupportedProgramError: the operator has not run.
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
        dtype = self._integer_type(change)
        limits = (change.low, change.high, dtype)
        if parameter is not None:
            name = f"{source.target}_integers"
            found = integers_of(change, parameter)
            whole = self._constant(name, self._torch.tensor(found, dtype=dtype))
        else:
            whole = self._quantized(source, change, limits)
        return self._call("dequantize", whole, change, self._grid(source, change), limits)

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
        scale = self._torch.tensor(np.ravel(change.scale), dtype=self._torch.float32)
        zero = self._torch.tensor(np.ravel(change.zero_point), dtype=self._torch.int32)
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


def integers_of(change: Rounding, value: Any) -> Any:
    """Return the integers that a tensor is rounded to, as an array."""
    array = value.detach().cpu().numpy()
    shape = [1] * array.ndim
    if change.axis is not None:
        shape[change.axis] = -1
    scale = np.reshape(np.asarray(change.scale, np.float32), shape)
    zero = np.reshape(np.asarray(change.zero_point, np.float32), shape)
    scaled = array / scale if change.divides else array * (np.float32(1) / scale)
    return np.clip(np.round(scaled) + zero, change.low, change.high)
