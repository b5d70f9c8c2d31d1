"""Activation pruning: dynamic spatial execution (Verelst and Tuytelaars, CVPR 2020)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amanda import OpContext
from amanda_tools._operators.weights import Untreatable, Weight
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Arithmetic, arithmetic_of
from amanda_tools.prune.dynamic import Gate, GatedPruning, input_channels, new_gate


class SpatialPruning(GatedPruning):
    """For each sample, an operator has an output only at the positions with the highest saliency.

    The saliency of a position is that of the input there: a 1x1 convolution of the magnitudes of
    its channels (``weight``, ``bias``), which can be trained: the gradient passes to the logistic
    function of the saliency as if that were the mask (straight-through). It is initialized to the
    mean over the channels. Where the output has another size, each of its positions takes the
    saliency of the input position to its upper left.

    The paper reaches its fraction of positions through a term in the loss; here each sample has
    exactly that fraction, without noise or a further loss.
    """

    def make_gate(self, context: OpContext, weight: Weight) -> Gate:
        gate = new_gate(context, weight)
        if not gate.positions:
            raise Untreatable("its input has one position only")
        channels = input_channels(weight)
        gate.initial = {"weight": np.full((channels, 1), 1 / channels), "bias": np.zeros(1)}
        return gate

    def run_gated(self, *inputs: Any, operator: Any, gate: Gate) -> Any:
        output = operator(*inputs)
        arithmetic = arithmetic_of(output)
        sizes = [shape_of(output)[axis] for axis in gate.positions]
        saliency = self._saliency(arithmetic, inputs[gate.source], gate, sizes)
        count = math.prod(sizes)
        hard = arithmetic.top_mask(saliency, count - round(self.options.sparsity * count))
        soft = arithmetic.sigmoid(saliency)
        # The order of operations makes the value exactly 0 or 1.
        mask = hard + (soft - arithmetic.stop_gradient(soft))
        sizes.insert(gate.channels - 1, 1)
        return output * arithmetic.reshape(mask, [-1, *sizes])

    def _saliency(self, arithmetic: Arithmetic, source: Any, gate: Gate, sizes: list[int]) -> Any:
        """Return the saliency of the output's positions, one row per sample."""
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
