"""The driver for ``tf.compat.v1.Session``: a shadow beside each session that it instruments.

The instrumented copy of a session's graph grows with what the program runs: a
run adds the operators that its fetches need. As long as no tool has anything to
do in it, the vanilla graph runs. After that the copy runs, in a session of its
own, and the variables move there; they move back when the program runs outside
of the scope, and when the scope ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import amanda
from amanda.state import STATE, LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.base_driver import Copy, GraphModeDriver, raise_original
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.instrument import Instrument
from amanda_tensorflow.graphs.replay import Replay
from amanda_tensorflow.graphs.self_test import Doubler
from amanda_tensorflow.graphs.sites import Site
from amanda_tensorflow.graphs.topological_order import ordered
from amanda_tensorflow.plugin import TensorFlowGraphDriver
from amanda_tensorflow.session.runs import SessionRun
from amanda_tensorflow.session.stateful_runs import InlineFunction, needs_inline
from amanda_tensorflow.session.variables import (
    ShadowVariables,
    VanillaVariables,
    variables_in,
)

Run = Callable[[Any, Any], Any]
"""Runs a request; called with handles of the run's options and of its metadata."""


class SessionCopies:
    """The instrumented copies of one session's graph for some scopes.

    Most runs use one copy in a session of its own, the shadow; a run that needs
    state of another kind than variables has a function in the user's session.
    """

    def __init__(self, driver: SessionDriver, session: Any, scopes: tuple[LiveScope, ...]) -> None:
        self._driver = driver
        self._user = session
        self._vanilla = VanillaVariables(session)
        self._ids = driver.known.ids_of(session.graph, "graph", {})
        self._known: dict[tuple[Any, ...], InlineFunction | SessionRun] = {}
        self.op_ids: list[str] = []
        self.graph = _internals.shadow_graph(session.graph)
        self.building = Building(self.graph, scopes, needs_gradient=False)
        self._instrument = self._making(self.graph, self.building)
        self._replay = Replay(self.graph, self._instrument)
        self._site = Site(session.graph, self._ids)
        self._session: Any = None
        self._variables: ShadowVariables | None = None
        self._here: set[str] = set()
        self._size = 0

    def _making(self, graph: Any, building: Building) -> Instrument:
        driver = self._driver
        instrument = Instrument(driver.dispatcher, building, driver.known, self._read_variable)
        instrument.op_ids = self.op_ids
        return instrument

    def _read_variable(self, op: Any, dtype: Any) -> Any:
        """The value of a variable of the user's session; None if it has none."""
        if isinstance(op, _internals.EagerTensor):
            return None
        self.leave([op.name])
        value = self._vanilla.read([op.name]).get(op.name)
        with _internals.eager_mode():
            return None if value is None else tf.constant(value)

    # -- while a request is prepared --------------------------------------

    def prepare(self, request: SessionRun) -> Run | None:
        """What runs a request; None if the vanilla graph does."""
        key = (request.key, _internals.own_version(self._user.graph))
        known = self._known.get(key)
        if known is None:
            operations = ordered(Site(self._user.graph, self._ids), request.roots())
            is_inline = needs_inline(operations)
            known = self._known[key] = (
                self._made_inline(request) if is_inline else self._added(request)
            )
        if isinstance(known, SessionRun):
            if not self.building.is_changed:
                return None
            translated = known.fed_like(request)
            return lambda options, metadata: self._run(translated, options, metadata)
        if not known.is_inserted:
            return None
        inlined = known.translated(request)
        return lambda options, metadata: self._run_inline(inlined, options, metadata)

    def _added(self, request: SessionRun) -> SessionRun:
        """The request in terms of the shadow, to which what it needs is added."""
        roots = [op for op in request.roots() if op.name not in self._site.ops]
        with self._instrument.building_copy():
            if roots:
                self._site.refresh(request.fetches)
                self._replay.body(self._site, roots)
                self._instrument.warn(self._ids)
            return self._translated(request)

    def _translated(self, request: SessionRun) -> SessionRun:
        site, final = self._site, self._replay.final
        with self.graph.as_default():
            fetches = [final(site, tensor) for tensor in request.fetches]
            targets = [new for op in request.targets for new in site.controls(op)]
            return SessionRun(
                [(final(site, tensor), value) for tensor, value in request.feeds],
                fetches,
                [*targets, *self.building.late_nodes(fetches)],
            )

    def _made_inline(self, request: SessionRun) -> InlineFunction:
        """The function for a request, whose node is in the user's graph if it is needed."""
        site = Site(self._user.graph, self._ids, fetched=request.fetches)
        scopes, found = self.building.scopes, []

        def make(graph: Any) -> Instrument:
            found.append(Building(graph, scopes, needs_gradient=False))
            return self._making(graph, found[0])

        inline = InlineFunction(self._user, site, make)
        inline.build(request)
        if found[0].is_changed:
            # Its routines live and end with those of the shadow.
            self.building.routines += found[0].routines
            inline.insert()
        return inline

    # -- running ----------------------------------------------------------

    def _run(self, request: SessionRun, options: Any, metadata: Any) -> Any:
        """Run a request that is in terms of the shadow."""
        if self._session is None:
            self._session = _internals.shadow_session(
                self.graph, _internals.session_config(self._user)
            )
            self._variables = ShadowVariables(self._session)
        self._enter()
        return _internals.run_vanilla(
            self._session, request.fetches, request.targets, request.feeds, options, metadata
        )

    def _run_inline(self, request: SessionRun, options: Any, metadata: Any) -> Any:
        """Run a request that is in terms of the user's graph."""
        self.leave()
        return _internals.run_vanilla(
            self._user, request.fetches, request.targets, request.feeds, options, metadata
        )

    def _enter(self) -> None:
        """Bring the variables that the shadow has and that are not in it yet."""
        assert self._variables is not None
        operations = self.graph.get_operations()
        new = [n for n in variables_in(operations[self._size :]) if n not in self._here]
        self._size = len(operations)
        if new:
            self._variables.write(self._vanilla.read(new))
            self._size = len(self.graph.get_operations())
            self._here.update(new)

    def leave(self, only: Sequence[str] | None = None) -> None:
        """Bring variables back to the user's session (`only` these).

        They count as being here no more, unless only some are asked for.
        """
        names = self._here if only is None else self._here.intersection(only)
        if names and self._variables is not None:
            self._vanilla.write(self._variables.read(names))
        if only is None:
            self._here.clear()
            self._size = 0

    def close(self) -> None:
        """Bring everything back and end the shadow's session."""
        if not _internals.is_closed(self._user):
            self.leave()
        if self._session is not None:
            self._session.close()
            self._session = None


