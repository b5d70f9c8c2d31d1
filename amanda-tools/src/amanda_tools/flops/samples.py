"""Counts the samples that a model is given, by the input of its first operator with weights.

The first size of the data is the number of samples; an embedding of integers is given tokens::

    samples = Samples()
    samples.look(context, op, in_backward)     # in each analysis before a forward operator
    ...                                        # the program runs
    samples.figures(samples.sums())            # {"samples": 96}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import amanda
from amanda.inline import Counter
from amanda.interface.context import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.cost import FORMULAS
from amanda_tools._operators.op_types import CONVERTING
from amanda_tools._values.shapes import shape_of
from amanda_tools.flops.tally import known_shapes

_MOST = 8
"""Operators that are counted, of which one is the first that a run executes."""

_WITHOUT_WEIGHT = 2
"""Operators without a weight among these, at most."""

_BATCHES: Mapping[str, tuple[str, int]] = {
    "rnn": ("hx", 1),
    "lstm": ("hx", 1),
    "gru": ("hx", 1),
    "rnn_tanh_cell": ("input", 0),
    "rnn_relu_cell": ("input", 0),
    "lstm_cell": ("input", 0),
    "gru_cell": ("input", 0),
    "attention": ("query", 0),
}
"""By canonical type, the input and axis that have the size of the batch, whatever the order of the
data: the first state of a recurrent layer has as many rows as a packed sequence has samples."""

_WEIGHTS = frozenset({"params", "w_ih", "weight_ih"})
"""Names of inputs that are the weights of a recurrent layer or cell."""

_PRODUCTS = frozenset({"linear", "matmul", "einsum", "embedding"})
"""Types whose data may have positions before samples."""


@attrs.frozen
class Product:
    """A product that may be that of a recurrent layer with all positions of its data at once.

    Keras on PyTorch (3.15) puts positions first, and multiplies the states, which have none, with
    the other weight in the next product of the layer.

    Attributes:
        module: the layer.
        data: shape of its data.
        weight: shape of its weight.
    """

    module: str
    data: Sequence[int | None]
    weight: Sequence[int | None]

    @classmethod
    def of(
        cls, context: OpContext, op: OpDescription, position: int, weight: int | None
    ) -> Product | None:
        """The product that an operator computes; None if it computes none.

        Args:
            position: of its data.
            weight: the position of its weight.
        """
        specs = context.get_tensor_specs().inputs or ()
        if weight is None or weight >= len(specs) or position >= len(specs):
            return None
        data, values = specs[position], specs[weight]
        if data is None or values is None or not data.shape or len(values.shape or ()) != 2:
            return None
        return cls(op.module, data.shape, values.shape or ())

    def is_of_states(self, first: Product) -> bool:
        """Whether it multiplies the states of the layer whose data `first` multiplies."""
        if len(first.data) != 3 or len(self.data) != 2 or self.data[0] != first.data[1]:
            return False
        states, gates = self.weight
        return gates == first.weight[1] and gates in (3 * (states or 0), 4 * (states or 0))


Sums = tuple[int, int, int, int]
"""The executions of an operator, the sums of the first and of the second size of its data, of which
one is the number of samples, and of all elements."""


@attrs.define(eq=False)
class Candidate:
    """An operator that may be the first one that takes a model's data.

    Attributes:
        has_weight: whether it has a weight.
        has_tokens: whether it embeds tokens.
        sizes: of its data at its first execution.
        in_backward: whether a backward pass runs, in which checkpoints run operators again.
        axis: which size of its data is that of the batch: the second one where the first one is
            that of a sequence.
        least_rank: data with fewer axes are one sample.
    """

    has_weight: bool
    has_tokens: bool
    sizes: Sequence[int | None]
    in_backward: Callable[[], bool]
    axis: int = 0
    least_rank: int = 0
    _executions: int = 0
    _tokens: int = 0
    # Of the first size of the data, and of the second one: the sum, and the largest one.
    _samples: list[int] = attrs.field(factory=lambda: [0, 0])
    _most: list[int] = attrs.field(factory=lambda: [0, 0])
    _counters: list[tuple[Counter, Sequence[int]]] = attrs.field(factory=list)

    def counter(self, sizes: Sequence[int]) -> Counter:
        """The counter of executions on data of these sizes, which are in the graph."""
        counter = Counter()
        self._counters.append((counter, sizes))
        return counter

    @amanda.deferrable
    def count(self, data: Any) -> None:
        """Instrumentation routine before an execution."""
        if self.in_backward():
            return
        try:
            sizes = shape_of(data)
        except (RuntimeError, TypeError, ValueError):
            # The sizes of a nested tensor are those of its items.
            return
        if sizes:
            self._executions += 1
            self._tokens += math.prod(sizes)
            is_one = len(sizes) < self.least_rank
            for axis, size in enumerate((1, 1) if is_one else sizes[:2]):
                self._samples[axis] += size
                self._most[axis] = max(self._most[axis], size)

    @property
    def may_be_positions(self) -> bool:
        """Whether it may embed the positions of tokens, which come first in some models."""
        return self.has_tokens and len(self.sizes) == 1

    def sums(self) -> Sums:
        """What it was given so far."""
        executions, (first, second), tokens = self._executions, self._samples, self._tokens
        for counter, sizes in self._counters:
            executions += counter.count
            first += counter.count * sizes[0]
            second += counter.count * sizes[0]
            tokens += counter.count * math.prod(sizes)
        return executions, first, second, tokens

    def figures(self, sums: Sums) -> Mapping[str, int]:
        """``samples``, and ``tokens`` if it embeds them, when :meth:`sums` gave `sums`."""
        samples, tokens = sums[1 + self.axis], sums[3]
        return {"samples": samples, "tokens": tokens} if self.has_tokens else {"samples": samples}

    def largest(self) -> int | None:
        """The most samples that it was given at a time; None if it was not executed."""
        sizes = [sizes[0] for counter, sizes in self._counters if counter.count]
        most = self._most[self.axis]
        return max([*sizes, *([most] if self._executions else [])], default=None)


class Samples:
    """The samples that one operator was given, with the tokens if it embeds them.

    A run of a graph may not execute the first operator that has a weight: a recurrent layer calls
    its cell to learn the type of the output, and again in a loop. So several are counted there.
    """

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}
        # Whether one of them embeds no positions, and whether no further ones are counted.
        self._has_data = self._is_closed = False
        # The last candidate, while its layer may turn out to be a recurrent one.
        self._open_product: tuple[Candidate, Product] | None = None
        # One whose data may turn out to have positions first.
        self._open_order: Candidate | None = None
        # Sizes of parameters that a module has converted to another type, in any order.
        self._converted: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def batch(self) -> int | None:
        """The most samples that were given at a time; None if unknown."""
        first = self._first(self.sums())
        return None if first is None else first[0].largest()

    def look(self, context: OpContext, op: OpDescription, in_backward: Callable[[], bool]) -> None:
        """Count the executions of an operator if it may be the first one that takes data.

        Args:
            in_backward: whether a backward pass runs, in which checkpoints run operators again.
        """
        candidate = self._candidates.get(op.id)
        if candidate is None:
            if self._open_product is not None:
                self._look_for_states(context, op, *self._open_product)
            # Nearly all operators are of other types.
            if self._open_order is not None and context["op_type"] in _BATCHES:
                self._look_for_order(context, self._open_order)
        if op.phase != "forward" or (candidate is None and self._is_closed):
            return
        in_graph = not context.runs_at_once
        if candidate is None and not self._is_open(in_graph, has_weight=True):
            return
        weight = self._weight_of(context, op)
        has_weight = weight is not None
        if not (has_weight or in_graph):
            return
        if candidate is None and not self._is_open(in_graph, has_weight):
            return
        specs = context.get_tensor_specs().inputs or ()
        shapes = known_shapes(specs) if in_graph else None
        position = _data_of(context, weight, shapes is not None)
        if position is None:
            return
        if candidate is None:
            candidate = self._new(context, op, position, weight, in_backward)
            # One whose sizes only a routine can read is enough: each is a node of the graph.
            self._is_closed = self._has_data and (not in_graph or (has_weight and shapes is None))
        if shapes is None:
            context.insert_before_op(candidate.count, inputs=[position])
        else:
            context.insert_before_op(candidate.counter(shapes[position]), inputs=[])

    def _new(
        self,
        context: OpContext,
        op: OpDescription,
        position: int,
        weight: int | None,
        in_backward: Callable[[], bool],
    ) -> Candidate:
        """Note a candidate that takes its data at a position."""
        kind = str(context["op_type"])
        spec = (context.get_tensor_specs().inputs or ())[position]
        sizes = () if spec is None else spec.shape or ()
        candidate = Candidate(
            weight is not None,
            kind == "embedding",
            sizes,
            in_backward,
            axis=_BATCHES.get(kind, ("", 0))[1],
            least_rank=_least_rank(context, kind),
        )
        self._candidates[op.id] = candidate
        self._has_data |= not candidate.may_be_positions
        self._open_product = None
        if context.runs_at_once:
            product = Product.of(context, op, position, weight)
            self._open_product = None if product is None else (candidate, product)
            if kind in _PRODUCTS and len(sizes) > 1:
                self._open_order = candidate
        return candidate

    def _weight_of(self, context: OpContext, op: OpDescription) -> int | None:
        """The position of an operator's weight; None without one that is a parameter."""
        weight, kind = context.get("weight_index"), context["op_type"]
        if weight is not None and context.get_value(weight) is not None:
            return int(weight)
        if kind in _BATCHES:
            names = enumerate(context.get_input_names())
            found = (position for position, name in names if name in _WEIGHTS)
            return next((at for at in found if context.get_value(at) is not None), None)
        if kind in CONVERTING:
            sizes = _sizes(context, 0)
            if len(sizes) > 1 and context.get_value(0) is not None:
                self._converted.add((op.module, tuple(sorted(sizes))))
        elif self._converted and kind in FORMULAS:
            for position in reversed(range(len(context.get_inputs()))):
                if (op.module, tuple(sorted(_sizes(context, position)))) in self._converted:
                    return position
        return None

    def _look_for_states(
        self, context: OpContext, op: OpDescription, candidate: Candidate, first: Product
    ) -> None:
        """Learn from the next product of a candidate's layer whether that is a recurrent one."""
        if op.module != first.module:
            self._open_product = None
            return
        weight = self._weight_of(context, op)
        if weight is None:
            return
        product = Product.of(context, op, _data_of(context, weight, False) or 0, weight)
        if product is not None and product.is_of_states(first):
            candidate.axis = 1
        self._open_product = None

    def _look_for_order(self, context: OpContext, candidate: Candidate) -> None:
        """Learn from the next attention or recurrent layer whether positions come first."""
        name, axis = _BATCHES[context["op_type"]]
        names = context.get_input_names()
        if name not in names:
            return
        sizes = _sizes(context, names.index(name))
        if len(sizes) > axis and candidate.sizes[0] != sizes[axis] == candidate.sizes[1]:
            candidate.axis = 1
        self._open_order = None

    def _is_open(self, in_graph: bool, has_weight: bool) -> bool:
        """Whether a further operator is counted."""
        found = self._candidates.values()
        if len(found) >= _MOST:
            return False
        if not self._has_data:
            return True
        if not in_graph or any(candidate.sums()[0] for candidate in found):
            return False
        return has_weight or sum(not one.has_weight for one in found) < _WITHOUT_WEIGHT

    def _first(self, sums: Sequence[Sums]) -> tuple[Candidate, Sums] | None:
        """The first operator that was executed, with a weight if that is not in a loop."""
        every = [*zip(self._candidates.values(), sums, strict=False)]
        found = [one for one in every if one[1][0]]
        weighted = [one for one in found if one[0].has_weight]
        if not weighted:
            return next(iter(found or every), None)
        first = weighted[0]
        if first[0].may_be_positions:
            # Of a model that is given one number for each sample, all have as many samples.
            data = next((one for one in weighted if not one[0].may_be_positions), first)
            samples = [candidate.figures(of)["samples"] for candidate, of in (first, data)]
            return first if samples[0] == samples[1] else data
        times, rest = divmod(first[1][0], found[0][1][0])
        return found[0] if times > 1 and not rest else first

    def sums(self) -> list[Sums]:
        """What the operators that are counted were given so far."""
        return [candidate.sums() for candidate in self._candidates.values()]

    def figures(self, sums: Sequence[Sums]) -> Mapping[str, int]:
        """``samples``, and ``tokens`` if the operator embeds them, when :meth:`sums` gave `sums`;
        {} if unknown."""
        first = self._first(sums)
        return {} if first is None else first[0].figures(first[1])


