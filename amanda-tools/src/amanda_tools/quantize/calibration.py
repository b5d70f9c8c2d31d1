"""What an operator's data tell of the rounding of its weight: SmoothQuant and GPTQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from amanda import OpContext
from amanda_tools._operators.weights import Untreatable, Weight
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.quantize.numbers import QuantGrid, integers
from amanda_tools.quantize.observers import range_of
from amanda_tools.quantize.quantizers import Quantizer

_OTHER_AXES = ("equation", "dimension_numbers", "transpose_a", "adj_x", "transA")
"""Attributes by which an operator may multiply another axis of its data than the last one."""


@attrs.define(eq=False)
class Calibration:
    """Observes the executions of one operator, then fixes how its weight is rounded.

    Attributes:
        weight, data: the quantizers; `data` is None where activations stay exact.
        layout: the weight, without its value.
        places: positions of data and weight among the operator's inputs.
        remaining: executions that are still to be observed.
    """

    weight: Quantizer
    data: Quantizer | None
    layout: Weight
    places: Sequence[int]
    remaining: int
    _largest: Any = 0.0
    _hessian: Any = 0.0

    @classmethod
    def of(
        cls, context: OpContext, layout: Weight, place: int, quantizers: Sequence[Quantizer]
    ) -> Calibration:
        """Make the calibration of an operator, for which its quantizers wait.

        Args:
            context: the operator.
            layout: its weight.
            place: position of its data.
            quantizers: its quantizers.

        Raises:
            Untreatable: it does not multiply the last axis of its data with a matrix.
        """
        given, width = context.get_attrs(), context.get_inputs()[place].shape[-1]
        is_product = sorted(layout.layout) == ["I", "O"] and place < layout.index
        if not is_product or any(map(given.get, _OTHER_AXES)) or width != layout.width("I"):
            raise Untreatable("smooth and gptq are for products of data with a weight matrix")
        roles = {quantizer.role: quantizer for quantizer in quantizers}
        count = roles["weight"].options.calibration
        for quantizer in quantizers:
            quantizer.remaining = count
        layout, places = attrs.evolve(layout, value=None), (place, layout.index)
        return cls(roles["weight"], roles.get("activation"), layout, places, count)

    def observe(self, data: Any, weight: Any) -> None:
        """Instrumentation routine: add the data of one execution; after the last one, fix."""
        arithmetic, options = arithmetic_of(data), self.weight.options
        if not self.remaining or arithmetic.refusal(data):
            return
        array = arithmetic.wide_numpy(data)
        rows = array.reshape(-1, array.shape[-1]).astype(np.float64)
        rows = rows[np.isfinite(rows).all(1)]
        self._largest = np.maximum(self._largest, np.abs(rows).max(0, initial=0))
        if options.gptq:
            self._hessian = self._hessian + 2 * rows.T @ rows
        self.remaining -= 1
        if not self.remaining:
            self._fix(self.layout.matrix(arithmetic_of(weight).wide_numpy(weight), "I"), weight)

    def _fix(self, matrix: Array, weight: Any) -> None:
        """Fix the factors of smoothing, and the integers of a weight, given as O x I."""
        options, grid, shape = self.weight.options, self.weight.grid, shape_of(weight)
        if options.smooth:
            assert self.data is not None
            factors = smoothing(self._largest, np.abs(matrix).max(0), options.smooth)
            self.data.factors, matrix = factors, matrix * factors
            self._hessian = self._hessian / np.outer(factors, factors)

        def fitted(columns: Array) -> Array:
            rows = columns if options.per_channel else columns.reshape(1, -1)
            return grid.fitted(*range_of(rows, options, grid))[0]

        # Without correlations GPTQ rounds to the nearest.
        hessian = self._hessian if options.gptq else np.eye(matrix.shape[1])
        whole, scales = gptq(matrix, hessian, fitted, grid, options.group)
        whole = self.layout.from_matrix(whole, "I", shape)
        if options.group:
            axis = self.layout.axis("I")
            shape = (*shape[:axis], scales.shape[1], *shape[axis + 1 :])
            scales = self.layout.from_matrix(scales, "I", shape)
        self.weight.fix(whole, scales)
        self._largest = self._hessian = None


def smoothing(data: Array, weight: Array, share: float) -> Array:
    """Return the factors of SmoothQuant (Xiao et al., ICML 2023, equation 4), float32.

    ``s_j = max|X_j|**share / max|W_j|**(1 - share)``: the data of input channel j are divided by
    it, its weights multiplied. A channel without data or weights has the factor 1.

    Args:
        data, weight: the maxima, of each input channel.
        share: the paper's alpha, the part of the difficulty that moves to the weight.
    """
    is_used = (data > 0) & (weight > 0)
    data, weight = np.where(is_used, data, 1), np.where(is_used, weight, 1)
    factors: Array = (data**share / weight ** (1 - share)).astype(np.float32)
    return factors


def gptq(
    matrix: Array, hessian: Array, fitted: Callable[[Array], Array], grid: QuantGrid, group: int = 0
) -> tuple[Array, Array]:
    """Round a weight by GPTQ (Frantar et al., ICLR 2023, algorithm 1), with 1 % damping.

    With the upper Cholesky factor U of the inverse Hessian, each column c is rounded in turn, and
    its error, ``(c - rounded) / U_cc``, times the row c of U is subtracted from the later columns.

    Args:
        matrix: O x I.
        hessian: ``2 X^T X`` of the data X, rows x I.
        fitted: gives the scales of columns, one per row or one.
        grid: symmetric integers.
        group: columns that share a scale, fitted when the first of them is rounded; 0 for all.

    Returns:
        The integers, and the scales, with groups O x groups.
    """
    rest, whole = matrix.astype(np.float64), np.empty(matrix.shape)
    # A column without data is rounded to the nearest, and changes no other one.
    diagonal = np.where(hessian.diagonal() > 0, hessian.diagonal(), 1.0)
    hessian = hessian + np.diag(diagonal - hessian.diagonal() + 0.01 * diagonal.mean())
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    scales, size = ([], group) if group else ([fitted(matrix)], 128)
    for start in range(0, matrix.shape[1], size):
        block, own = rest[:, start : start + size], upper[start : start + size]
        if group:
            scales.append(fitted(block))
        errors = np.empty_like(block)
        for place in range(block.shape[1]):
            column, row = block[:, place], own[place, start : start + size]
            found = integers(column, scales[-1], np.zeros(1), grid)
            whole[:, start + place] = found
            errors[:, place] = (column - found * scales[-1]) / row[place]
            block[:, place + 1 :] -= np.outer(errors[:, place], row[place + 1 :])
        # Later blocks are changed at once: the paper's lazy batch updates.
        rest[:, start + size :] -= errors @ own[:, start + size :]
    return whole, np.stack(scales, -1) if group else scales[0]
