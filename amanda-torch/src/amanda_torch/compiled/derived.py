"""Counts and sums over backward operators of a captured graph, without a hook on each node.

Autograd makes the same nodes in each run of a captured graph, with consecutive numbers. In one run
a :class:`Trial` notes which operator has made which node, where the edges of the nodes lead, and,
in the backward pass that follows, which nodes gradients flow through. Where these are those that
the edges lead to, only the nodes of the graph's outputs are hooked in later runs
(:class:`DerivedGraph`). A backward pass that comes there, and that runs all it can reach, has
executed what lies behind them when it has ended: the counters of these operators are increased
then. Any other pass (one for chosen inputs, one that makes a graph, a second one, one in other
scopes) has the nodes hooked as it comes to the graph, as without all this.

An accumulation belongs to the operator that used its leaf first in the iteration, in whichever
graph. Those of parameters are counted like the rest as long as nothing outside of the graph has to
know of them: see :mod:`amanda_torch.compiled.derived_leaves`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amanda.inline import Counter, ShapeSum
from amanda.references import Reference, nothing
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.autograd import passes
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import Accumulation, Inlined, NodeHooks, nothing_flows
from amanda_torch.autograd.nodes import is_accumulation, trace_graph
from amanda_torch.compiled.deferred import Additions, StaticSum
from amanda_torch.compiled.derived_leaves import Leaf, Leaves, LeavesRun
from amanda_torch.compiled.derived_times import NodeTimers
from amanda_torch.operators.calls import tensors_of
from amanda_torch.routines import Measure, RoutineDispatcher

_sequence = _internals.node_sequence
_next_number = _internals.sequence_number

MOST_LOST = 1
"""Passes that had to hook the nodes of a graph, since others use its parameters with hooks between
its runs and its passes, until its operators are hooked at once."""

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


Added = Sequence[Counter | ShapeSum]
"""The counters and sums that executions add to."""

Weight = tuple[int | None, tuple[Any, Any]]
"""The amount that a sum adds for an execution, and the shapes of its inputs and outputs."""


class Trial:
    """One run of a graph, of which the nodes are noted.

    Args:
        claimer: that of the thread that runs it.
        inputs: of the graph.

    Attributes:
        is_proven: whether a backward pass has shown that gradients flow as the edges lead.
        claimer: see above.
        hooks: by the number of an operator in the graph, for each of its nodes the number in the
            run and what runs at it.
        reached: for the number of each output's node, those of the nodes that it leads to.
        types: of the nodes that lie behind the outputs, by number.
        count: nodes of the run.
        sums: what the sums have added, and for which shapes.
        leaves: the parameters whose accumulations operators of the graph own, by identity.
        used: by the number of a node, the identities of the leaves that its edges lead to.
        edges: by the number of a node, where its edges lead: to the number of a node, or to a leaf,
            whose identity is negative here; None for what is not of the run.
    """

    def __init__(self, claimer: Claimer, inputs: Sequence[Any]) -> None:
        self.is_proven = False
        self.claimer = claimer
        self.hooks: dict[int, list[tuple[int, NodeHooks]]] = {}
        self.reached: dict[int, frozenset[int]] = {}
        self.types: dict[int, type] = {}
        self.count = 0
        self.sums: dict[ShapeSum, Weight] = {}
        self.leaves: dict[int, Leaf] = {}
        self.used: dict[int, list[int]] = {}
        self.edges: dict[int, list[int | None]] = {}
        self._indices = {id(x): i for i, x in enumerate(inputs) if type(x) is nn.Parameter}
        self._start = _next_number()
        self._flowed: set[int] = set()
        self._has_ended = False
        self._watched: list[Any] = []
        self._ran: dict[str, Any] = {}
        self._met: set[int] = set()
        passes.tell(self)

    def noting(
        self, number: int, function: Callable[..., Any], known: KnownGradients
    ) -> Callable[..., Any]:
        """A function that runs an operator with its actions, and notes its autograd nodes.

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
                and graph is not None
                and graph.hooks is not None
                and graph.form == traced.form
                and self._note_leaves(traced.leaves, known)
            ):
                numbers = [_sequence(node) - self._start for node in traced.nodes]
                self.hooks[number] = list(zip(numbers, graph.hooks, strict=True))
            return result

        return noting

    def _note_leaves(self, accumulations: Sequence[Any], known: KnownGradients) -> bool:
        """Note the leaves that an operator owns; whether all that it uses are parameters."""
        number, variables = 0, [node.variable for node in accumulations]
        if not all(id(variable) in self._indices for variable in variables):
            return False
        for variable in variables:
            if self.claimer.owner_of(variable) == known.handle.op_id:
                key = id(variable)
                self.leaves[key] = Leaf(
                    Reference(variable, nothing), self._indices[key], known, number
                )
                number += 1
        return True

    def end(self, result: Any) -> None:
        """The run has given its outputs."""
        self.count = _next_number() - self._start
        iterations = self.claimer.iterations
        self._ran = {leaf.op_id: iterations.get(leaf.op_id) for leaf in self.leaves.values()}
        owned = {number for pairs in self.hooks.values() for number, _ in pairs}
        nodes = dict(_outputs(result, self._start, self.count))
        entries = list(nodes)
        # It grows while it is read.
        waiting = list(nodes.items())
        for number, node in waiting:
            self.edges[number] = found = []
            for target, _ in node.next_functions:
                place = self._place(target, number)
                found.append(place)
                if place is not None and place >= 0 and place not in nodes:
                    nodes[place] = target
                    waiting.append((place, target))
        self.types = {number: type(node) for number, node in nodes.items()}
        for entry in entries:
            self.reached[entry] = _reached(entry, self.edges)
            nodes[entry].register_prehook(functools.partial(self._enter, entry))
        for number in owned.intersection(nodes):
            nodes[number].register_prehook(functools.partial(self._flow, number))

    def _place(self, target: Any, number: int) -> int | None:
        """The target of an edge in the numbering of :attr:`edges`.

        Args:
            target: the node there.
            number: of the node that it is an edge of.
        """
        if target is None:
            return None
        if not is_accumulation(target):
            place = _sequence(target) - self._start
            return place if 0 <= place < self.count else None
        key = id(target.variable)
        if key in self.leaves and key not in self._met:
            flow = functools.partial(self._flow, -key)
            self._watched.append(target.register_prehook(flow))
            self._met.add(key)
        self.used.setdefault(number, []).append(key)
        return -key

    def look_behind(self, nodes: Sequence[Any]) -> None:
        """See :class:`~amanda_torch.autograd.passes.AddedUp`: such a pass proves nothing."""
        self._has_ended = True

    def _enter(self, entry: int, gradients: Sequence[Any]) -> None:
        running = passes.running()
        if nothing_flows(gradients) or running is None or not running.is_whole():
            return
        running.entered.setdefault(self._prove, set()).add(entry)

    def _flow(self, number: int, gradients: Sequence[Any]) -> None:
        if not nothing_flows(gradients):
            self._flowed.add(number)

    def _prove(self, entries: set[int], _: set[int]) -> None:
        """A whole pass has ended; of several the first one counts."""
        if self._has_ended:
            return
        self._has_ended = True
        self.forget_leaves()
        owned = {number for pairs in self.hooks.values() for number, _ in pairs}
        expected = set[int]().union(*(self.reached[entry] for entry in entries))
        leaves = {key for number in expected for key in self.used.get(number, ())}
        leaves.intersection_update(self.leaves)
        flowing = expected & owned | {-key for key in leaves}
        self.is_proven = self._flowed == flowing
        found = [pair for pairs in self.hooks.values() for pair in pairs]
        every = [hooks for number, hooks in found if number in expected]
        every += [hooks for key in leaves if (hooks := self._hooks_of(key)) is not None]
        for hooks in every:
            inlined = hooks.inlined()
            for one in () if inlined is None else inlined.added:
                # Its last execution was that in this pass: sizes are the same in each run.
                if isinstance(one, ShapeSum):
                    self.sums[one] = one.weigh(one.last), one.last
        iterations = self.claimer.iterations
        if any(iterations.get(op_id) != iteration for op_id, iteration in self._ran.items()):
            # A cell that is called in a loop, for instance: each pass would have to hook the nodes.
            self.leaves = {}

    def _hooks_of(self, key: int) -> NodeHooks | None:
        return self.leaves[key].hooks(self.claimer)

    def forget_leaves(self) -> None:
        """Take off what watches accumulations, which may live longer than the run's graph."""
        watched, self._watched = self._watched, []
        for handle in watched:
            handle.remove()