def _sizes(context: OpContext, position: int) -> Sequence[int]:
    """The sizes of an input; none if they are not known."""
    specs = context.get_tensor_specs().inputs or ()
    spec = specs[position] if position < len(specs) else None
    sizes = () if spec is None else spec.shape or ()
    return [size for size in sizes if size is not None]


def _least_rank(context: OpContext, kind: str) -> int:
    """The axes of data that hold several samples: four of an image, which may come alone."""
    layout = context["data_layout"] or ""
    if kind.startswith("conv") and "N" in layout:
        return len(layout)
    return 2 if kind in _PRODUCTS and kind not in ("embedding", "einsum") else 0


def _data_of(context: OpContext, weight: int | None, is_static: bool) -> int | None:
    """Return the position of the data of an operator that may be a model's first one.

    It is one with a weight, in a graph also one whose data has as many samples as each run gives
    it: a recurrent layer multiplies in a loop. Positions of tokens, masks and the like come first
    in many models, and have other sizes.

    Args:
        weight: the position of its weight; None without one.
        is_static: whether all of its shapes are known before the run.
    """
    name = _BATCHES.get(str(context["op_type"]), ("",))[0]
    names = context.get_input_names()
    if weight is not None and name in names:
        return names.index(name)
    for position, spec in enumerate(context.get_tensor_specs().inputs or ()):
        if spec is None or not spec.shape or position == weight:
            continue
        if context.get_value(position) is not None:
            continue
        is_batch = len(spec.shape) > 1 and (is_static or spec.shape[0] is None)
        if weight is not None or is_batch:
            return position
    return None
