"""The bytes that operators write.

In eager mode they are the bytes of the first step of training, at which operators are analysed; in
a graph the bytes that are known before it runs, or else those of the last step. Without training
they are the bytes of the last evaluation.

::

    written = WrittenBytes()
    written.note("a/relu:0", context)       # in an analysis that sees the outputs
    tool.add_inst_for_iteration(written.end_step, end=True)
    written.of("a/relu:0")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda import OpContext, deferrable
from amanda.interface.points import PointContext
from amanda_tools._values.shapes import total_bytes


class WrittenBytes:
    """The bytes of the outputs of operators, by id.

    Attributes:
        is_of_first_step: whether those of some are of the first step.
    """

    def __init__(self) -> None:
        self.is_of_first_step = False
        self._last: dict[str, int | None] = {}
        self._of_step: dict[str, int | None] = {}
        # Seen since the last step ended: those of an analysis, and those of executions.
        self._new: set[str] = set()
        self._executed: set[str] = set()

    def note(self, op_id: str, context: OpContext) -> None:
        """Note the outputs of an operator: now, or at each execution where the graph does not tell
        all of their sizes."""
        if context.runs_at_once:
            self.is_of_first_step = True
            size = total_bytes(context.get_outputs())
        else:
            size = total_bytes(context.get_tensor_specs().outputs)
            if size is None:
                context.insert_after_op(self._routine(op_id))
                return
        self._last[op_id] = size
        # Noted again where training begins after evaluations, each of which was a step.
        if self._of_step.get(op_id, -1) != size:
            self._new.add(op_id)

    def _routine(self, op_id: str) -> Callable[..., None]:
        """Return a routine that notes the outputs of each execution."""

        @deferrable
        def note(*outputs: Any) -> None:
            size = self._last[op_id] = total_bytes(outputs)
            if self._of_step.get(op_id, -1) != size:
                self._executed.add(op_id)

        self._last.setdefault(op_id, None)
        return note

    def end_step(self, _: PointContext) -> None:
        """Routine at the end of an iteration: keep the bytes of the step, since an evaluation after
        it has other ones."""
        for op_id in self._new | self._executed:
            self._of_step[op_id] = self._last[op_id]
        self._new.clear()
        self._executed.clear()

    def of(self, op_id: str) -> int | None:
        """Return the bytes of an operator; 0 for one that writes nothing, None if not known."""
        return self._of_step.get(op_id, self._last.get(op_id, 0))

    def is_in_pass(self, op_id: str) -> bool:
        """True if an operator belongs to the pass of the last step; to any if no step ended."""
        return not self._of_step or op_id in self._of_step
