"""The tool ``quantize``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError, CapabilityError
from amanda.interface.points import PointContext
from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda_tools._bases.exporting import ExportingTool
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.running import run_model
from amanda_tools._operators.weights import (
    Untreatable,
    Weight,
    data_index,
    recurrent_inputs,
    weight_of,
)
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.export import Change
from amanda_tools.quantize import files
from amanda_tools.quantize.calibration import Calibration
from amanda_tools.quantize.numbers import fake_float, fake_quantize
from amanda_tools.quantize.options import DEFAULT_OPS, QuantizeOptions
from amanda_tools.quantize.quantizers import Quantizer
from amanda_tools.quantize.sensitivity import MeasuringTool, OpSensitivity, Sensitivity, ratio_of

if TYPE_CHECKING:
    from amanda_tools.quantize.to_torchao import Exported


class QuantizeTool(ExportingTool[QuantizeOptions]):
    """Simulates quantization: after or in training, or at run time.

    Weights and activations are rounded, where they enter an operator, to the values that a
    quantized operator would compute with.

    Example: ``amanda run -t quantize:method=dynamic,weight_bits=4 -o out -- train.py``

    Attributes:
        quantizers: quantizers by op id, one per input that is rounded.
        ranking: the operators by the cost of their quantization; None if it was not measured.
    """

    name = "quantize"
    Options = QuantizeOptions
    file_option = "export"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._only: str | None = None
        self.quantizers: dict[str, list[Quantizer]] = {}
        self.ranking: Sensitivity | None = None
        self._kept: dict[str, list[Quantizer]] = {}
        self._measuring: MeasuringTool | None = None
        if self.options.keep or self.options.sensitivity:
            self._measuring = MeasuringTool(self.quantizers)
            self.add_inst_for_iteration(self._end_measuring, end=True)
        self._calibrations: dict[str, Calibration] = {}
        self._readers: dict[tuple[Hashable, str], dict[str, list[str]]] = {}

    # -- instrumentation --------------------------------------------------

    def treat(self, context: OpContext, op: OpDescription) -> None:
        is_qat, rate = self.options.method == "qat", self.options.learning_rate
        if is_qat and not rate and not context.runs_at_once:
            raise CapabilityError(
                f"quantize: op {op.id} runs in {context.namespace}, where no optimizer of the "
                "program can learn its ranges: let the tool train them with learning_rate=..., "
                "or train in eager mode"
            )
        if op.id not in self.quantizers:
            self.quantizers[op.id] = self._quantizers_of(context, op)
        if self._measuring is not None:
            self._measuring.measure(context)
        if rate:
            self._insert_training(context, op.id)
            return
        # Learned ranges need gradients through the rounding; else the gradient passes straight
        # through.
        with amanda.ad_enabled() if is_qat else contextlib.nullcontext():
            self._insert(context, op)

    def _insert(self, context: OpContext, op: OpDescription) -> None:
        if (calibration := self._calibrations.get(op.id)) is not None:
            context.insert_before_op(calibration.observe, inputs=[*calibration.places])
        for quantizer in self.quantizers[op.id]:
            place = [quantizer.index]
            is_alone = self._only is not None or self._measuring is not None
            if is_alone or not quantizer.is_constant:
                context.insert_before_op(
                    self._rounded, inputs=place, quantizer=quantizer, op_id=op.id
                )
                continue
            value = context.get_inputs()[quantizer.index]
            scale, zero = quantizer.constants(value)
            grid = quantizer.grid
            if grid.number == "int":
                context.insert_before_op(
                    fake_quantize,
                    inputs=place,
                    scale=scale,
                    zero=zero,
                    low=grid.low,
                    high=grid.high,
                )
            else:
                context.insert_before_op(fake_float, inputs=place, scale=scale, number=grid.number)

    def _rounded(self, tensor: Any, quantizer: Quantizer, op_id: str) -> Any:
        """Instrumentation routine: round one input."""
        is_meant = self._only in (None, op_id) and self._measuring is None
        if tensor is None or (quantizer.is_ready and not is_meant):
            return None
        found = quantizer(tensor)
        return found if is_meant else None

    def _insert_training(self, context: OpContext, op_id: str) -> None:
        """Observe, then replace the operator by one that trains its ranges."""
        quantizers = self.quantizers[op_id]
        if all(quantizer.is_ready for quantizer in quantizers):
            operator = context.get_function()
            context.replace_op(self._trained, operator=operator, quantizers=quantizers)
            return
        for quantizer in quantizers:
            context.insert_before_op(
                self._observed, inputs=[quantizer.index], quantizer=quantizer, op_id=op_id
            )

    def _observed(self, tensor: Any, quantizer: Quantizer, op_id: str) -> None:
        """Instrumentation routine: observe one input until all inputs of the operator are
        calibrated."""
        own = self.quantizers[op_id]
        if not quantizer.is_ready:
            quantizer(tensor)
        if all(each.is_ready for each in own):
            for each_id in [each_id for each_id, found in self.quantizers.items() if found is own]:
                self.reanalyse(each_id)

    def _trained(self, *inputs: Any, operator: Any, quantizers: list[Quantizer]) -> Any:
        """Replacement routine: run the operator on rounded inputs; its gradient trains the
        ranges."""
        places = [quantizer.index for quantizer in quantizers]
        if any(arithmetic_of(inputs[place]).refusal(inputs[place]) for place in places):
            return operator(*inputs)
        for quantizer in quantizers:
            quantizer.prepare(inputs[quantizer.index])
        variables = [quantizer.step for quantizer in quantizers]
        arithmetic = arithmetic_of(inputs[places[0]])
        tensors, steps = arithmetic.train_in_backward(
            [inputs[place] for place in places], variables, self.options.learning_rate
        )
        rounded = list(inputs)
        for quantizer, tensor, step in zip(quantizers, tensors, steps, strict=True):
            rounded[quantizer.index] = quantizer.rounded_with(tensor, step)
        return operator(*rounded)

    def _quantizers_of(self, context: OpContext, op: OpDescription) -> list[Quantizer]:
        """Return the quantizers of the same operator in another function of the program, or new
        ones.

        Training and evaluation of one Keras model are functions of their own. The k-th operator of
        a type that reads a variable is the same one in each of them.
        """
        index = context["weight_index"]
        variable = None if index is None else context.get_variable(index)
        functions = self._readers.setdefault((variable and variable.key, op.type), {})
        # An id begins with the function that runs the operator.
        own = functions.setdefault(op.id.partition("/")[0], [])
        others = functions.values() if variable is not None else ()
        same = [ids[len(own)] for ids in others if len(ids) > len(own)]
        if self._kept.keys() & {op.id, *same}:
            raise Untreatable(f"keep={self.options.keep} leaves it in floating point")
        found = self.quantizers[same[0]] if same else self._new_quantizers(context, op)
        own.append(op.id)
        if same and same[0] in self._calibrations:
            self._calibrations[op.id] = self._calibrations[same[0]]
        return found

    def _new_quantizers(self, context: OpContext, op: OpDescription) -> list[Quantizer]:
        """Make a quantizer for each input that is rounded.

        Raises:
            Untreatable: there is none.
        """
        inputs = context.get_inputs()
        weights, data = self._roles_of_inputs(context, op)
        if self.options.per_token and op.type.startswith("conv"):
            raise Untreatable("per_token is for data whose last axis holds the features")
        found, reason = [], ""
        for index in data:
            value = inputs[index]
            is_rounded = value is not None and arithmetic_of(value).is_floating(value)
            if is_rounded and self.options.activation_bits:
                refusal = arithmetic_of(value).refusal(value)
                if refusal:
                    reason = reason or f"its input {refusal}"
                    continue
                # The right side of a product is multiplied along the axis before the last one.
                is_right = op.type == "matmul" and data.index(index) == 1
                axis = (-2 if is_right else -1) if self.options.per_token else None
                found.append(Quantizer.of_activation(self.options, index, axis))
        if self.options.weight_bits:
            found += [Quantizer.of_weight(self.options, weight) for weight in weights]
        if not found:
            raise Untreatable(reason or "it has no input of floating point numbers that is rounded")
        if self.options.observes_data:
            if reason or len(weights) != 1:
                raise Untreatable(reason or "smooth and gptq are for operators with one weight")
            self._calibrations[op.id] = Calibration.of(context, weights[0], data[0], found)
        for quantizer in found:
            quantizer.parameter = context.get_parameter_name(quantizer.index)
        return found

    def _roles_of_inputs(
        self, context: OpContext, op: OpDescription
    ) -> tuple[list[Weight], list[int]]:
        """Return the weights of an operator, and the positions of the activations that take part
        in its arithmetic; no weight where it multiplies activations with each other.

        Raises:
            Untreatable: a weight cannot be changed, or no rule names it.
        """
        if "recurrent" in row_of(op.type).traits:
            return recurrent_inputs(context)
        count = len(context.get_inputs())
        reads = range(min(3, count)) if op.type != "attention" else ()
        has_parameter = any(context.get_value(index) is not None for index in reads)
        if context["weight_index"] is not None or op.type in DEFAULT_OPS or has_parameter:
            weight = weight_of(context)
            return [weight], [data_index(context, weight)]
        if op.type == "attention":
            return [], list(range(min(3, count)))
        if op.type == "matmul":
            # baddbmm has a third one, which is added.
            return [], [count - 2, count - 1]
        return [], [i for i in range(count) if i != context["bias_index"]]

    def parameters(self) -> list[Any]:
        """Return what method=qat learns, for an optimizer; known after the first run."""
        found = {id(q): q for quantizers in self.quantizers.values() for q in quantizers}
        return [quantizer.step for quantizer in found.values() if quantizer.step is not None]

    # -- results ----------------------------------------------------------

    def sensitivity(
        self,
        run: Callable[[], Any],
        metric: Callable[[Any], float] | Literal["output"] | None = None,
    ) -> Sensitivity:
        """Rank operators by the cost of their quantization.

        The signal-to-quantization-noise ratio (SQNR) of an operator compares its outputs on rounded
        and on exact inputs, in one run without any other error. A metric is measured with one
        operator quantized at a time, one run each. With the option keep, the first operators stay
        in floating point from then on.

        Args:
            run: runs the model in inference mode, and returns what `metric` takes.
            metric: quality of a run's result, the higher the better; ``output`` for the SQNR of
                the result itself.

        Raises:
            AmandaError: the tool learns its ranges, or `run` meets no operator.
        """
        if self.options.method == "qat":
            raise AmandaError(
                "quantize: sensitivity is for ranges that are not learned: static, dynamic"
            )
        for op_id in self._kept:
            self.targets.skipped.pop(op_id, None)
        self.quantizers.update(self._kept)
        self._kept.clear()
        self.ranking = self._measuring = None
        self.reanalyse()
        self._calibrate(run)
        measuring, baseline = MeasuringTool(self.quantizers), None
        with amanda.apply(measuring):
            output = run_model(run)
        found = self._measured(measuring)
        if metric is not None:
            of = partial(ratio_of, output) if metric == "output" else metric
            baseline = float(of(output))
            found = [attrs.evolve(op, metric=self._metric_of(op.id, run, of)) for op in found]
        return self._rank(found, baseline)

    def _measured(self, measuring: MeasuringTool) -> list[OpSensitivity]:
        ratios = measuring.ratios()
        ops = [op for op in self.ops.values() if op.id in ratios]
        return [OpSensitivity(op.id, op.type, op.module, ratios[op.id]) for op in ops]

    def _rank(self, found: list[OpSensitivity], baseline: float | None = None) -> Sensitivity:
        """Rank operators, and leave the first ones in floating point from now on."""
        self.ranking = Sensitivity.ranked(found, self.options.keep, baseline)
        for op in self.ranking.ops[: self.options.keep]:
            del self.ops[op.id]
            self._kept[op.id] = self.quantizers.pop(op.id)
        self.reanalyse()
        return self.ranking

    def _end_measuring(self, point: PointContext | None = None) -> None:
        """Rank operators after the first iteration in which all of them were measured."""
        measuring = self._measuring
        if measuring is None:
            return
        found = self._measured(measuring)
        if found and not measuring.waiting:
            self._measuring = None
            self._rank(found)
        measuring.waiting.clear()

    def _calibrate(self, run: Callable[[], Any]) -> None:
        """Run until every operator that occurs is calibrated."""
        with amanda.apply(self):
            for _ in range(self.options.calibration):
                # Code outside of modules has no iterations of its own.
                amanda.new_iteration()
                run_model(run)
        if not self.quantizers:
            types = ", ".join(self.options.ops)
            raise AmandaError(f"quantize: run() meets no op of the types {types}")
        for op_id in self._not_calibrated():
            raise AmandaError(f"quantize: run() does not calibrate op {op_id}")

    def _not_calibrated(self) -> list[str]:
        """Return the ids of operators that do not round all of their inputs yet."""
        return [id for id, found in self.quantizers.items() if not all(q.is_ready for q in found)]

    def _metric_of(
        self, op_id: str, run: Callable[[], Any], metric: Callable[[Any], float]
    ) -> float:
        """Return the metric with one operator quantized."""
        self._focus(op_id)
        try:
            with amanda.apply(self):
                return float(metric(run_model(run)))
        finally:
            self._focus(None)

    def _focus(self, op_id: str | None) -> None:
        """Quantize one operator only; None for all."""
        self._only = op_id
        self.reanalyse()

    def integer_weights(self, run: Callable[[], Any]) -> dict[str, Array]:
        """Return the integers that stand for weights by ``<op id>|<input>``, in the framework's
        layout.

        ``(integers - zero_point) * scale``, in float32, is what the operator computes with.

        Args:
            run: runs the model once, as it was run under the tool.

        Raises:
            AmandaError: the numbers are not integers, or `run` does not execute all operators.
        """
        if self.options.number != "int":
            raise AmandaError(f"quantize: number={self.options.number} has no integers")
        return files.integer_weights(self.quantizers, run)

    def export(self, path: str | os.PathLike[str], run: Callable[[], Any] | None = None) -> Path:
        """Write scales, zero points and integer weights by op id and input, as safetensors.

        Args:
            path: the file.
            run: runs the model once, as it was run under the tool; for integer weights.

        Raises:
            AmandaError: an operator is not calibrated, or `run` is missing.
        """
        target = Path(path)
        header = {"tool": self.name, "schema": self.schema}
        files.write_tensors(target, self._ready(), header, run)
        return target

    def changes(self) -> list[Change]:
        """Return the rounding of each input, for an export.

        Raises:
            AmandaError: an operator is not calibrated.
        """
        self._end_measuring()
        ready = self._ready().items()
        return [one for op_id, found in ready for q in found for one in q.changes(op_id)]

    def _ready(self) -> files.Quantizers:
        return files.ready(self.quantizers, [*self.targets.skipped.values()])

    def to_torchao(self, model: Any, run: Callable[[], Any]) -> Exported:
        """Copy a PyTorch model that computes with torchao's tensors what was simulated.

        Args:
            model: the module that was run under the tool; it is not changed.
            run: runs it once, as it was run under the tool.

        Raises:
            AmandaError: torchao is missing, an operator is not calibrated, or none can be exported.
        """
        from amanda_tools.quantize.to_torchao import export_model

        return export_model(model, self._ready(), run)

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per quantized operator, with its ``quantizers``."""
        return [
            {**op.row(), "quantizers": [quantizer.row() for quantizer in self.quantizers[op.id]]}
            for op in self.ops.values()
        ]

    def summary(self) -> dict[str, Any]:
        """Number of quantized operators; the others, with reasons."""
        found: dict[str, Any] = {"ops": len(self.ops), "not_calibrated": self._not_calibrated()}
        if self.ranking is not None:
            found["sensitivity"] = [attrs.asdict(op) for op in self.ranking.ops]
        return {**super().summary(), **found}

    def tables(self) -> Iterable[Table]:
        """Quantized operators, and operators that cannot be quantized, with reasons."""
        rows = []
        for op_id, quantizers in self.quantizers.items():
            for quantizer in quantizers:
                final = quantizer.final()
                scale = "" if final is None else f"{float(np.median(final[0])):.3g}"
                kind = quantizer.grid.number
                number = f"int{quantizer.bits}" if kind == "int" else kind
                role = f"{quantizer.role} {quantizer.parameter or ''}".rstrip()
                rows.append((op_id, quantizer.index, role, number, scale))
        title = f"quantize: {self.options.method}, {len(self.ops)} ops"
        yield Table(title, ("op", "input", "role", "number", "scale (median)"), rows)
        if self.ranking is not None:
            ranked = [op.cells() for op in self.ranking.ops]
            yield Table("quantize: sensitivity", ("op", "SQNR (dB)", "metric", "is"), ranked)
        if missing := self._not_calibrated():
            title = f"quantize: {len(missing)} ops are not calibrated yet"
            yield Table(title, ("op",), [(op_id,) for op_id in missing])
        yield from self.targets.tables("quantize")
        yield from self.export_tables()
