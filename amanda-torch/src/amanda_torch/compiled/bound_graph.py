"""Runs a captured graph at one place, once the plans of all of its operators are known.

A place is a module call and a position in the iteration, which the counters of its operators
determine::

    for binding in bindings:
        if binding.has_roots(roots) and binding.holds(interceptor):
            return binding.run(interceptor, inputs)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import attrs

from amanda_torch.compiled.passes import Passes
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.eager.module_frames import Cell, Child, Frame


class CounterChange:
    """The change that a run of a graph makes to the counters of the surrounding module call.

    Args:
        counts: count of an operator's cell before and after the run, if they differ.
        calls: calls of a module, likewise.
        begins: the module whose call begins an iteration, so that earlier counts do not matter;
            None for none.
        is_outside: True outside of module calls: a module called in the run may begin an iteration.
    """

    def __init__(
        self,
        counts: Sequence[tuple[Cell, int, int]],
        calls: Sequence[tuple[Child, int, int]],
        begins: Child | None,
        is_outside: bool,
    ) -> None:
        self._counts = counts
        self._calls = calls
        self._begins = begins
        self._is_outside = is_outside

    @classmethod
    def since(
        cls,
        start: tuple[dict[str, int], dict[int, int]],
        frame: Frame,
        begins: Child | None,
        has_restarted: bool,
    ) -> CounterChange:
        """The change made by a run that has just ended.

        Args:
            start: the counters before it, as :meth:`Frame.counters` gives them.
            has_restarted: True if an iteration has begun within the run: equal counters may have
                counted then.
        """
        counts = [
            (cell, start[0].get(name, 0), cell[0])
            for name, cell in frame.named_cells()
            if has_restarted or start[0].get(name, 0) != cell[0]
        ]
        calls = [
            (child, start[1].get(key, 0), child.calls)
            for key, child in frame.children.items()
            if has_restarted or start[1].get(key, 0) != child.calls
        ]
        return cls(counts, calls, begins, frame.phase is not None)

    def can_begin(self, interceptor: Interceptor) -> bool:
        """True if a run that begins now makes the same change."""
        if self._begins is not None:
            return interceptor.was_called(self._begins)
        for cell, count, _ in self._counts:
            if cell[0] != count:
                return False
        for child, calls, _ in self._calls:
            if child.calls != calls or (self._is_outside and interceptor.was_called(child)):
                return False
        return True

    def end(self) -> None:
        """Set the counters to their values after the run."""
        for cell, _, count in self._counts:
            cell[0] = count
        for child, _, calls in self._calls:
            child.calls = calls


@attrs.define
class Waiting:
    """A graph whose backward operators have yet to be analysed.

    Attributes:
        steps: records of its calls.
        runs: number of runs since then.
    """

    steps: Sequence[Any]
    runs: int


class BoundGraph:
    """Runs a graph in one module call, with the facts about its operators.

    Args:
        function: the graph's code.
        base: frame of the module call that runs it.
        generation: generation of the bound plans.
        callers: frame of each module call of the graph, and of its caller.
        passes: reports the forward passes in the graph to tools.

    Attributes:
        waiting: the graph to be compiled once all backward operators are analysed; None without
            one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        base: Frame,
        generation: int,
        change: CounterChange,
        callers: Sequence[tuple[Frame, Frame]],
        passes: Passes,
    ) -> None:
        self.function = function
        self._passes = passes
        self._base = base
        self._generation = generation
        self._change = change
        self._callers = callers
        self._roots: list[weakref.ref[Any]] = []
        self.waiting: Waiting | None = None

    def note_roots(self, roots: Sequence[Any]) -> bool:
        """Note the objects from which the graph's modules are found; return True if that is
        possible."""
        try:
            self._roots = [weakref.ref(root) for root in roots]
        except TypeError:
            return False
        return True

    def is_current(self, interceptor: Interceptor) -> bool:
        """True if its plans hold."""
        return self._generation == interceptor.generation

    def has_roots(self, roots: Sequence[Any]) -> bool:
        """True if these objects lead to its modules."""
        return all(map(is_, (reference() for reference in self._roots), roots))

    def holds(self, interceptor: Interceptor) -> bool:
        """True if it can run the graph now, given that the modules are its own."""
        return self._generation == interceptor.generation and self._change.can_begin(interceptor)

    def run(self, interceptor: Interceptor, inputs: Sequence[Any]) -> Any:
        """The outputs of the graph."""
        passes, above = self._passes, interceptor.exit()
        try:
            for frame, parent in self._callers:
                frame.caller = parent
            result = self.function(*inputs)
            # Each function call matters for a model that takes microseconds.
            if passes.begun is not None:
                passes.end()
            if passes.outputs:
                passes.note_outputs(result)
            self._change.end()
            return result
        finally:
            if passes.begun is not None or passes.entered:
                passes.give_up()
            interceptor.go_to(self._base)
            interceptor.enter(above)
