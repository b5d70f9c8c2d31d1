"""The bytes that operators write.

In eager mode they are the bytes of the first step of training, at which operators are analysed; in
a graph those of the last step. Without training they are the bytes of the last evaluation.

::

    written = WrittenBytes()
    written.note("a/relu:0", context)       # in an analysis that sees the outputs
    tool.add_inst_for_iteration(written.begin_step)
    tool.add_inst_for_iteration(written.end_step, end=True)
    written.of("a/relu:0")
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from amanda import OpContext, deferrable
from amanda.inline import Counter
from amanda.interface.points import PointContext
from amanda_tools._values.shapes import total_bytes


class WrittenBytes:
    """The bytes of the outputs of operators, by id."""

    def __init__(self) -> None:
        self._last: dict[str, int | None] = {}
        self._of_step: dict[str, int | None] = {}
        # Analysed since the last step ended.
        self._new: set[str] = set()
        # Of graphs: the bytes of an execution, and what counts these; those of all executions.
        self._counted: list[tuple[str, int, Counter]] = []
        self._sums: collections.Counter[str] = collections.Counter()
        self._begun: Mapping[str, int] = {}

    def note(self, op_id: str, context: OpContext) -> None:
        """Note the outputs of an operator: now, or those of all executions in a graph, where it may
        be in a loop, or not be needed."""
        if context.runs_at_once:
            size = self._last[op_id] = total_bytes(context.get_outputs())
            # Noted again where training begins after evaluations, each of which was a step.
            if self._of_step.get(op_id, -1) != size:
                self._new.add(op_id)
            return
        size = total_bytes(context.get_tensor_specs().outputs)
        self._last.setdefault(op_id, size)
        if size is None:
            context.insert_after_op(self._routine(op_id))
            return
        self._counted.append((op_id, size, Counter()))
        context.insert_after_op(self._counted[-1][2], outputs=[])

    def _routine(self, op_id: str) -> Callable[..., None]:
        """Return a routine that notes the outputs of each execution."""

        @deferrable
        def note(*outputs: Any) -> None:
            self._sums[op_id] += total_bytes(outputs) or 0

        return note

    def _all(self) -> Mapping[str, int]:
        """Return the bytes of all executions of the operators of graphs."""
        found = self._sums.copy()
        for op_id, size, counter in tuple(self._counted):
            found[op_id] += size * counter.count
        return found

    def begin_step(self, _: PointContext) -> None:
        """Routine at the begin of an iteration: leave out the evaluations before it."""
        self._begun = self._all()

    def end_step(self, _: PointContext) -> None:
        """Routine at the end of an iteration: keep the bytes of the step, since an evaluation after
        it has other ones."""
        for op_id in self._new:
            self._of_step[op_id] = self._last[op_id]
        self._new.clear()
        for op_id, total in self._all().items():
            if total > self._begun.get(op_id, 0) or not total:
                self._of_step[op_id] = total - self._begun.get(op_id, 0)

    def of(self, op_id: str) -> int | None:
        """Return the bytes of an operator; 0 for one that writes nothing, None if not known."""
        return self._of_step.get(op_id, self._last.get(op_id, 0))

    def is_in_pass(self, op_id: str) -> bool:
        """True if an operator belongs to the pass of the last step; to any if no step ended."""
        return not self._of_step or op_id in self._of_step
