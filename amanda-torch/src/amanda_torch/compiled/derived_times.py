"""Timers and changes of memory at the backward operators of a captured graph, without a hook of
Python's on any node.

A pass that comes to an output of the graph has the nodes behind it noted by the gate, which writes
down when each of them begins and ends, and how much memory is in use then, and adds what it has
written to the timers and to their logs, and to the changes of memory, when a log is due and when
the pass has ended or raised::

    timers = NodeTimers(native, {0: (timer,), 2: (other, change)}, edges, outputs)
    timed = timers.begin(timers.way(0, frozenset()), start, None)   # in a hook of the output's node
    ...
    timed.end()                             # after the pass
"""

from __future__ import annotations

import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda.inline import Log, Timer
from amanda_torch.routines import Measure

_NONE = -1

_MOST_WAYS = 64


@attrs.frozen
class Way:
    """The nodes behind that of an output.

    Attributes:
        slot: of the output's node among those that are timed; -1 if it is not.
        steps: how to find the others, as the gate takes it.
        leaves: the identities of the leaves whose accumulations are among them.
    """

    slot: int
    steps: bytes = b""
    leaves: frozenset[int] = frozenset()


class NodeTimers:
    """The timers and changes of memory at the nodes of all runs of one graph.

    Args:
        native: the extension of the gate.
        timers: by the number of a node in a run; that of a leaf's accumulation is the negative
            identity of the leaf.
        edges: where the edges of the nodes lead, by number, with the same numbers; None for what is
            not of the run.
        outputs: the numbers of the nodes that have made the graph's outputs.

    Attributes:
        leaves: the identities of the leaves whose accumulations are timed.
    """

    def __init__(
        self,
        native: Any,
        timers: Mapping[int, tuple[Measure, ...]],
        edges: Mapping[int, Sequence[int | None]],
        outputs: Collection[int],
    ) -> None:
        self._native = native
        self._slots = {number: slot for slot, number in enumerate(timers)}
        self.leaves = frozenset(-number for number in timers if number < 0)
        self._timers = tuple(timers.values())
        self._logs = _logs([timer for around in self._timers for timer in around])
        self._edges = edges
        self._outputs = outputs
        self._ways: dict[tuple[int, frozenset[int]], Way] = {}

    @staticmethod
    def can_time(native: Any, timers: tuple[Measure, ...]) -> bool:
        """Whether the gate can do without hooks for what measures an operator."""
        if not timers:
            return True
        return native is not None and bool(native.can_time((timers,), _logs(timers)))

    def way(self, output: int, hooked: frozenset[int]) -> Way:
        """The way from an output.

        Args:
            output: the number of its node.
            hooked: the identities of leaves that have hooks, which time them.
        """
        found = self._ways.get((output, hooked))
        if found is None:
            found = self._ways[output, hooked] = self._find_way(output, hooked)
            if len(self._ways) > _MOST_WAYS:
                del self._ways[next(iter(self._ways))]
        return found

    def end_of_way(self, output: int) -> Way:
        """The way from an output that lies behind another one, which has been gone."""
        return Way(self._slots.get(output, _NONE))

    def begin(self, way: Way, start: int, timed: Any) -> Any:
        """Time the nodes behind an output in the pass that comes there now.

        Args:
            start: the number of the first node of the run.
            timed: what this has returned in the pass before; None for nothing.

        Returns:
            What has a method ``end()``; None where the nodes are not those that they were, or a
            device's memory is looked at by now.
        """
        native = self._native
        return native.time_pass(self._timers, self._logs, way.steps, start, way.slot, timed)

    def _find_way(self, output: int, hooked: frozenset[int]) -> Way:
        places, waiting = {output: 0}, [output]
        timed = {number for number in self._slots if -number not in hooked}
        steps = array.array("q")
        # It grows while it is read.
        for number in waiting:
            for edge, target in enumerate(self._edges[number]):
                if target is None or target in places or (target < 0 and target not in timed):
                    continue
                place, places[target] = places[number], len(places)
                if target >= 0:
                    waiting.append(target)
                slot, is_output = self._slots.get(target, _NONE), target in self._outputs
                steps.extend((place, edge, max(target, _NONE), slot, is_output))
        leaves = frozenset(-number for number in places if number < 0)
        return Way(self._slots.get(output, _NONE), steps.tobytes(), leaves)


def _logs(measures: Iterable[Measure]) -> tuple[Log, ...]:
    """The logs of the timers among these, each once."""
    timers = [one for one in measures if isinstance(one, Timer)]
    found = {id(timer.log): timer.log for timer in timers if timer.log is not None}
    return tuple(found.values())
