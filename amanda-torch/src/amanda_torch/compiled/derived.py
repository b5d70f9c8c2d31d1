"""Counts and sums over backward operators of a captured graph, without a hook on each node.

Autograd makes the same nodes in each run of a captured graph, with consecutive numbers. In one run
a :class:`Trial` notes which operator has made which node, where the edges of the nodes lead, and,
in the backward pass that follows, which nodes gradients flow through. Where these are those that
the edges lead to, only the nodes of the graph's outputs are hooked in later runs
(:class:`DerivedGraph`). A backward pass that comes there, and that runs all it can reach, has
executed what lies behind them when it has ended: the counters of these operators are increased
then. Any other pass (one for chosen inputs, one that makes a graph, a second one, one in other
scopes) has the nodes hooked as it comes to the graph, as without all this.

Operators that use leaves keep their hooks: whose an accumulation is depends on other operators of
the iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amanda.inline import Counter, ShapeSum
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.autograd import passes
from amanda_torch.autograd.claims import KnownGradients
from amanda_torch.autograd.hooks import NodeHooks, nothing_flows
from amanda_torch.autograd.nodes import is_accumulation, trace_graph
from amanda_torch.operators.calls import tensors_of
from amanda_torch.routines import RoutineDispatcher

_sequence = _internals.node_sequence
_next_number = _internals.sequence_number

NOT_SEEN = "backward operators of captured graphs that made other nodes than before"


def _outputs(result: Any, start: int, count: int) -> Iterator[tuple[int, Any]]:
    """The nodes of a graph's outputs among those that a run has made, by number in the run."""
    seen = set()
    for output in result:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            node = output.grad_fn
            if node is not None:
                number = _sequence(node) - start
                if 0 <= number < count and number not in seen:
                    seen.add(number)
                    yield number, node


Weight = tuple[int | None, tuple[Any, Any]]
"""What a sum adds for an execution, and the shapes of its inputs and outputs."""


class Trial:
    """One run of a graph, of which the nodes are noted.

    Attributes:
        is_proven: whether a backward pass has shown that gradients flow as the edges lead.
        hooks: by the number of an operator in the graph, for each of its nodes the number in the
            run and what runs at it.
        reached: for the number of each output's node, those of the nodes that it leads to.
        types: of the nodes that lie behind the outputs, by number.
        count: nodes of the run.
        sums: what the sums have added, and for which shapes.
    """

    def __init__(self) -> None:
        self.is_proven = False
        self.hooks: dict[int, list[tuple[int, NodeHooks]]] = {}
        self.reached: dict[int, frozenset[int]] = {}
        self.types: dict[int, type] = {}
        self.count = 0
        self.sums: dict[ShapeSum, Weight] = {}
        self._start = _next_number()
        self._flowed: set[int] = set()
        self._has_ended = False
        passes.tell(self)

    def noting(
        self, number: int, function: Callable[..., Any], known: KnownGradients
    ) -> Callable[..., Any]:
        """What runs an operator and its actions, and notes its nodes.

        Args:
            number: of the operator in the graph.
            function: runs it.
            known: what is known of its gradients.
        """

        def noting(*args: Any, **kwargs: Any) -> Any:
            start = _next_number()
            result = function(*args, **kwargs)
            traced, graph = trace_graph(tensors_of(result), start), known.graph
            if (
                traced is not None
                and not traced.leaves
                and graph is not None
                and graph.hooks is not None
                and graph.form == traced.form
            ):
                numbers = [_sequence(node) - self._start for node in traced.nodes]
                self.hooks[number] = list(zip(numbers, graph.hooks, strict=True))
            return result

        return noting

    def end(self, result: Any) -> None:
        """The run has given its outputs."""
        self.count = _next_number() - self._start
        owned = {number for pairs in self.hooks.values() for number, _ in pairs}
        nodes = dict(_outputs(result, self._start, self.count))
        entries = list(nodes)
        edges: dict[int, list[int]] = {}
        # It grows while it is read.
        waiting = list(nodes.items())
        for number, node in waiting:
            edges[number] = targets = []
            for target, place in self._targets(node):
                targets.append(place)
                if place not in nodes:
                    nodes[place] = target
                    waiting.append((place, target))
        self.types = {number: type(node) for number, node in nodes.items()}
        for entry in entries:
            self.reached[entry] = _reached(entry, edges)
            nodes[entry].register_prehook(functools.partial(self._enter, entry))
        for number in owned.intersection(nodes):
            nodes[number].register_prehook(functools.partial(self._flow, number))

    def look_behind(self, nodes: Sequence[Any]) -> None:
        """See :class:`~amanda_torch.autograd.passes.AddedUp`: such a pass proves nothing."""
        self._has_ended = True

    def _targets(self, node: Any) -> Iterator[tuple[Any, int]]:
        """The nodes of the run that a node leads to, with their numbers."""
        return _targets(node, self._start, self.count)

    def _enter(self, entry: int, gradients: Sequence[Any]) -> None:
        running = passes.running()
        if nothing_flows(gradients) or running is None or not running.is_whole():
            return
        running.entered.setdefault(self._prove, set()).add(entry)

    def _flow(self, number: int, gradients: Sequence[Any]) -> None:
        if not nothing_flows(gradients):
            self._flowed.add(number)

    def _prove(self, entries: set[int]) -> None:
        """A whole pass has ended; of several the first one counts."""
        if self._has_ended:
            return
        self._has_ended = True
        owned = {number for pairs in self.hooks.values() for number, _ in pairs}
        expected = set[int]().union(*(self.reached[entry] for entry in entries))
        self.is_proven = self._flowed == expected & owned
        for number, hooks in (pair for pairs in self.hooks.values() for pair in pairs):
            for one in hooks.added() or ():
                # Its last execution was that in this pass: sizes are the same in each run.
                if number in expected and isinstance(one, ShapeSum):
                    self.sums[one] = one.weigh(one.last), one.last


