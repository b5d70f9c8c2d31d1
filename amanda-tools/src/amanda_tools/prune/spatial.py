"""Activation pruning: dynamic spatial execution (Verelst and Tuytelaars, CVPR 2020)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.weights import Untreatable, weight_of
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Arithmetic, arithmetic_of
from amanda_tools.prune.dynamic import Gate, input_channels, new_gate
from amanda_tools.prune.options import PruneOptions


class SpatialPruning:
    """For each sample, an operator has an output only at the positions of the highest saliency.

    The saliency of a position is that of the input there: a 1x1 convolution of the
    magnitudes of its channels (``weight``, ``bias``), which can be trained: the gradient
    passes to the logistic function of the saliency as if it were the mask (straight through).
    It begins as the mean over the channels. Where the output is of another size, each
    of its positions takes the saliency of the input's position to its upper left.

    The paper reaches its share of positions through a term in the loss; here each sample
    has exactly that share, with no noise and no further loss.

    Attributes:
        gates: of each pruned operator.
    """

    def __init__(self, options: PruneOptions) -> None:
        self._options = options
        self.gates: dict[str, Gate] = {}

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Put a gate behind an operator.

        Raises:
            Untreatable: its input has no positions.
        """
        weight = weight_of(context)
        if op.id not in self.gates:
            gate = new_gate(context, weight)
            if not gate.positions:
                raise Untreatable("its input has one position only")
            channels = input_channels(weight)
            weights = np.full((channels, 1), 1 / channels)
            gate.initial = {"weight": weights, "bias": np.zeros(1)}
            self.gates[op.id] = gate
        gate = self.gates[op.id]
        context.replace_op(self._gated, operator=context.get_function(), gate=gate)

    def _gated(self, *inputs: Any, operator: Any, gate: Gate) -> Any:
        """Instrumentation routine: the operator, and the gate on its output."""
        output = operator(*inputs)
        arithmetic = arithmetic_of(output)
        sizes = [shape_of(output)[axis] for axis in gate.positions]
        saliency = self._saliency(arithmetic, inputs[gate.source], gate, sizes)
        count = math.prod(sizes)
        hard = arithmetic.top_mask(saliency, count - round(self._options.sparsity * count))
        soft = arithmetic.sigmoid(saliency)
        # The order matters: it makes the value exactly 0 or 1.
        mask = hard + (soft - arithmetic.stop_gradient(soft))
        sizes.insert(gate.channels - 1, 1)
        return output * arithmetic.reshape(mask, [-1, *sizes])

    def _saliency(self, arithmetic: Arithmetic, source: Any, gate: Gate, sizes: list[int]) -> Any:
        """Of the output's positions: one row per sample."""
        for axis, size in zip(gate.positions, sizes, strict=True):
            available = shape_of(source)[axis]
            if available != size:
                source = arithmetic.take(source, [i * available // size for i in range(size)], axis)
        weight, bias = (gate.value(name, source) for name in ("weight", "bias"))
        if gate.channels == gate.rank - 1:
            channels = shape_of(source)[-1]
            pixels = arithmetic.reshape(abs(source), [-1, math.prod(sizes), channels])
        else:
            channels = shape_of(source)[1]
            pixels = arithmetic.reshape(abs(source), [-1, channels, math.prod(sizes)])
            pixels = arithmetic.transpose(pixels)
        return arithmetic.reshape(arithmetic.matmul(pixels, weight) + bias, [-1, math.prod(sizes)])
