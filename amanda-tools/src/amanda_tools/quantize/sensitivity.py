"""Results of a sensitivity analysis, and the measurement of each operator's rounding noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.tools.mapping import MappingTool
from amanda_tools._values.tensors import arithmetic_of, reader_of
from amanda_tools.quantize.quantizers import Quantizer


@attrs.frozen
class OpSensitivity:
    """The cost of quantizing one operator.

    Attributes:
        id, type, module: description of the operator.
        sqnr: signal-to-quantization-noise ratio of its output, in decibels; infinite without noise.
        metric: metric of a run in which only this operator is quantized; None without a metric.
        is_kept: the option keep leaves it in floating point.
    """

    id: str
    type: str
    module: str
    sqnr: float
    metric: float | None = None
    is_kept: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the operator as a line of a table."""
        metric = "" if self.metric is None else f"{self.metric:.4g}"
        return self.id, f"{self.sqnr:.1f}", metric, "float" if self.is_kept else "rounded"


@attrs.frozen
class Sensitivity:
    """The quantized operators, the most sensitive first.

    Attributes:
        ops: sorted by the metric if there is one, else by SQNR.
        baseline: the metric without quantization.
    """

    ops: list[OpSensitivity]
    baseline: float | None = None

    @classmethod
    def ranked(
        cls, ops: Iterable[OpSensitivity], keep: int, baseline: float | None = None
    ) -> Sensitivity:
        """Sort operators, the most sensitive first, of which the first ones are kept."""
        order = sorted(ops, key=lambda op: (op.sqnr if op.metric is None else op.metric, op.sqnr))
        marked = [attrs.evolve(op, is_kept=place < keep) for place, op in enumerate(order)]
        return cls(marked, baseline)


class MeasuringTool(amanda.Tool):
    """Runs operators with exact and with rounded inputs, and continues with the exact output.

    Attributes:
        waiting: operators that have run before they were calibrated.

    Args:
        quantizers: quantizers by op id.
    """

    def __init__(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        super().__init__()
        self._quantizers = quantizers
        self._powers: dict[str, list[float]] = {}
        self.waiting: set[str] = set()
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.measure)

    def ratios(self) -> dict[str, float]:
        """Return the SQNR in decibels by op id, over all executions."""
        return {op_id: decibels(*powers) for op_id, powers in self._powers.items()}

    def measure(self, context: OpContext) -> None:
        """Measure one operator; an analysis."""
        op_id = context.get_op_id()
        if op_id in self._quantizers:
            context.replace_op(self._measured, operator=context.get_function(), op_id=op_id)

    def _measured(self, *inputs: Any, operator: Any, op_id: str) -> Any:
        """Replacement routine: run the operator on exact and on rounded inputs."""
        output, rounded = operator(*inputs), list(inputs)
        if not all(quantizer.is_ready for quantizer in self._quantizers[op_id]):
            self.waiting.add(op_id)
            return output
        for quantizer in self._quantizers[op_id]:
            found = quantizer(inputs[quantizer.index])
            rounded[quantizer.index] = inputs[quantizer.index] if found is None else found
        powers = self._powers.setdefault(op_id, [0.0, 0.0])
        for place, power in enumerate(powers_of(output, operator(*rounded))):
            powers[place] += power
        return output


def ratio_of(exact: Any, other: Any) -> float:
    """Return the SQNR of an output in decibels."""
    return decibels(*powers_of(exact, other))


def powers_of(exact: Any, other: Any) -> tuple[float, float]:
    """Return the sum of squares of the tensors of an output, and that of their errors."""
    signal = noise = 0.0
    for pair in zip(_tensors(exact), _tensors(other), strict=True):
        values = [arithmetic_of(t).wide_numpy(t).astype(np.float64) for t in pair]
        signal += float(np.square(values[0]).sum())
        noise += float(np.square(values[0] - values[1]).sum())
    return signal, noise


def decibels(signal: float, noise: float) -> float:
    """Convert a ratio of powers to decibels."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _tensors(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        output = [*output.values()]
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in _tensors(part)]
    is_tensor = hasattr(output, "shape") and reader_of(output).is_readable_float(output)
    return [output] if is_tensor else []
