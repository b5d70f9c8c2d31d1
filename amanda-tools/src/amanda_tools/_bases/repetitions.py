"""Tells executions of forward operators that a backward pass runs again, as checkpoints do."""

from __future__ import annotations

from collections.abc import Hashable

from amanda.interface.points import PointContext
from amanda.interface.tool import Tool


class Repetitions:
    """What a tool's operators run again in a backward pass, after a run outside of it.

    Args:
        tool: gets routines at backward passes.
    """

    def __init__(self, tool: Tool) -> None:
        self._passes = 0
        self._first: set[Hashable] = set()
        tool.add_inst_for_pass(self._begin, backward=True)
        tool.add_inst_for_pass(self._end, backward=True, end=True)

    def _begin(self, point: PointContext) -> None:
        self._passes += 1

    def _end(self, point: PointContext) -> None:
        self._passes -= 1

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
