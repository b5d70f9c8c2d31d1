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

from amanda.inline import Counter
from amanda.interface.context import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.parameters import is_graph
from amanda_tools.flops.tally import known_shapes, no_backward_pass


class Samples:
    """The samples that one operator was given, with the tokens if it embeds them.

    Attributes:
        batch: the most samples that it was given at a time; None if unknown.
    """

    def __init__(self) -> None:
        self.batch: int | None = None
        self._op_id: str | None = None
        self._has_tokens = False
        self._samples = self._tokens = 0
        self._in_backward: Callable[[], bool] = no_backward_pass
        self._counters: list[tuple[Counter, Sequence[int]]] = []

    def look(self, context: OpContext, op: OpDescription, in_backward: Callable[[], bool]) -> None:
        """Count the executions of an operator if it is the first one that takes data.

        Args:
            in_backward: whether a backward pass runs, in which checkpoints run operators again.
        """
        if op.phase != "forward" or (self._op_id is not None and op.id != self._op_id):
            return
        position = _data_of(context)
        if position is None:
            return
        self._op_id = op.id
        self._in_backward = in_backward
        self._has_tokens = context["op_type"] == "embedding"
        in_graph = is_graph(context.namespace)
        shapes = known_shapes(context.get_tensor_specs().inputs) if in_graph else None
        if shapes is None:
            context.insert_before_op(self._count, inputs=[position])
            return
        counter, sizes = Counter(), shapes[position]
        self._counters.append((counter, sizes))
        self.batch = max(self.batch or 0, sizes[0])
        context.insert_before_op(counter, inputs=[])

    def figures(self) -> Mapping[str, int]:
        """Return ``samples`` so far, and ``tokens`` if the operator embeds them; {} if unknown."""
        if self._op_id is None:
            return {}
        samples, tokens = self._samples, self._tokens
        for counter, sizes in self._counters:
            samples += counter.count * sizes[0]
            tokens += counter.count * math.prod(sizes)
        return {"samples": samples, "tokens": tokens} if self._has_tokens else {"samples": samples}

    def _count(self, data: Any) -> None:
        """Instrumentation routine before an execution."""
        if self._in_backward():
            return
        try:
            sizes = [int(size) for size in data.shape]
        except (RuntimeError, TypeError, ValueError):
            # The sizes of a nested tensor are those of its items.
            return
        if sizes:
            self._samples += sizes[0]
            self._tokens += math.prod(sizes)
            self.batch = max(self.batch or 0, sizes[0])


def _data_of(context: OpContext) -> int | None:
    """Return the position of the data of an operator that may be a model's first one.

    It is one with a weight, in a graph also one whose data has as many samples as each run gives
    it: a recurrent layer multiplies in a loop. Positions of tokens, masks and the like come first
    in many models, and have other sizes.
    """
    weight = context["weight_index"]
    is_first = weight is not None and context.get_value(weight) is not None
    in_graph = is_graph(context.namespace)
    if not (is_first or in_graph):
        return None
    for position, spec in enumerate(context.get_tensor_specs().inputs or ()):
        if spec is None or not spec.shape or context.get_value(position) is not None:
            continue
        if is_first or (len(spec.shape) > 1 and spec.shape[0] is None):
            return position
    return None