def _targets(node: Any, start: int, count: int) -> Iterator[tuple[Any, int]]:
    for target, _ in node.next_functions:
        if target is not None and not is_accumulation(target):
            number = _sequence(target) - start
            if 0 <= number < count:
                yield target, number


def _reached(entry: int, edges: Mapping[int, Sequence[int]]) -> frozenset[int]:
    found = [entry]
    seen = {entry}
    # It grows while it is read.
    for number in found:
        for target in edges[number]:
            if target not in seen:
                seen.add(target)
                found.append(target)
    return frozenset(seen)


class DerivedGraph:
    """The backward operators of a graph whose executions are derived from its passes.

    Args:
        dispatcher: the driver's.
        trial: a proven one.
        wanted: numbers of operators, of which those are taken that only count.

    Attributes:
        operators: the numbers of the operators that are taken.
        hooks: by the number of a node in the run, where there is something to do.
    """

    def __init__(self, dispatcher: RoutineDispatcher, trial: Trial, wanted: Iterable[int]) -> None:
        self._dispatcher = dispatcher
        self._count = trial.count
        self._reached = trial.reached
        self._types = trial.types
        self._settled = dispatcher.settled
        self._sums = trial.sums
        self._all: dict[int, Sequence[Counter | ShapeSum]] = {}
        self._added: dict[frozenset[int], Sequence[Counter | ShapeSum]] = {}
        self.operators: set[int] = set()
        self.hooks: dict[int, NodeHooks] = {}
        for operator in wanted:
            pairs = trial.hooks.get(operator, ())
            added = {number: hooks.added() for number, hooks in pairs}
            if pairs and all(map(self._is_known, added.values())):
                self.operators.add(operator)
                self.hooks.update((number, one) for number, one in pairs if not one.is_idle)
                self._all.update((n, found) for n, found in added.items() if found)

    def _is_known(self, added: Sequence[Counter | ShapeSum] | None) -> bool:
        """Whether it is known what all executions of a backward operator add."""
        return added is not None and all(type(one) is Counter or one in self._sums for one in added)

    def is_current(self) -> bool:
        """Whether its routines are those of the present scopes."""
        return self._settled is self._dispatcher.settled

    def claim(self, result: Any, start: int) -> bool:
        """Hook the outputs of a run that has just ended.

        Args:
            start: the number of the next node, before the run.

        Returns:
            Whether it has made the nodes that it made before.
        """
        if _next_number() - start != self._count:
            self._dispatcher.not_seen(NOT_SEEN, len(self.hooks))
            return False
        run, native = DerivedRun(self, start), self._dispatcher.native
        passes.tell(run)
        for number, node in _outputs(result, start, self._count):
            if number in self._reached:
                enter = functools.partial(run.enter, number)
                native.attach(node, enter, False) if native else node.register_prehook(enter)
        return True

    def may_add(self) -> bool:
        """Whether what the pass that runs now executes may be added up at its end."""
        return (
            self.is_current()
            and not torch.is_grad_enabled()
            and self._dispatcher.is_plain_thread(vars(STATE))
        )

    def add(self, entries: set[int]) -> None:
        """Count all backward operators that lie behind these outputs."""
        key = frozenset(entries)
        added = self._added.get(key)
        if added is None:
            reached = set[int]().union(*(self._reached[entry] for entry in key))
            added = self._added[key] = [
                one for number, found in self._all.items() if number in reached for one in found
            ]
        TOOL_LOCK.hold(self._increase, added)

    def _increase(self, added: Sequence[Counter | ShapeSum]) -> None:
        sums = self._sums
        for one in added:
            if type(one) is Counter:
                one.count += 1
            else:
                one.add(*sums[one])  # type: ignore[index,union-attr]

    def targets(self, node: Any, start: int) -> Iterator[tuple[Any, int]]:
        """The nodes of a run that a node leads to, with their numbers."""
        return _targets(node, start, self._count)

    def is_output(self, number: int) -> bool:
        """Whether a node is that of an output."""
        return number in self._reached

    def has_made(self, node: Any, number: int) -> bool:
        """Whether a node seems to be that of a number: each thread has numbers of its own."""
        return self._types.get(number) is type(node)


