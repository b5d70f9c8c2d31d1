"""Selects critical contributions: the smallest set that makes up a fraction of a value.

Source: Qiu et al., "Adversarial Defense through Network Profiling Based Path Extraction", CVPR
2019: of the products of a critical neuron's inputs with their weights the largest ones, as many as
reach ``theta`` times the neuron's value.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from amanda_tools._values.tensors import Array

ROUNDING = 1e-6
"""A sum counts as reaching a goal that it misses by less than this fraction of all positive
contributions."""

_CHUNK = 1 << 20
"""Products in memory at a time."""

LETTERS = string.ascii_letters


def select_critical(products: Array, values: Array, theta: float) -> Array:
    """Select the critical contributions of each row.

    Of a row they are the smallest set whose sum reaches `theta` times the value: the largest first,
    at ties the first. A negative value is made up of negative contributions in the same way. Where
    a bias made a part of the value that they cannot reach, all contributions of the value's sign
    are critical.

    Args:
        products: contributions, shape (values, products per value).
        values: the values that they, and perhaps a bias, make up.
        theta: between 0 and 1.

    Returns:
        A boolean mask of the shape of `products`.
    """
    signed = np.where(values[:, None] < 0, -products, products)
    # Descending; contributions against the value's sign come last and add nothing.
    ordered = -np.sort(-signed, axis=1)
    sums = np.cumsum(np.maximum(ordered, 0), axis=1, dtype=np.float64)
    goal = np.minimum(theta * np.abs(values) - ROUNDING * sums[:, -1], sums[:, -1])
    counts = np.where(goal > 0, (sums < goal[:, None]).sum(axis=1) + 1, 0)
    last = np.take_along_axis(ordered, np.maximum(counts - 1, 0)[:, None], axis=1)
    mask: Array = (signed >= last) & (counts > 0)[:, None]
    # The threshold selects all contributions that equal the last one: of these the first are kept.
    tied = np.flatnonzero(mask.sum(axis=1) > counts)
    order = np.argsort(-signed[tied], axis=1, kind="stable")
    mask[tied] = np.argsort(order, axis=1) < counts[tied, None]
    return mask


@attrs.frozen(eq=False)
class Operand:
    """A factor of products, its axes named by letters.

    Attributes:
        values: its elements, flat.
        strides: letter to the distance of two neighbours in `values`; 0 if the axis is broadcast.
        sizes: letter to size.
        source: index in `values` to index in the operator's input, -1 for padding; None if equal.
    """

    values: Array
    strides: Mapping[str, int]
    sizes: Mapping[str, int]
    source: Array | None = None

    @classmethod
    def of(cls, array: Array, letters: str) -> Operand:
        """Name each axis of an array by a letter; axes of size 1 are broadcast."""
        array = np.ascontiguousarray(array)
        steps = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
        pairs = zip(letters, steps, array.shape, strict=True)
        strides = {letter: 0 if size == 1 else step for letter, step, size in pairs}
        return cls(array.reshape(-1), strides, dict(zip(letters, array.shape, strict=True)))

    def inputs(self, places: Array) -> Array:
        """Convert indices to those in the operator's input, without padding."""
        found = places if self.source is None else self.source[places]
        return found[found >= 0]


@attrs.frozen(eq=False)
class Rows:
    """The products that make up values, one row per value, computed in chunks of rows.

    Attributes:
        operands: the factors.
        bases: for each operand the index of each row's first element.
        offsets: for each operand the distances of a row's elements from its first.
    """

    operands: Sequence[Operand]
    bases: Sequence[Array]
    offsets: Sequence[Array]

    @classmethod
    def of(cls, operands: Sequence[Operand], letters: str, index: Array) -> Rows:
        """Make the rows of elements of a result.

        Args:
            operands: the factors.
            letters: axes of the result; products are summed over all other letters.
            index: flat indices in the result.
        """
        sizes: dict[str, int] = {}
        for operand in operands:
            for letter, size in operand.sizes.items():
                sizes[letter] = max(size, sizes.get(letter, 1))
        coordinates = np.unravel_index(index, [sizes[letter] for letter in letters])
        summed = [letter for letter in sizes if letter not in letters]
        bases, offsets = [], []
        for operand in operands:
            base = np.zeros(len(index), np.int64)
            for letter, places in zip(letters, coordinates, strict=True):
                base += places * operand.strides.get(letter, 0)
            offset = np.zeros(1, np.int64)
            for letter in summed:
                steps = np.arange(sizes[letter]) * operand.strides.get(letter, 0)
                offset = np.add.outer(offset, steps).reshape(-1)
            bases.append(base)
            offsets.append(offset)
        return cls(operands, bases, offsets)

    @property
    def width(self) -> int:
        """Number of products per value."""
        return len(self.offsets[0])

    def critical(
        self, values: Array, theta: float, *, relative: bool = False
    ) -> tuple[list[Array], Array]:
        """Select the critical products of all rows.

        Args:
            values: the value of each row to explain.
            theta: the fraction of it.
            relative: `values` are multiples of the rows' sums.

        Returns:
            For each operand the indices in the operator's input, and the products: row times
            :attr:`width` plus position in the row.
        """
        marks = [np.zeros(operand.values.size, bool) for operand in self.operands]
        found = [np.zeros(0, np.int64)]
        step = max(1, _CHUNK // self.width)
        for start in range(0, len(values), step):
            places, products = self.products(slice(start, start + step))
            wanted = values[start : start + step]
            if relative:
                wanted = wanted * products.sum(axis=1, dtype=np.float64)
            mask = select_critical(products, wanted, theta)
            for mark, place in zip(marks, places, strict=True):
                mark[place[mask]] = True
            found.append(np.flatnonzero(mask) + start * self.width)
        inputs = [o.inputs(np.flatnonzero(m)) for o, m in zip(self.operands, marks, strict=True)]
        return inputs, np.concatenate(found)

    def products(self, part: slice) -> tuple[list[Array], Array]:
        """Return indices and products of some rows."""
        places = [
            base[part, None] + offset for base, offset in zip(self.bases, self.offsets, strict=True)
        ]
        products = self.operands[0].values[places[0]]
        for operand, place in zip(self.operands[1:], places[1:], strict=True):
            products = products * operand.values[place]
        return places, products

    def largest(self) -> tuple[Array, Array]:
        """Return for each row the largest element, at ties the first: index in the input, and
        column."""
        [operand] = self.operands
        step = max(1, _CHUNK // self.width)
        best = [np.zeros(0, np.int64)]
        for start in range(0, len(self.bases[0]), step):
            _, values = self.products(slice(start, start + step))
            best.append(values.argmax(axis=1))
        columns = np.concatenate(best)
        places = self.bases[0] + self.offsets[0][columns]
        return (places if operand.source is None else operand.source[places]), columns