def _targets(node: Any, start: int, count: int) -> Iterator[tuple[Any, int]]:
    for target, _ in node.next_functions:
        if target is not None and not is_accumulation(target):
            number = _sequence(target) - start
            if 0 <= number < count:
                yield target, number


def _reached(entry: int, edges: Mapping[int, Sequence[int | None]]) -> frozenset[int]:
    found = [entry]
    seen = {entry}
    # It grows while it is read.
    for number in found:
        for target in edges[number]:
            if target is not None and target >= 0 and target not in seen:
                seen.add(target)
                found.append(target)
    return frozenset(seen)


def _way(trial: Trial, wanted: Mapping[int, Leaf]) -> list[tuple[int, int, int | None]]:
    """The way from the nodes of the outputs to leaves, see :class:`Leaves`."""
    places: dict[int, int] = {number: place for place, number in enumerate(sorted(trial.reached))}
    waiting, steps = list(places), []
    # It grows while it is read.
    for number in waiting:
        for edge, target in enumerate(trial.edges[number]):
            if target is None or target in places or (target < 0 and -target not in wanted):
                continue
            places[target] = len(places)
            steps.append((number, edge, target))
            if target >= 0:
                waiting.append(target)
    # Nodes that lead to no leaf are left out.
    needed = {target for _, _, target in steps if target < 0}
    for number, _, target in reversed(steps):
        if target in needed:
            needed.add(number)
    place_of = {number: place for place, number in enumerate(sorted(trial.reached))}
    way: list[tuple[int, int, int | None]] = []
    for number, edge, target in steps:
        if target in needed:
            place_of[target] = len(place_of)
            way.append((place_of[number], edge, -target if target < 0 else None))
    return way


