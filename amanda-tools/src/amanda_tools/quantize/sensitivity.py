"""Which operators suffer from quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.results import Table
from amanda.tools.mapping import MappingTool
from amanda_tools._values.tensors import arithmetic_of
from amanda_tools.quantize.quantizers import Quantizer


@attrs.frozen
class OpSensitivity:
    """What the quantization of one operator costs.

    Attributes:
        id, type, module: of the operator.
        sqnr: of its output, in decibels; infinite if nothing changes.
        metric: of a run in which it alone is quantized; None without a metric.
    """

    id: str
    type: str
    module: str
    sqnr: float
    metric: float | None = None


@attrs.frozen
class Sensitivity:
    """The operators, the most sensitive first.

    Attributes:
        ops: by the metric if there is one, else by SQNR.
        baseline: the metric without quantization.
    """

    ops: list[OpSensitivity]
    baseline: float | None = None

    def exclude(
        self,
        *,
        worst: int | None = None,
        sqnr_below: float | None = None,
        metric_below: float | None = None,
    ) -> list[str]:
        """The ids of the operators to leave out, for the option ``exclude``.

        Args:
            worst: the first so many.
            sqnr_below: those whose SQNR is below, in decibels.
            metric_below: those whose metric is below.
        """
        return [
            op.id
            for place, op in enumerate(self.ops)
            if (worst is not None and place < worst)
            or (sqnr_below is not None and op.sqnr < sqnr_below)
            or (metric_below is not None and op.metric is not None and op.metric < metric_below)
        ]

    def text(self, **limits: Any) -> str:
        """:meth:`exclude` as a line to paste into a program."""
        ids = "".join(f"    {op_id!r},\n" for op_id in self.exclude(**limits))
        return f"exclude=[\n{ids}]" if ids else "exclude=[]"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"baseline": self.baseline, "ops": [attrs.asdict(op) for op in self.ops]}

    def tables(self) -> Iterable[Table]:
        """The operators, for people."""
        title = "quantize: sensitivity of ops"
        if self.baseline is None:
            yield Table(title, ("op", "SQNR (dB)"), [(op.id, round(op.sqnr, 2)) for op in self.ops])
            return
        rows = [(op.id, round(op.sqnr, 2), op.metric) for op in self.ops]
        yield Table(
            f"{title}, metric {self.baseline:.6g} without", ("op", "SQNR (dB)", "metric"), rows
        )


def measure_noise(
    quantizers: Mapping[str, Sequence[Quantizer]], run: Callable[[], Any]
) -> tuple[Any, dict[str, float]]:
    """Run a model and compare each quantized operator with itself.

    Args:
        quantizers: calibrated ones, by op id.
        run: runs the model.

    Returns:
        What `run` gave, computed exactly, and by op id the SQNR in decibels.
    """
    measure = MeasuringTool(quantizers)
    with amanda.apply(measure):
        output = run()
    return output, measure.ratios()


class MeasuringTool(amanda.Tool):
    """Runs operators with exact and with rounded inputs, and goes on with the exact output."""

    def __init__(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        super().__init__()
        self._quantizers = quantizers
        self._powers: dict[str, list[float]] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)

    def ratios(self) -> dict[str, float]:
        """SQNR by op id, over all executions."""
        return {op_id: decibels(*powers) for op_id, powers in self._powers.items()}

    def _analyse(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        if op_id in self._quantizers:
            context.replace_op(self._measured, operator=context.get_function(), op_id=op_id)

    def _measured(self, *inputs: Any, operator: Any, op_id: str) -> Any:
        """Instrumentation routine: the operator, compared with itself."""
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
    """A ratio of powers."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _tensors(output: Any) -> Sequence[Any]:
    found = output if isinstance(output, (list, tuple)) else [output]
    return [tensor for tensor in found if tensor is not None]
