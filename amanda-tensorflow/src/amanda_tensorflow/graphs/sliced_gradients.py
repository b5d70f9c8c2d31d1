"""Gradients that are an ``IndexedSlices`` in a graph, as routines see and change them.

The gradient of an operator that gathers rows holds the gradients of these rows only. Routines get
it dense, as in eager mode. What they return takes the place of its values, since the operators that
read the gradient read its parts::

    slices = SlicedGradients(site, call.input_slices, gradients)
    gradients = slices.made_dense(actions)
    ...                                     # run the actions
    gradients = slices.put_back(gradients, building, call)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from amanda.errors import CapabilityError
from amanda.interface.action import Action
from amanda_tensorflow.gradient_map.recording import GradientCall, Slices, TensorName
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.run_time_routines import PASSING, PythonNode
from amanda_tensorflow.graphs.sites import OpSite

Tensors = list[Any]


def indexing_ops(site: OpSite, call: GradientCall) -> set[str]:
    """The operators of a gradient call that make the indices and shapes of slices it returns."""
    own = set(call.ops)
    found: set[str] = set()
    waiting = [name for _, *parts in call.input_slices.values() for name, _ in parts]
    while waiting:
        name = waiting.pop()
        if name in own and name not in found:
            found.add(name)
            waiting += [tensor.op.name for tensor in site.named(name).inputs]
    return found


class SlicedGradients:
    """The gradients that a gradient call receives, or those that it returns.

    Args:
        site: where the call is.
        slices: those that are slices, by position.
        gradients: all of them; of slices the values. None where there is none.
        is_dense: whether the slices are given dense.
    """

    def __init__(
        self, site: OpSite, slices: Slices, gradients: Sequence[Any], is_dense: bool = False
    ) -> None:
        self._site = site
        self._slices = {i: parts for i, parts in slices.items() if gradients[i] is not None}
        self._gradients = list(gradients)
        self._is_dense = is_dense
        self._dense: dict[int, Tensors | None] = {}
        """By position: the values, what they add up to, and so on to the dense gradient."""

    def made_dense(self, actions: Sequence[Action] | None = None) -> Tensors:
        """All gradients, with dense tensors in place of slices.

        Args:
            actions: of slices that none of these selects the values stay; None to make all dense.
        """
        result = list(self._gradients)
        for position, parts in self._slices.items():
            chosen = actions is None or any(
                position in action.positions(len(result)) for action in actions
            )
            if self._is_dense:
                self._dense[position] = None
            elif chosen:
                sums = [result[position]]
                for indices, shape in self._indexing(parts):
                    sums.append(tf.math.unsorted_segment_sum(sums[-1], indices, shape[0]))
                self._dense[position] = sums
                result[position] = sums[-1]
        return result

    def as_tensors(self, gradients: Sequence[Any]) -> Tensors:
        """Gradients that were derived anew, as tensors where the graph has slices."""
        result = list(gradients)
        for position in self._slices:
            result[position] = tf.convert_to_tensor(result[position])
        return result

    def put_back(self, gradients: Sequence[Any], building: Building, call: GradientCall) -> Tensors:
        """Gradients after routines, with the values of slices in place of dense tensors.

        Args:
            call: the gradient call.
        """
        result = list(gradients)
        for position, sums in self._dense.items():
            new = result[position]
            if sums is not None and new is sums[-1]:
                result[position] = sums[0]
            elif new is not None:
                building.is_changed = building.has_python = True
                result[position] = self._values(position, sums, new, call.forward.name)
        return result

    def _values(self, position: int, sums: Tensors | None, new: Any, name: str) -> Any:
        """The values of slices that add up to a gradient.

        Args:
            sums: what those of before have added up to, from the values on; None if not known.
            new: the gradient, dense.
            name: of the forward operator.
        """
        levels = list(enumerate(self._indexing(self._slices[position])))
        for depth, (indices, _) in reversed(levels):
            if sums is None:
                inputs = [_of_first(new, indices), indices, new]
            else:
                inputs = [sums[depth], indices, new, sums[depth + 1]]
            new = _Values(name).inserted(inputs)
        return new

    def _indexing(self, parts: Sequence[TensorName]) -> list[tuple[Any, Any]]:
        """Indices and shape of slices in the copy, and of the slices that these are values of."""
        found = [self._site.tensors.get(id(self._site.tensor(name))) for name in parts[1:]]
        return list(zip(found[::2], found[1::2], strict=True))


def _of_first(gradient: Any, indices: Any) -> Any:
    """The values of slices whose sum is a gradient: the first of a row has it, further ones 0."""
    numbers = tf.range(tf.size(indices))
    first = tf.math.unsorted_segment_min(numbers, indices, tf.shape(gradient)[0])
    of_rows = tf.gather(gradient, indices)
    ones = tf.ones([tf.rank(of_rows) - 1], tf.int32)
    is_first = tf.equal(tf.gather(first, indices), numbers)
    is_first = tf.reshape(is_first, tf.concat([[-1], ones], 0))
    # A product with zeros would make NaN of infinity.
    return tf.where(is_first, of_rows, tf.zeros_like(of_rows))


class _Values(PythonNode):
    """The values of slices whose sum is a dense gradient.

    Where the gradient is as it was, the values are, too. Else the first slice of a row gets the
    gradient of that row, and further ones of the same row zeros.

    Args:
        name: of the forward operator.
    """

    passes_to: Sequence[int] = (0,)

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def inserted(self, inputs: Sequence[Any]) -> Any:
        """Add the node; returns the values.

        Args:
            inputs: the values that there were, the indices, the dense gradient, and the one that
                these values stood for. Without the latter the values are only checked.
        """
        [values] = self.insert(inputs, [inputs[0].dtype], [inputs[0].shape], PASSING)
        return values

    def compute(self, values: Sequence[Any]) -> list[Any]:
        slices, at, new, *dense = (value.numpy() for value in values)
        old = dense[0] if dense else np.zeros_like(new)
        is_same = (new == old) | ((new != new) & (old != old))
        others = np.ones(len(new), bool)
        others[at] = False
        if not is_same[others].all():
            raise CapabilityError(
                f"a routine changes rows of the gradient of op {self._name} that no slice of it "
                "stands for: the graph holds the rows that were gathered only; leave the others 0"
            )
        if not dense or is_same.all():
            return [values[0]]
        rows, first = np.unique(at, return_index=True)
        result = np.zeros_like(slices)
        result[first] = new[rows]
        return [tf.constant(np.where(is_same[at], slices, result))]