def _at_leaves(claimer: Claimer, leaves: Mapping[int, Leaf]) -> Iterator[tuple[int, Inlined]]:
    """The routines at the accumulations of leaves, by the identity of the leaf."""
    for key, leaf in leaves.items():
        hooks = leaf.hooks(claimer)
        yield key, (hooks.inlined() if hooks is not None else None) or Inlined()


class DerivedGraph:
    """The backward operators of a graph whose executions are derived from its passes.

    Args:
        dispatcher: the driver's.
        trial: a proven one.
        wanted: numbers of operators, of which those are taken that only count.

    Attributes:
        operators: the numbers of the operators that are taken.
        hooks: by the number of a node in the run, where there is something to do.
        leaves: the leaves that these operators use; None if there are none.
        lost: passes that had to hook the nodes because of others.
        times: what measures the nodes and the accumulations; None if there is nothing.
    """

    def __init__(self, dispatcher: RoutineDispatcher, trial: Trial, wanted: Iterable[int]) -> None:
        self._dispatcher = dispatcher
        self._count = trial.count
        self._reached = trial.reached
        self._types = trial.types
        self._settled = dispatcher.settled
        self._sums = trial.sums
        self._all: dict[int, Added] = {}
        measures: dict[int, tuple[Measure, ...]] = {}
        self._added: dict[frozenset[int], tuple[Added, frozenset[int], Additions]] = {}
        self.operators: set[int] = set()
        self.hooks: dict[int, NodeHooks] = {}
        for operator in wanted:
            pairs = trial.hooks.get(operator, ())
            found = [(number, hooks.inlined()) for number, hooks in pairs]
            if pairs and all(self._is_known(inlined) for _, inlined in found):
                self.operators.add(operator)
                self._all.update((n, one.added) for n, one in found if one and one.added)
                measures.update((n, one.measures) for n, one in found if one and one.measures)
        leaves = self._choose(trial)
        for operator in self.operators:
            self.hooks.update((n, one) for n, one in trial.hooks[operator] if not one.is_idle)
        self._all = {number: found for number, found in self._all.items() if number in self.hooks}
        self.lost = 0
        self.leaves: Leaves | None = None
        if leaves:
            self.leaves = Leaves(trial.claimer, leaves, trial.used, _way(trial, leaves))
        measures = {number: found for number, found in measures.items() if number in self.hooks}
        for key, inlined in _at_leaves(trial.claimer, leaves):
            if self.leaves is not None:
                self.leaves.added[key] = inlined.added
            if inlined.measures:
                measures[-key] = inlined.measures
        self.times: NodeTimers | None = None
        if measures:
            self.times = NodeTimers(dispatcher.native, measures, trial.edges, trial.reached)

    def _choose(self, trial: Trial) -> Mapping[int, Leaf]:
        """Leave out operators that use leaves which others than those that are left use as well;
        the leaves of those that are left."""
        made_by = {n: operator for operator, pairs in trial.hooks.items() for n, _ in pairs}
        users: dict[int, set[int]] = {}
        for number, keys in trial.used.items():
            for key in keys:
                users.setdefault(key, set()).add(made_by.get(number, -1))
        ids = {
            hooks.op_id: operator for operator, pairs in trial.hooks.items() for _, hooks in pairs
        }

        def is_taken(key: int) -> bool:
            leaf = trial.leaves.get(key)
            hooks = leaf.hooks(trial.claimer) if leaf is not None else None
            if leaf is None or hooks is None or not self._is_known(hooks.inlined()):
                return False
            return {*users[key], ids.get(leaf.op_id, -1)} <= self.operators

        left = dict(users)
        while refused := [key for key in left if not is_taken(key)]:
            for key in refused:
                self.operators -= left.pop(key)
        return {key: trial.leaves[key] for key in left}

    def _is_known(self, inlined: Inlined | None) -> bool:
        """Whether it is known what all executions of a backward operator add, and they can be timed
        without hooks."""
        if inlined is None or not NodeTimers.can_time(self._dispatcher.native, inlined.measures):
            return False
        return all(type(one) is Counter or one in self._sums for one in inlined.added)

    def is_current(self) -> bool:
        """Whether its routines are those of the present scopes."""
        return self._settled is self._dispatcher.settled

    def can_run(self, inputs: Sequence[Any]) -> bool:
        """Whether a run with these inputs may leave its nodes unhooked."""
        if not self.is_current() or self.lost > MOST_LOST:
            return False
        return self.leaves is None or self.leaves.can_run(inputs)

    def claim(self, result: Any, start: int, iteration: int) -> bool:
        """Hook the outputs of a run that has just ended.

        Args:
            start: the number of the next node, before the run.
            iteration: that of its thread.

        Returns:
            Whether it has made the nodes that it made before.
        """
        nodes = dict(_outputs(result, start, self._count))
        if _next_number() - start != self._count or nodes.keys() != self._reached.keys():
            self._dispatcher.not_seen(NOT_SEEN, len(self.hooks))
            return False
        run, native = DerivedRun(self, start), self._dispatcher.native
        passes.tell(run)
        for number, node in nodes.items():
            enter = functools.partial(run.enter, number)
            native.attach(node, enter, False) if native else node.register_prehook(enter)
        if self.leaves is not None:
            outputs = [nodes[number] for number in sorted(nodes)]
            run.note_marks(self.leaves.note_run(run, iteration, outputs))
        return True

    def may_add(self) -> bool:
        """Whether the executions of the running pass may be added up at its end."""
        return (
            self.is_current()
            and not torch.is_grad_enabled()
            and self._dispatcher.is_plain_thread(vars(STATE))
        )

    def add(self, entries: set[int], counted: set[int]) -> None:
        """Count all backward operators that lie behind these outputs.

        Args:
            counted: see :attr:`~amanda_torch.autograd.passes.BackwardPass.counted`; to be added to.
        """
        key = frozenset(entries)
        added = self._added.get(key)
        if added is None:
            added = self._added[key] = self._find_added(key)
        nodes, leaves, every = added
        if counted and leaves:
            of_leaf = self.leaves.added if self.leaves is not None else {}
            left = (one for leaf in leaves - counted for one in of_leaf.get(leaf, ()))
            every = self._additions([*nodes, *left])
        counted |= leaves
        TOOL_LOCK.hold(every.add)

    def _find_added(self, entries: Iterable[int]) -> tuple[Added, frozenset[int], Additions]:
        """What the nodes behind some outputs add, their leaves, and what both add together."""
        reached = self.reached(entries)
        nodes = [one for number, found in self._all.items() if number in reached for one in found]
        if self.leaves is None:
            return nodes, frozenset(), self._additions(nodes)
        used, of_leaf = self.leaves.used, self.leaves.added
        leaves = frozenset(leaf for number in reached for leaf in used.get(number, ()))
        every = [*nodes, *(one for leaf in leaves for one in of_leaf.get(leaf, ()))]
        return nodes, leaves, self._additions(every)

    def _additions(self, added: Iterable[Counter | ShapeSum]) -> Additions:
        sums = self._sums
        return Additions(
            StaticSum(one, sums[one]) if isinstance(one, ShapeSum) else one for one in added
        )

    def targets(self, node: Any, start: int) -> Iterator[tuple[Any, int]]:
        """The nodes of a run that a node leads to, with their numbers."""
        return _targets(node, start, self._count)

    def reached(self, entries: Iterable[int]) -> set[int]:
        """The numbers of the nodes behind some outputs."""
        return set[int]().union(*(self._reached[entry] for entry in entries))

    def is_behind(self, entry: int, entries: Iterable[int]) -> bool:
        """Whether the node of an output lies behind another one of these."""
        return any(entry in self._reached[one] for one in entries)

    def is_output(self, number: int) -> bool:
        """Whether a node is that of an output."""
        return number in self._reached

    def has_made(self, node: Any, number: int) -> bool:
        """Whether a node seems to be that of a number: each thread has numbers of its own."""
        return self._types.get(number) is type(node)

    def claim_leaves(self, node: Any) -> Mapping[int, Sequence[Accumulation]]:
        """Hook the leaves that a node leads to; returns the listeners for passes, by identity."""
        leaves = self.leaves
        if leaves is None:
            return {}
        targets = [target for target, _ in node.next_functions if target is not None]
        found = {id(t.variable): t for t in targets if is_accumulation(t)}
        return {key: leaves.claim(target, key) for key, target in found.items()}


