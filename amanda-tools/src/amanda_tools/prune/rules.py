"""Static methods of pruning: from the value of a weight to its mask, with NumPy.

One rule is made per tool: ``check`` refuses weights that it has no mask for, ``mask`` makes the
mask, True where the weight stays.
"""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import numpy as np

from amanda_tools._operators.weights import Untreatable, Weight
from amanda_tools._values.tensors import Array
from amanda_tools.prune.options import PruneOptions


class Rule(Protocol):
    """The selection rule of a static method."""

    def check(self, weight: Weight) -> None:
        """Raise :class:`Untreatable` if the method has no mask for such a weight."""

    def mask(self, value: Array, weight: Weight, sparsity: float) -> Array:
        """Return the mask of a value of this weight at a sparsity, a fraction of its elements."""


def rule_of(options: PruneOptions) -> Rule:
    """Return the rule that the options choose."""
    if options.method == "nm":
        return NofM(options.n, options.m)
    return TileWise(options.tile) if options.method == "tile" else Magnitude()


class Magnitude:
    """Prunes the smallest weights of a tensor, one by one."""

    def check(self, weight: Weight) -> None:
        """Accept every weight."""

    def mask(self, value: Array, weight: Weight, sparsity: float) -> Array:
        return mask_smallest(np.abs(value), round(sparsity * value.size))


def mask_smallest(scores: Array, count: int) -> Array:
    """Return a mask that is False at the `count` smallest scores, at ties the first ones."""
    if count == 0:
        return np.ones(scores.shape, bool)
    flat = scores.ravel()
    largest = np.partition(flat, count - 1)[count - 1]
    mask: Array = flat > largest
    equals = np.flatnonzero(flat == largest)
    mask[equals[count - np.count_nonzero(flat < largest) :]] = True
    return mask.reshape(scores.shape)


@attrs.frozen
class NofM:
    """Vector-wise: of each `m` neighbours along the input axis the `n` largest stay.

    This is the pattern of NVIDIA's sparse tensor cores, as APEX's ASP makes it: for a convolution
    the neighbours are input channels at one position of the kernel. In a product that sums over
    several axes (``Einsum``) the inputs are those of all of them, in row-major order, as in the
    matrix that the weight would be reshaped to.
    """

    n: int
    m: int

    def check(self, weight: Weight) -> None:
        inputs = weight.width("I")
        if weight.layout.startswith("IO") and len(weight.layout) > 2:
            inputs //= weight.groups  # a transposed convolution has all groups on this axis
        if inputs % self.m:
            raise Untreatable(f"its input axis, {inputs}, is not a multiple of m={self.m}")

    def mask(self, value: Array, weight: Weight, sparsity: float) -> Array:
        groups = weight.matrix(np.abs(value), "I").reshape(-1, self.m)
        # Stable: of equal weights the first ones stay, on every machine.
        order = np.argsort(-groups, axis=1, kind="stable")
        mask = np.zeros(groups.shape, bool)
        np.put_along_axis(mask, order[:, : self.n], True, axis=1)
        return weight.from_matrix(mask, "I", value.shape)


@attrs.frozen
class TileWise:
    """Tile-wise sparsity (Guo et al., SC'20) of the matrix (inputs x outputs).

    First the weakest columns are pruned, which are whole outputs. The remaining columns are divided
    into tiles of `size`; in each tile rows are pruned, so that a tile is a dense matrix product
    with fewer rows. Columns and rows have equal shares: each stage keeps ``sqrt(1 - sparsity)``.
    The strength of a column or row is the mean magnitude of its weights.
    """

    size: int

    def check(self, weight: Weight) -> None:
        weight.width("O")
        if "B" in weight.layout:
            raise Untreatable("it has a matrix of weights for each position of its data")
        if weight.groups > 1:
            raise Untreatable(f"it has {weight.groups} groups and so no one matrix of weights")

    def mask(self, value: Array, weight: Weight, sparsity: float) -> Array:
        mask = self._matrix_mask(weight.matrix(np.abs(value), "O"), sparsity)
        return weight.from_matrix(mask, "O", value.shape)

    def _matrix_mask(self, scores: Array, sparsity: float) -> Array:
        rows, columns = scores.shape
        dropped = round((1 - math.sqrt(1 - sparsity)) * columns)
        keeps = np.flatnonzero(mask_smallest(scores.mean(0), dropped))
        tiles = [keeps[i : i + self.size] for i in range(0, len(keeps), self.size)]
        # One entry per row of each tile; the weakest are pruned first.
        strengths = np.stack([scores[:, tile].mean(1) for tile in tiles])
        order = np.argsort(strengths, axis=None, kind="stable")
        # The last tile may be narrower: its rows remove fewer weights.
        widths = np.array([len(tile) for tile in tiles])[order // rows]
        budget = sparsity * scores.size - dropped * rows
        stays = np.ones(strengths.size, bool)
        stays[order[np.cumsum(widths) <= budget]] = False
        mask = np.zeros(scores.shape, bool)
        for tile, rows_that_stay in zip(tiles, stays.reshape(strengths.shape), strict=True):
            mask[:, tile] = rows_that_stay[:, None]
        return mask
