"""The instrumented copies of one session's graph, and the runs that they are made for.

Most runs use one copy, which a session of its own runs, the shadow. It grows with what the program
runs: a run adds the operators that it needs. As long as no tool has anything to do in them, the
vanilla graph runs. After that the shadow runs, and the variables move there; they move back when
the program runs outside of the scope, and when the scope ends. A run that needs state of another
kind than variables becomes a function in the user's session
(:mod:`amanda_tensorflow.session.stateful_runs`). Where tools are told of modules, each run has
operators of its own in the shadow: which modules it enters depends on what it fetches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from amanda.errors import AmandaError
from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.executions import Executions
from amanda_tensorflow.graphs.instrument import Instrument
from amanda_tensorflow.graphs.known_graphs import GraphIds
from amanda_tensorflow.graphs.module_marks import calls_modules
from amanda_tensorflow.graphs.passes import RunningModules
from amanda_tensorflow.graphs.random_state import first_seeded, is_seeded
from amanda_tensorflow.graphs.replay import Replay
from amanda_tensorflow.graphs.running_vanilla import NotInstrumentableError, falling_back
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.graphs.topological_order import ordered
from amanda_tensorflow.operators.types import CALLS, CONTROL_FLOW
from amanda_tensorflow.operators.variables import VARIABLES
from amanda_tensorflow.session.random_ops import can_be_shared, draws_from
from amanda_tensorflow.session.run_kinds import RunKind, kind_of
from amanda_tensorflow.session.runs import Key, SessionRun, is_handle
from amanda_tensorflow.session.stateful_runs import InlineFunction, needs_inline
from amanda_tensorflow.session.variable_copies import VariableOps, Variables, variables_in

Made = SessionRun | InlineFunction
"""A run in terms of the shadow, or the function for it in the user's session."""


@attrs.define(eq=False)
class Prepared:
    """A run that has been prepared.

    Attributes:
        made: the copy that runs instead of the user's graph; None if there can be none.
        executions: counts the runs; None if there is nothing to count.
        modules: reports the modules that it enters; None if they are not reported.
        kind: the kind of run; None if no tool has a routine at passes.
    """

    made: Made | None
    executions: Executions | None
    modules: RunningModules | None = None
    kind: RunKind | None = None