class DerivedRun(LeavesRun):
    """One run of a graph, which the hooks on its outputs hold.

    Args:
        graph: what is known of all runs.
        start: the number of its first node.
    """

    __slots__ = ("_graph", "_has_run", "_hooked", "_start", "_timed")

    def __init__(self, graph: DerivedGraph, start: int) -> None:
        super().__init__(graph)
        self._graph = graph
        self._start = start
        self._has_run = False
        self._timed: Any = None
        # The nodes that have hooks of their own.
        self._hooked: set[int] | None = None

    def enter(self, entry: int, gradients: tuple[Any, ...]) -> Any:
        """Prehook of an output's node: a pass comes to the graph."""
        if gradients and gradients[0] is None and nothing_flows(gradients):
            return None
        running = passes.running()
        if running is not None and self._hooked is None:
            entered = running.entered.get(self._add)
            if entered is not None:
                if self._time(running, entry, entered):
                    entered.add(entry)
                    return None
                self._hooked = self._graph.reached(entered)
            elif not self._has_run and running.is_whole() and self._may_add():
                # Not at its end: one that raises leaves nodes that cannot run again.
                self._has_run = True
                if self._time(running, entry, ()):
                    self._graph.lost = 0
                    running.entered[self._add] = {entry}
                    for key, reached in self._marks:
                        self._tell({key: reached}, gradients)
                    return None
        if self._hooked is None:
            self._hooked = set()
        hooks = self._graph.hooks.get(entry)
        if entry not in self._hooked:
            self._hook(entry, hooks, self._hooked)
        self._tell(self._leaves_behind(_internals.current_node()), gradients)
        return hooks.before(gradients) if hooks is not None and hooks.has_before else None

    def _time(self, running: passes.BackwardPass, entry: int, entered: Collection[int]) -> bool:
        """Time the nodes behind an output in the pass that comes there; False if this is
        impossible.

        Args:
            entered: the outputs to which the pass has come before.
        """
        times = self._graph.times
        if times is None:
            return True
        if self._graph.is_behind(entry, entered):
            way = times.end_of_way(entry)
        else:
            way = times.way(entry, times.leaves & running.counted.union(dict(self._marks)))
        timed = times.begin(way, self._start, self._timed)
        if timed is None:
            self._graph.lost += 1
            return False
        running.timed_leaves |= way.leaves
        if self._timed is None:
            self._timed = timed
            running.timed.append(timed)
        return True

    def _leaves_behind(self, node: Any) -> Mapping[int, Sequence[Accumulation]]:
        """Hook the leaves that lie behind a node."""
        if self._graph.leaves is None:
            return {}
        self._graph.leaves.touch()
        nodes, seen = [node], set[int]()
        found = dict(self._graph.claim_leaves(node))
        # It grows while it is read.
        for one in nodes:
            for target, number in self._graph.targets(one, self._start):
                if number not in seen:
                    seen.add(number)
                    nodes.append(target)
                    found.update(self._graph.claim_leaves(target))
        return found

    def _add(self, entries: set[int], counted: set[int]) -> None:
        self._graph.add(entries, counted)

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
                if reached := graph.claim_leaves(node):
                    node.register_prehook(functools.partial(self._tell, reached))

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
