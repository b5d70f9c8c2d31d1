"""Results of a sensitivity analysis, and the measurement of each operator's rounding noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.tools.mapping import MappingTool
from amanda_tools._values.tensors import arithmetic_of
from amanda_tools.quantize.quantizers import Quantizer


@attrs.frozen
class OpSensitivity:
    """The cost of quantizing one operator.

    Attributes:
        id, type, module: description of the operator.
        sqnr: signal-to-quantization-noise ratio of its output, in decibels; infinite without noise.
        metric: metric of a run in which only this operator is quantized; None without a metric.
    """

    id: str
    type: str
    module: str
    sqnr: float
    metric: float | None = None


@attrs.frozen
class Sensitivity:
    """The quantized operators, the most sensitive first.

    Attributes:
        ops: sorted by the metric if there is one, else by SQNR.
        baseline: the metric without quantization.
    """

    ops: list[OpSensitivity]
    baseline: float | None = None


class MeasuringTool(amanda.Tool):
    """Runs operators with exact and with rounded inputs, and continues with the exact output.

    Args:
        quantizers: calibrated quantizers by op id.
    """

    def __init__(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        super().__init__()
        self._quantizers = quantizers
        self._powers: dict[str, list[float]] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)

    def ratios(self) -> dict[str, float]:
        """Return the SQNR in decibels by op id, over all executions."""
        return {op_id: decibels(*powers) for op_id, powers in self._powers.items()}

    def _analyse(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        if op_id in self._quantizers:
            context.replace_op(self._measured, operator=context.get_function(), op_id=op_id)

    def _measured(self, *inputs: Any, operator: Any, op_id: str) -> Any:
        """Replacement routine: run the operator on exact and on rounded inputs."""
        rounded = list(inputs)
        for quantizer in self._quantizers[op_id]:
            found = quantizer(inputs[quantizer.index])
            rounded[quantizer.index] = inputs[quantizer.index] if found is None else found
        output = operator(*inputs)
        powers = self._powers.setdefault(op_id, [0.0, 0.0])
        for exact, other in zip(_tensors(output), _tensors(operator(*rounded)), strict=True):
            values = [arithmetic_of(t).wide_numpy(t).astype(np.float64) for t in (exact, other)]
            powers[0] += float(np.square(values[0]).sum())
            powers[1] += float(np.square(values[0] - values[1]).sum())
        return output


def decibels(signal: float, noise: float) -> float:
    """Convert a ratio of powers to decibels."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _tensors(output: Any) -> Sequence[Any]:
    found = output if isinstance(output, (list, tuple)) else [output]
    return [tensor for tensor in found if tensor is not None]
