"""Runs a captured graph at one place, once all of its operators are known.

A place is a module call, and the position in an iteration that the counters of its operators say::

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
        counts: of an operator's cell before and after the run, where they differ.
        calls: of a module, likewise.
        begins: the module whose call begins an iteration at once: then no count before matters.
        is_outside: whether it is in no module call: a module called in it may begin an iteration.
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
            has_restarted: whether an iteration has begun within it: a counter may then be what it
                was before and have counted.
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
        """True if a run that begins now does the same."""
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
        """Set the counters to those after the run."""
        for cell, _, count in self._counts:
            cell[0] = count
        for child, _, calls in self._calls:
            child.calls = calls


@attrs.define
class Waiting:
    """A graph whose backward operators have yet to be analysed.

    Attributes:
        steps: what its calls have done.
        runs: since it has waited.
    """

    steps: Sequence[Any]
    runs: int


class BoundGraph:
    """Runs a graph in one module call, with what is known of its operators.

    Args:
        function: the graph's code.
        base: the module call that runs it.
        generation: of the plans that are bound.
        callers: each module call of the graph, and the one that it returns to.
        passes: tells tools of the forward passes in the graph.

    Attributes:
        waiting: what is to be compiled once all is known of its backward operators.
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
        """Note the objects by which the graph's modules are found; whether that can be done."""
        try:
            self._roots = [weakref.ref(root) for root in roots]
        except TypeError:
            return False
        return True

    def is_current(self, interceptor: Interceptor) -> bool:
        """True if its plans hold."""
        return self._generation == interceptor.generation

    def has_roots(self, roots: Sequence[Any]) -> bool:
        """True if its modules are found by these objects."""
        return all(map(is_, (reference() for reference in self._roots), roots))

    def holds(self, interceptor: Interceptor) -> bool:
        """True if it can run the graph now, of which the modules are its own."""
        return self._generation == interceptor.generation and self._change.can_begin(interceptor)

    def run(self, interceptor: Interceptor, inputs: Sequence[Any]) -> Any:
        """The outputs of the graph."""
        passes, above = self._passes, interceptor.exit()
        try:
            for frame, parent in self._callers:
                frame.caller = parent
            result = self.function(*inputs)
            # Where a model takes microseconds, each function that is called is seen.
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