class SessionCopies:
    """The instrumented copies of one session's graph for some scopes.

    Attributes:
        graph: the shadow's graph.
        building: what was inserted there.
        keys: the keys of the operators in all copies.
    """

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        ids: GraphIds,
        session: Any,
        scopes: tuple[LiveScope, ...],
    ) -> None:
        self._dispatcher = dispatcher
        self._graph_ids = ids
        self._user = session
        self._vanilla = Variables(session, VariableOps.found)
        self._ids = ids.ids_of(session.graph, "graph", {})
        self._prepared: dict[tuple[Key, int], Prepared] = {}
        self.keys: list[str] = []
        self.graph = _internals.shadow_graph(session.graph)
        self.building = Building(self.graph, scopes, needs_gradient=False, takes_feeds=True)
        self._instrument = self._making(self.graph, self.building)
        self._apart: dict[str, str] = {}
        self._replay = Replay(self.graph, self._instrument, draws_from(session, self._apart))
        self._site = OpSite(session.graph, self._ids, ids.layer_ids(session.graph))
        self._session: Any = None
        self._variables: Variables | None = None
        self._here: set[str] = set()
        self._size = 0
        self._version = 0
        self._running: dict[str, tuple[Any, int]] = {}
        # A thread that detaches the driver and one whose scope ends may close it at once: both
        # return when the variables are back. No code of tools runs under it.
        self._moving = threading.RLock()
        # Held while operators are added to the shadow: the runtime is to see none of them before
        # it is complete, whichever thread runs the shadow meanwhile.
        self._growing = threading.RLock()
        self._process = os.getpid()

    def _making(self, graph: Any, building: Building) -> Instrument:
        """Return the instrument that adds operators to a copy."""
        read = self._read_variable
        instrument = Instrument(self._dispatcher, building, self._graph_ids, read)
        instrument.keys, instrument.write = self.keys, self._change_variable
        return instrument

    def _read_variable(self, op: Any, dtype: Any) -> Any:
        """The value of a variable of the user's session; None if it has none."""
        if isinstance(op, _internals.EagerTensor):
            return None
        self.leave([op.name])
        value = self._vanilla.read([op.name]).get(op.name)
        with _internals.eager_mode():
            return None if value is None else tf.constant(value)

    def _change_variable(self, name: str, function: Callable[[Any], Any]) -> None:
        """Write a variable of the user's session.

        Raises:
            AmandaError: it has no value, or no initializer to write it by.
        """
        self.leave()
        value = self._vanilla.read([name]).get(name)
        if value is None or self._vanilla.ops(name).assign is None:
            raise AmandaError(f"variable {name} has no value, or no initializer to write it by")
        with _internals.eager_mode():
            new = np.asarray(function(tf.constant(value)))
        self._vanilla.write({name: new})

    # -- while a run is prepared ------------------------------------------

    def prepared(self, key: Key) -> Prepared | None:
        """The prepared run of this key, unless the user has added to the graph since."""
        return self._prepared.get((key, _internals.own_version(self._user.graph)))

    def prepare(self, key: Key, run: SessionRun) -> Prepared:
        """Make what runs instead of a run of the user's graph."""
        # Read first: an inline function adds a node to the graph, which is not the user's.
        version = _internals.own_version(self._user.graph)
        operations = ordered(OpSite(self._user.graph, self._ids), run.roots())
        points = self._dispatcher.points
        if self.building.modules is None and points.wants_modules(self.building.scopes):
            self.building.modules = RunningModules(points)
        made: Made | None = None
        executions = None
        with self._growing, falling_back(self._dispatcher, self.building, f"a run of {self._ids}"):
            inline = needs_inline(operations) or any(is_handle(value) for _, value in run.feeds)
            copied: Made
            if inline:
                copied, counting = self._inlined(run)
            elif self._tells_modules(run):
                copied, counting = self._added_apart(run, operations)
            else:
                copied, counting = self._added(run)
            unshared = self._unshared(operations)
            if unshared and self._acts_in(copied):
                raise NotInstrumentableError(f"{unshared}: a copy of it would draw other numbers")
            # A later run may change the shadow, on which this one would draw other numbers, too.
            made, executions = None if unshared else copied, counting
        if made is None:
            self.building.take_controls()
        modules = None if made is None else self.building.modules
        prepared = self._prepared[key, version] = Prepared(made, executions, modules)
        return prepared

    def _acts_in(self, made: Made) -> bool:
        """True if a run is executed by a copy."""
        return made.is_inserted if isinstance(made, InlineFunction) else self.building.is_changed

    def _unshared(self, operations: Sequence[Any]) -> str | None:
        """Explain a random operator whose generator a copy cannot share; None if there is none.

        Args:
            operations: the operators that the run needs.
        """
        for op in operations:
            if is_seeded(op) and not can_be_shared(op):
                return f"{op.name} draws random numbers by a seed and waits for other operators"
            if op.name in self._apart:
                return (
                    f"{self._apart[op.name]} draws random numbers by a seed in a function that the "
                    "graph calls"
                )
        inside = first_seeded(operations, only_in_bodies=True)
        if inside is None:
            return None
        return f"{inside.name} draws random numbers by a seed in a loop or branch"

    def _added(self, run: SessionRun) -> tuple[SessionRun, Executions | None]:
        """The run in terms of the shadow, to which the operators that it needs are added."""
        roots = [op for op in run.roots() if op.name not in self._site.ops]
        with self._instrument.building_copy():
            if roots:
                self._site.refresh(run.fetches)
                self._replay.body(self._site, roots)
                self._instrument.warn(self._ids)
            made = self._translated(run, self._site, self._replay)
        return made, Executions.of(self.building, *_extent(made))

    def _tells_modules(self, run: SessionRun) -> bool:
        """True if the modules that a run enters are reported: building them enters none."""
        if self.building.modules is None or not calls_modules(self._user.graph):
            return False
        return kind_of(run) != "setup"

    def _added_apart(
        self, run: SessionRun, operations: Sequence[Any]
    ) -> tuple[SessionRun, Executions | None]:
        """The run in terms of operators of its own in the shadow, with marks at modules.

        Args:
            operations: the operators that the run needs.
        """
        shared, building = self._site, self.building
        instrument = self._making(self.graph, building)
        variables = [op for op in operations if op.type in VARIABLES]
        with instrument.building_copy():
            self._replay.body(shared, [op for op in variables if op.name not in shared.ops])
            site = OpSite(self._user.graph, self._ids, self._graph_ids.layer_ids(self._user.graph))
            site.refresh(run.fetches)
            for op in variables:
                site.ops[op.name] = shared.ops[op.name]
                for old in op.outputs:
                    site.tensors[id(old)] = shared.tensors[id(old)]
            replay = Replay(self.graph, instrument, draws_from(self._user, self._apart))
            replay.body(site, [op for op in run.roots() if op.name not in site.ops])
            instrument.warn(self._ids)
            made = self._translated(run, site, replay)
            roots, fed = _extent(made)
            last = replay.module_marks(site, roots, fed)
            building.segments.clear()
        if last is not None:
            made = attrs.evolve(made, targets=[*made.targets, last])
        return made, Executions.of(building, *_extent(made))

    def _translated(self, run: SessionRun, site: OpSite, replay: Replay) -> SessionRun:
        """A run of the user's graph in terms of a site in the shadow."""
        final = replay.final
        with self.graph.as_default():
            fetches = [final(site, tensor) for tensor in run.fetches]
            targets = [new for op in run.targets for new in site.controls(op)]
            feeds = [(final(site, tensor), value) for tensor, value in run.feeds]
            return SessionRun(
                feeds,
                fetches,
                [*targets, *self.building.late_nodes(fetches)],
                _read_by_gradients(site, run, feeds),
            )

    def _inlined(self, run: SessionRun) -> tuple[InlineFunction, Executions | None]:
        """The function for a run; the user's graph gets a node for it if tools act in it."""
        site = OpSite(self._user.graph, self._ids, fetched=run.fetches)
        scopes, found = self.building.scopes, []

        def make(graph: Any) -> Instrument:
            found.append(Building(graph, scopes, needs_gradient=False))
            found[0].modules = self.building.modules if self._tells_modules(run) else None
            return self._making(graph, found[0])

        inline = InlineFunction(self._user, site, make, self._apart)
        inline.build(run)
        if found[0].is_changed:
            # Its routines live and end with those of the shadow.
            self.building.routines += found[0].routines
            inline.insert()
        return inline, Executions.of_function(found[0])

    # -- running ----------------------------------------------------------

    def runner(self, prepared: Prepared, values: Sequence[Any]) -> Callable[[Any, Any], Any] | None:
        """A function that executes a prepared run; None if the vanilla graph does.

        Args:
            values: the values to feed.

        Returns:
            A function of the runtime's handles of the run's options and of its metadata.
        """
        made = prepared.made
        if made is None or not self._acts_in(made):
            return None
        if isinstance(made, SessionRun):
            return lambda options, metadata: self._run(made.fed(values), options, metadata)
        return lambda options, metadata: self._run_inline(made, values, options, metadata)

    def _run(self, run: SessionRun, options: Any, metadata: Any) -> Any:
        """Execute a run that is in terms of the shadow."""
        if self._session is None:
            self._begin()
        self._enter()
        # The run may draw from nodes that preparing it has added to the user's graph.
        _internals.extend_graph(self._user)
        return _internals.run_vanilla(
            self._session, run.fetches, run.targets, run.feeds, options, metadata, extends=False
        )

    def _run_inline(
        self, inline: InlineFunction, values: Sequence[Any], options: Any, metadata: Any
    ) -> Any:
        """Execute a run by its function in the user's graph."""
        self.leave()
        run = inline.run.fed(values)
        return _internals.run_vanilla(
            self._user, run.fetches, run.targets, run.feeds, options, metadata
        )

    def _begin(self) -> None:
        """Make the session that runs the shadow."""
        config = _internals.session_config(self._user)
        self._session = _internals.shadow_session(self.graph, config)
        self._variables = Variables(self._session, VariableOps.added, extends=False)
        self._running = {}

    def _enter(self) -> None:
        """Give the runtime what the shadow has got since the last run, and copy the variables
        among it from the user's session."""
        if self.graph.version == self._version:
            return
        with self._growing:
            if any(len(op.outputs) != count for op, count in self._running.values()):
                # The gradient of a loop, branch or call that a run has added reads more of its
                # outputs than it had, which the runtime refuses for an operator that it has.
                self.leave()
                self._begin()
            variables, operations = self._variables, self.graph.get_operations()
            assert variables is not None
            new = [n for n in variables_in(operations[self._size :]) if n not in self._here]
            for name in new:
                variables.ops(name)
            _internals.extend_graph(self._session)
            if new:
                variables.write(self._vanilla.read(new))
                self._here.update(new)
            for op in operations[self._size :]:
                if op.type in CALLS or op.type in CONTROL_FLOW:
                    self._running[op.name] = op, len(op.outputs)
            # What was added for the variables makes none.
            self._size = _internals.count_operations(self.graph)
            self._version = self.graph.version

    def leave(self, only: Sequence[str] | None = None) -> None:
        """Copy variables back to the user's session.

        Args:
            only: the names of some variables, which stay in the shadow, too; None to move all.
        """
        with self._moving:
            names = self._here if only is None else self._here.intersection(only)
            if names and self._variables is not None:
                self._vanilla.write(self._variables.read(names))
            if only is None:
                self._here.clear()
                self._size = self._version = 0

    def close(self) -> None:
        """Move all variables back, and end the shadow."""
        if os.getpid() != self._process:
            # Closing waits for the runs that are under way: for ever in a forked child, which has
            # none of the runtime's threads (observed with TensorFlow 2.21).
            if self._session is not None:
                _internals.abandon(self._session)
            return
        with self._moving:
            if not _internals.is_closed(self._user):
                self.leave()
            if self._session is not None:
                self._session.close()
                self._session = None


def _extent(run: SessionRun) -> tuple[list[Any], set[int]]:
    """The operators that a run executes, and others for their sake; ``id`` of what it is fed."""
    roots = [*(tensor.op for tensor in run.fetches), *run.targets]
    return roots, {id(tensor) for tensor, _ in [*run.feeds, *run.further]}


def _read_by_gradients(
    site: OpSite, run: SessionRun, feeds: Sequence[tuple[Any, Any]]
) -> list[tuple[Any, int]]:
    """The tensors that gradients read in the shadow for the fed tensors of a run, with their
    positions.

    Behind a routine after an operator other operators read another tensor, the one that is fed.

    Args:
        feeds: those of the run in the shadow.
    """
    found = []
    for index, ((tensor, _), (final, _)) in enumerate(zip(run.feeds, feeds, strict=True)):
        state = site.states.get(tensor.op.name)
        saved = None if state is None else state.used.get(id(tensor))
        if saved is not None and saved is not final:
            found.append((saved, index))
    return found
