"""Exports a PyTorch model with torchao's quantized tensors for weights.

Their scales and integers are those of the simulation, so that the copy computes what was simulated.
Formats: ``IntxUnpackedToInt8Tensor`` for integers of up to 8 bits, ``Int8Tensor`` where the
activation is an integer too, ``Float8Tensor`` for 8-bit floating-point numbers.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.tools.description import OpDescription, describe
from amanda_tools._operators.running import run_model
from amanda_tools.quantize.files import Quantizers, grid_of, to_integers
from amanda_tools.quantize.numbers import FLOATS
from amanda_tools.quantize.quantizers import Quantizer


@attrs.frozen
class ExportedOp:
    """The export of one operator.

    Attributes:
        id: id of the operator.
        weight: name of the format, "" if the weight is unchanged.
        activation: ``static`` if it is rounded as in the simulation, else "".
        reason: why something is unchanged, "" if nothing is.
    """

    id: str
    weight: str
    activation: str
    reason: str


@attrs.frozen
class Exported:
    """A model with quantized weights.

    Attributes:
        model: the copy.
        ops: the export of each quantized operator.
    """

    model: Any
    ops: Sequence[ExportedOp]

    @property
    def is_complete(self) -> bool:
        """True if everything that was simulated is in the model."""
        return not any(op.reason for op in self.ops)


@attrs.define
class ParameterUse:
    """One use of a parameter.

    Attributes:
        op: the operator.
        index: position of the input.
        value: the parameter.
        rank: number of axes of the operator's first input.
    """

    op: OpDescription
    index: int
    value: Any
    rank: int


def export_model(model: Any, quantizers: Quantizers, run: Callable[[], Any]) -> Exported:
    """Copy a model, with torchao's tensors for its weights.

    Args:
        model: the module; it is not changed.
        quantizers: calibrated quantizers of the tool, by op id.
        run: runs the model once, as it was run under the tool.

    Raises:
        AmandaError: torchao is missing, or nothing can be exported.
    """
    torchao = _torchao()
    uses = _uses(run)
    copied = copy.deepcopy(model)
    exporter = _Exporter(torchao, model, uses, quantizers)
    result = [exporter.export(copied, op_id, found) for op_id, found in quantizers.items()]
    if not any(op.weight for op in result):
        reasons = "; ".join(f"{op.id}: {op.reason}" for op in result[:3])
        raise AmandaError(f"quantize: nothing can be exported to torchao ({reasons})")
    return Exported(copied, result)


def _torchao() -> Any:
    try:
        with warnings.catch_warnings():
            # Importing it warns of extensions that it cannot load, and of changes in PyTorch.
            warnings.simplefilter("ignore")
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise AmandaError(
            f"quantize: torchao cannot be imported ({error}): pip install 'torchao>=0.16'"
        ) from error


def _uses(run: Callable[[], Any]) -> list[ParameterUse]:
    """Return all uses of parameters in a run."""
    found: list[ParameterUse] = []

    def collect(context: OpContext) -> None:
        inputs = context.get_inputs()
        rank = inputs[0].dim() if inputs and inputs[0] is not None else 0
        for index in range(len(inputs)):
            value = context.get_value(index)
            if value is not None:
                found.append(ParameterUse(describe(context), index, value, rank))

    collector = amanda.Tool()
    collector.add_inst_for_op(collect)
    with amanda.apply(collector):
        run_model(run)
    return found


class _Obstacle(Exception):
    """The reason why a weight is unchanged."""


class _Exporter:
    """Replaces weights in the copy of a model."""

    def __init__(
        self, torchao: Any, model: Any, uses: Sequence[ParameterUse], quantizers: Quantizers
    ) -> None:
        self._torchao = torchao
        self._torch = importlib.import_module("torch")
        self._model = model
        self._uses = uses
        self._quantizers = quantizers

    def export(self, copied: Any, op_id: str, found: Sequence[Quantizer]) -> ExportedOp:
        """Replace the weight of one operator in the copy."""
        weight = next((q for q in found if q.role == "weight"), None)
        activations = [q for q in found if q.role == "activation"]
        try:
            if any(q.factors is not None for q in activations):
                raise _Obstacle("its weight is for smoothed data")
            if weight is None:
                raise _Obstacle("torchao has no quantized products of activations")
            use = self._use(op_id, weight)
            path, name = self._place(use, weight)
            activation = self._static(use, weight, activations)
            tensor = self._tensor(use, weight, activation)
        except _Obstacle as obstacle:
            return ExportedOp(op_id, "", "", str(obstacle))
        parameter = self._torch.nn.Parameter(tensor, requires_grad=False)
        setattr(copied.get_submodule(path), name, parameter)
        reason = "" if activation is not None or not activations else "its activation stays exact"
        static = "static" if activation is not None else ""
        return ExportedOp(op_id, type(tensor).__name__, static, reason)

    def _use(self, op_id: str, weight: Quantizer) -> ParameterUse:
        for use in self._uses:
            if use.op.id == op_id and use.index == weight.index:
                if use.op.name not in ("linear", "conv2d"):
                    raise _Obstacle(f"torchao has no {use.op.name} with a quantized weight")
                return use
        raise AmandaError(f"quantize: the run has not executed op {op_id}, which the tool knows")

    def _place(self, use: ParameterUse, weight: Quantizer) -> tuple[str, str]:
        """Return the module and attribute that hold the weight, if all readers round it alike."""
        places = [
            (path, name)
            for path, module in self._model.named_modules()
            for name, value in module.named_parameters(recurse=False, remove_duplicate=False)
            if value is use.value
        ]
        if not places:
            raise _Obstacle("its weight is not a parameter of the model")
        own = [place for place in places if place[0] == use.op.module]
        path, name = own[0] if own else places[0]
        for other in self._uses:
            is_other = other.value is use.value and other.op.id != use.op.id
            elsewhere = other.op.module != path and (other.op.module, name) in places
            if is_other and not elsewhere and not self._is_alike(other, weight):
                raise _Obstacle(f"op {other.op.id} uses its weight in another way")
        return path, name

    def _is_alike(self, other: ParameterUse, weight: Quantizer) -> bool:
        """True if another operator rounds the same weight in the same way."""
        for quantizer in self._quantizers.get(other.op.id, ()):
            if quantizer.role == "weight" and quantizer.index == other.index:
                a, b = quantizer.final(), weight.final()
                same = (quantizer.grid, quantizer.axes) == (weight.grid, weight.axes)
                return bool(same and a is not None and b is not None and (a[0] == b[0]).all())
        return False

    def _static(
        self, use: ParameterUse, weight: Quantizer, activations: Sequence[Quantizer]
    ) -> tuple[Any, Any] | None:
        """Return scale and zero point of the data, where torchao rounds as the simulation does."""
        numbers = {quantizer.grid.number for quantizer in (weight, *activations)}
        if use.op.name != "linear" or len(activations) != 1 or numbers != {"int"}:
            return None
        (activation,) = activations
        is_byte = (activation.grid.low, activation.grid.high) == (-128, 127)
        is_grouped = weight.group_axis is not None
        if activation.final() is None or not is_byte or is_grouped or weight.bits > 8:
            return None
        torch = self._torch
        scale, zero = grid_of(activation, [1] * use.rank)
        shape = [1] * use.rank
        return (
            torch.tensor(scale.reshape(shape), device=use.value.device),
            torch.tensor(zero.reshape(shape), dtype=torch.int8, device=use.value.device),
        )

    def _tensor(
        self, use: ParameterUse, weight: Quantizer, activation: tuple[Any, Any] | None
    ) -> Any:
        torch, value = self._torch, use.value
        scale = torch.tensor(grid_of(weight, value.shape)[0], device=value.device)
        block = [1 if axis in weight.axes else size for axis, size in enumerate(value.shape)]
        if weight.group_axis is not None:
            final = weight.final()
            assert final is not None
            scale = torch.tensor(final[0], device=value.device)
            block = [1] * value.dim()
            block[weight.group_axis] = weight.options.group
        if weight.grid.number != "int":
            return self._float8(use, weight, scale, block)
        if weight.bits > 8:
            raise _Obstacle(f"torchao has no integers of {weight.bits} bits")
        if value.dtype != torch.float32:
            # The simulation computes in float32 and rounds once; torchao would round the scale to
            # this type.
            raise _Obstacle(f"its weight is of type {value.dtype}")
        whole = torch.tensor(to_integers(weight, value), device=value.device)
        if activation is not None:
            return self._int8(whole, scale, block, activation)
        zero = torch.zeros_like(scale, dtype=torch.int8)
        kind = getattr(torch, f"int{weight.bits}")
        return self._torchao.IntxUnpackedToInt8Tensor(
            whole, scale, zero, kind, tuple(block), value.dtype, None
        )

    def _int8(
        self, whole: Any, scale: Any, block: Sequence[int], activation: tuple[Any, Any]
    ) -> Any:
        formats = importlib.import_module(self._torchao.Int8Tensor.from_hp.__func__.__module__)
        how = formats.QuantizeTensorToInt8Kwargs(
            self._torchao.PerTensor(), self._torchao.MappingType.ASYMMETRIC
        )
        return self._torchao.Int8Tensor(
            whole,
            scale,
            list(block),
            self._torch.float32,
            act_quant_scale=activation[0],
            act_quant_zero_point=activation[1],
            act_quant_kwargs=how,
        )

    def _float8(
        self, use: ParameterUse, weight: Quantizer, scale: Any, block: Sequence[int]
    ) -> Any:
        torch, value = self._torch, use.value
        if use.op.name != "linear" or value.dtype != torch.float32 or weight.group_axis is not None:
            groups = " with groups" if weight.group_axis is not None else ""
            raise _Obstacle(
                f"torchao has no {use.op.name} of {value.dtype} in {weight.grid.number}{groups}"
            )
        name, largest = FLOATS[weight.grid.number]
        with torch.no_grad():
            numbers = (value / scale).clamp(-largest, largest).to(getattr(torch, name))
        return self._torchao.Float8Tensor(numbers, scale, list(block), dtype=value.dtype)