class DerivedRun:
    """One run of a graph, which the hooks on its outputs hold.

    Args:
        graph: what is known of all runs.
        start: the number of its first node.
    """

    __slots__ = ("__weakref__", "_graph", "_has_run", "_hooked", "_start")

    def __init__(self, graph: DerivedGraph, start: int) -> None:
        self._graph = graph
        self._start = start
        self._has_run = False
        # The nodes that have hooks of their own.
        self._hooked: set[int] | None = None

    def enter(self, entry: int, gradients: tuple[Any, ...]) -> Any:
        """Prehook of an output's node: a pass comes to the graph."""
        if nothing_flows(gradients):
            return None
        running, graph = passes.running(), self._graph
        if running is not None and self._hooked is None:
            entered = running.entered.get(self._add)
            if entered is not None:
                entered.add(entry)
                return None
            if not self._has_run and running.is_whole() and graph.may_add():
                # Not at its end: one that raises leaves nodes that cannot run again.
                self._has_run = True
                running.entered[self._add] = {entry}
                return None
        if self._hooked is None:
            self._hooked = set()
        hooks = graph.hooks.get(entry)
        if entry not in self._hooked:
            self._hook(entry, hooks, self._hooked)
        return hooks.before(gradients) if hooks is not None and hooks.has_before else None

    def _add(self, entries: set[int]) -> None:
        self._graph.add(entries)

    def _hook(self, entry: int, hooks: NodeHooks | None, hooked: set[int]) -> None:
        """Hook what lies behind the node that runs now, and the end of that node."""
        hooked.add(entry)
        node = _internals.current_node()
        if hooks is not None and hooks.has_after:
            node.register_hook(hooks.after)
        self._hook_behind([node], hooked)

    def look_behind(self, nodes: Sequence[Any]) -> None:
        """See :class:`~amanda_torch.autograd.passes.AddedUp`."""
        if self._hooked is None:
            self._hooked = set()
        found = list(nodes)
        seen = set(found)
        # It grows while it is read.
        for node in found:
            following = [target for target, _ in node.next_functions if target is not None]
            new = [target for target in dict.fromkeys(following) if target not in seen]
            seen.update(new)
            found += new
        graph, hooked = self._graph, self._hooked
        for node in found:
            number = -1 if is_accumulation(node) else _sequence(node) - self._start
            if graph.has_made(node, number):
                self._register(node, number, hooked)

    def _hook_behind(self, nodes: list[Any], hooked: set[int]) -> None:
        seen = set()
        # It grows while it is read.
        for node in nodes:
            for target, number in self._graph.targets(node, self._start):
                if number not in seen:
                    seen.add(number)
                    nodes.append(target)
                    self._register(target, number, hooked)

    def _register(self, node: Any, number: int, hooked: set[int]) -> None:
        """Hook a node that has no hooks yet; that of an output is as a pass comes to it."""
        hooks = self._graph.hooks.get(number)
        if hooks is not None and number not in hooked and not self._graph.is_output(number):
            hooked.add(number)
            hooks.register(node)
