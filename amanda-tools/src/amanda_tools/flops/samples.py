"""Counts the samples that a model is given, by what its first operator with weights is given.

The first size of the data is the number of samples; an embedding of integers is given tokens::

    samples = Samples()
    samples.look(context, op, in_backward)     # in each analysis before a forward operator
    ...                                        # the program runs
    samples.figures()                          # {"samples": 96}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda.inline import Counter
from amanda.interface.context import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.parameters import is_graph
from amanda_tools.flops.tally import known_shapes

_MOST = 8
"""Operators that are counted, of which one is the first that a run executes."""

_WITHOUT_WEIGHT = 2
"""So many of them have no weight."""


@attrs.define(eq=False)
class Candidate:
    """An operator that may be the first one that takes a model's data.

    Attributes:
        has_weight: whether it has a weight.
        has_tokens: whether it embeds tokens.
        rank: of its data.
        in_backward: whether a backward pass runs, in which checkpoints run operators again.
        batch: the most samples that it was given at a time.
    """

    has_weight: bool
    has_tokens: bool
    rank: int
    in_backward: Callable[[], bool]
    batch: int | None = None
    _executions: int = 0
    _samples: int = 0
    _tokens: int = 0
    _counters: list[tuple[Counter, Sequence[int]]] = attrs.field(factory=list)

    def counter(self, sizes: Sequence[int]) -> Counter:
        """The counter of executions on data of these sizes, which a graph tells."""
        counter = Counter()
        self._counters.append((counter, sizes))
        return counter

    def count(self, data: Any) -> None:
        """Instrumentation routine before an execution."""
        if self.in_backward():
            return
        try:
            sizes = [int(size) for size in data.shape]
        except (RuntimeError, TypeError, ValueError):
            # The sizes of a nested tensor are those of its items.
            return
        if sizes:
            self._executions += 1
            self._samples += sizes[0]
            self._tokens += math.prod(sizes)
            self.batch = max(self.batch or 0, sizes[0])

    @property
    def may_be_positions(self) -> bool:
        """Whether it may embed the positions of tokens, which come first in some models."""
        return self.has_tokens and self.rank == 1

    def executions(self) -> int:
        """How often it was executed."""
        return self._executions + sum(counter.count for counter, _ in self._counters)

    def figures(self) -> Mapping[str, int]:
        """``samples``, and ``tokens`` if it embeds them."""
        samples, tokens = self._samples, self._tokens
        for counter, sizes in self._counters:
            samples += counter.count * sizes[0]
            tokens += counter.count * math.prod(sizes)
        return {"samples": samples, "tokens": tokens} if self.has_tokens else {"samples": samples}

    def largest(self) -> int | None:
        """The most samples that it was given at a time; None if it was not executed."""
        sizes = [sizes[0] for counter, sizes in self._counters if counter.count]
        return max([*sizes, *([] if self.batch is None else [self.batch])], default=None)


class Samples:
    """The samples that one operator was given, with the tokens if it embeds them.

    A run of a graph may not execute the first operator that has a weight: a recurrent layer calls
    its cell to learn the type of the output, and again in a loop. So several are counted there.
    """

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}
        # Whether one of them embeds no positions, and whether no further ones are counted.
        self._has_data = self._is_closed = False

    @property
    def batch(self) -> int | None:
        """The most samples that were given at a time; None if unknown."""
        first = self._first()
        return None if first is None else first.largest()

    def look(self, context: OpContext, op: OpDescription, in_backward: Callable[[], bool]) -> None:
        """Count the executions of an operator if it may be the first one that takes data.

        Args:
            in_backward: whether a backward pass runs, in which checkpoints run operators again.
        """
        candidate = self._candidates.get(op.id)
        if op.phase != "forward" or (candidate is None and self._is_closed):
            return
        in_graph = is_graph(context.namespace)
        if candidate is None and not self._is_open(in_graph, has_weight=True):
            return
        weight = context["weight_index"]
        has_weight = weight is not None and context.get_value(weight) is not None
        if not (has_weight or in_graph):
            return
        if candidate is None and not self._is_open(in_graph, has_weight):
            return
        specs = context.get_tensor_specs().inputs or ()
        shapes = known_shapes(specs) if in_graph else None
        position = _data_of(context, has_weight, shapes is not None)
        if position is None:
            return
        if candidate is None:
            has_tokens = context["op_type"] == "embedding"
            spec = specs[position]
            rank = 0 if spec is None else len(spec.shape or ())
            candidate = Candidate(has_weight, has_tokens, rank, in_backward)
            self._candidates[op.id] = candidate
            self._has_data |= not candidate.may_be_positions
            # One whose sizes only a routine can read is enough: each is a node of the graph.
            self._is_closed = self._has_data and (not in_graph or (has_weight and shapes is None))
        if shapes is None:
            context.insert_before_op(candidate.count, inputs=[position])
        else:
            context.insert_before_op(candidate.counter(shapes[position]), inputs=[])

    def _is_open(self, in_graph: bool, has_weight: bool) -> bool:
        """Whether a further operator is counted."""
        found = self._candidates.values()
        if len(found) >= _MOST:
            return False
        if not self._has_data:
            return True
        if not in_graph or any(candidate.executions() for candidate in found):
            return False
        return has_weight or sum(not one.has_weight for one in found) < _WITHOUT_WEIGHT

    def _first(self) -> Candidate | None:
        """The first operator that was executed, with a weight if that is not in a loop."""
        found = [candidate for candidate in self._candidates.values() if candidate.executions()]
        weighted = [candidate for candidate in found if candidate.has_weight]
        if not weighted:
            return next(iter(found or self._candidates.values()), None)
        first = weighted[0]
        if first.may_be_positions:
            # Of a model that is given one number for each sample, all have as many samples.
            data = next((one for one in weighted if not one.may_be_positions), first)
            is_data = first.figures()["samples"] == data.figures()["samples"]
            return first if is_data else data
        times, rest = divmod(first.executions(), found[0].executions())
        return found[0] if times > 1 and not rest else first

    def figures(self) -> Mapping[str, int]:
        """Return ``samples`` so far, and ``tokens`` if the operator embeds them; {} if unknown."""
        first = self._first()
        return {} if first is None else first.figures()


def _data_of(context: OpContext, has_weight: bool, is_static: bool) -> int | None:
    """Return the position of the data of an operator that may be a model's first one.

    It is one with a weight, in a graph also one whose data has as many samples as each run gives
    it: a recurrent layer multiplies in a loop. Positions of tokens, masks and the like come first
    in many models, and have other sizes.

    Args:
        has_weight: whether the operator has a weight.
        is_static: whether all of its shapes are known before the run.
    """
    for position, spec in enumerate(context.get_tensor_specs().inputs or ()):
        if spec is None or not spec.shape or context.get_value(position) is not None:
            continue
        is_batch = len(spec.shape) > 1 and (is_static or spec.shape[0] is None)
        if has_weight or is_batch:
            return position
    return None
