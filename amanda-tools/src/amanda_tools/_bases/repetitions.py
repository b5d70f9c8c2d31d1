"""Tells executions of forward operators that a backward pass runs again, as checkpoints do."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from amanda.interface.points import PointContext
from amanda.interface.tool import Tool


class Repetitions:
    """What a tool's operators run again in a backward pass, after a run outside of it.

    Args:
        tool: gets routines at backward passes.
    """

    def __init__(self, tool: Tool) -> None:
        self._passes, self._first = 0, set[Hashable]()
        tool.add_inst_for_pass(partial(self._note, 1), backward=True)
        tool.add_inst_for_pass(partial(self._note, -1), backward=True, end=True)

    def _note(self, change: int, point: PointContext) -> None:
        self._passes += change

    def is_one(self, key: Hashable, overlaps: bool) -> bool:
        """True if the execution of `key` that runs now repeats the last one.

        Args:
            key: of an operator.
            overlaps: other threads may run it now while this one is in a backward pass.
        """
        if not self._passes:
            self._first.add(key)
            return False
        return key in self._first and not overlaps