class SessionDriver(TensorFlowGraphDriver, GraphModeDriver):
    """Runs instrumented copies of graphs in place of the vanilla ones."""

    def patch(self) -> None:
        self.patches.wrap(_internals.BaseSession, "_call_tf_sessionrun", self._running)
        self.patches.wrap(_internals.BaseSession, "_call_tf_sessionprun", self._running_partly)

    def _running(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            session: Any, options: Any, feeds: Any, fetches: Any, targets: Any, run_metadata: Any
        ) -> Any:
            if _internals.is_shadow(session):
                return vanilla(session, options, feeds, fetches, targets, run_metadata)
            scopes = self.dispatcher.scopes()
            ready = None
            if scopes:
                request = SessionRun.of(session, feeds, fetches, targets)
                ready = self._prepared(session, scopes, request)
            if ready is None:
                if not STATE.paused:
                    self._leave(session)
                return vanilla(session, options, feeds, fetches, targets, run_metadata)
            try:
                return ready(options, run_metadata)
            except Exception as error:
                raise_original(error)
                raise

        return run

    def _running_partly(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(session: Any, *args: Any) -> Any:
            if self.dispatcher.scopes():
                self.dispatcher.not_seen("runs of Session.partial_run")
            self._leave(session)
            return vanilla(session, *args)

        return run

    def _prepared(
        self, session: Any, scopes: tuple[LiveScope, ...], request: SessionRun
    ) -> Run | None:
        """What runs a request under some scopes; None if the vanilla graph does."""
        with self.lock:
            copy = self.found(session, scopes)
            if copy is None:
                self._leave(session)
                made = SessionCopies(self, session, scopes)
                copy = Copy.of(scopes, made.building, made, self.generation)
            instrumented: SessionCopies = copy.payload
            with copy.growing(scopes):
                ready = instrumented.prepare(request)
            copy.remember(instrumented.op_ids)
            self.keep(session, copy, scopes)
            if ready is not None:
                self._leave(session, besides=instrumented)
            return ready

    def _leave(self, session: Any, besides: SessionCopies | None = None) -> None:
        """Bring a session's variables back from its shadows."""
        with self.lock:
            for copy in self.copies.get(session, ()):
                if copy.payload is not besides:
                    copy.payload.leave()

    @classmethod
    def self_test(cls) -> Sequence[str]:
        """Double the weight of a product in a tiny graph that holds its gradient."""
        tool = Doubler()
        with tf.Graph().as_default() as graph:
            x, w = tf.ones([2, 2]), tf.ones([2, 2])
            y = x @ w
            wanted = [y, *tf.gradients(y, [x, w])]
        scope = amanda.apply(tool, drivers=[TensorFlowGraphDriver])
        with tf.compat.v1.Session(graph=graph) as session, scope:
            return tool.problems("a session", session.run(wanted))
