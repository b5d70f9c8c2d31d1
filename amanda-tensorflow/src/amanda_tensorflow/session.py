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

import attrs
import tensorflow as tf

import amanda
from amanda import _state
from amanda._scope import Scope
from amanda_tensorflow import _internals
from amanda_tensorflow.copies import Copy, GraphModeDriver, raise_original
from amanda_tensorflow.instrument import Instrument
from amanda_tensorflow.plugin import TensorFlowGraphDriver
from amanda_tensorflow.replay import Replay
from amanda_tensorflow.routines import Building
from amanda_tensorflow.sites import Site
from amanda_tensorflow.variables import ShadowVariables, VanillaVariables, variables_in


@attrs.frozen
class Request:
    """What a run asks for, in the user's graph.

    Attributes:
        feeds: pairs of a tensor and its value.
        fetches: tensors.
        targets: operators to run.
    """

    feeds: Sequence[tuple[Any, Any]]
    fetches: Sequence[Any]
    targets: Sequence[Any]

    @classmethod
    def of(cls, session: Any, feeds: Any, fetches: Any, targets: Any) -> Request:
        """The request that a session was given in handles of the runtime."""
        graph = session.graph
        return cls(
            [(_internals.tensor_of(graph, output), value) for output, value in feeds.items()],
            [_internals.tensor_of(graph, output) for output in fetches],
            [_internals.operation_of(graph, target) for target in targets],
        )

    def roots(self) -> list[Any]:
        """The operators that have to be there."""
        tensors = [*self.fetches, *(tensor for tensor, _ in self.feeds)]
        return [*dict.fromkeys(tensor.op for tensor in tensors), *self.targets]


class Shadow:
    """The instrumented copy of one session's graph for some scopes."""

    def __init__(self, driver: SessionDriver, session: Any, scopes: tuple[Scope, ...]) -> None:
        self._driver = driver
        self._vanilla = VanillaVariables(session)
        self._config = _internals.session_config(session)
        self.graph = _internals.shadow_graph(session.graph)
        self.building = Building(self.graph, scopes, needs_gradient=False)
        self._instrument = Instrument(
            driver.dispatcher, self.building, driver.known, self._read_variable
        )
        self._replay = Replay(self.graph, self._instrument)
        self._site = Site(session.graph, driver.known.ids_of(session.graph, "graph", {}))
        self._size = 0
        self._session: Any = None
        self._variables: ShadowVariables | None = None
        self._here: set[str] = set()

    def _read_variable(self, op: Any, dtype: Any) -> Any:
        """The value of a variable of the user's session; None if it has none."""
        if isinstance(op, _internals.EagerTensor):
            return None
        self.leave([op.name])
        value = self._vanilla.read([op.name]).get(op.name)
        with _internals.eager_mode():
            return None if value is None else tf.constant(value)

    def grow(self, request: Request) -> tuple[Request, list[str]]:
        """Add what a request needs; the request in terms of the copy, and the ids of all
        operators of the copy."""
        roots = [op for op in request.roots() if op.name not in self._site.ops]
        if roots:
            self._site.refresh(request.fetches)
            with self._instrument.building_copy():
                self._replay.body(self._site, roots)
        with self._instrument.building_copy():
            return self._translated(request), self._instrument.op_ids

    def _translated(self, request: Request) -> Request:
        site, final = self._site, self._replay.final
        with self.graph.as_default():
            return Request(
                [(final(site, tensor), value) for tensor, value in request.feeds],
                [final(site, tensor) for tensor in request.fetches],
                [new for op in request.targets for new in self._replay.controls(site, op)],
            )

    def run(self, request: Request, options: Any, run_metadata: Any) -> Any:
        """Run a request that is in terms of the copy."""
        if self._session is None:
            self._session = _internals.shadow_session(self.graph, self._config)
            self._variables = ShadowVariables(self._session)
        self._enter()
        return _internals.run_vanilla(
            self._session, request.fetches, request.targets, request.feeds, options, run_metadata
        )

    def _enter(self) -> None:
        """Bring the variables that the copy has and that are not in it yet."""
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
        """Bring everything back and end the copy's session."""
        try:
            self.leave()
        except RuntimeError:
            # The user has closed the session: there is nothing to bring it back to.
            pass
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
            shadow = None
            if scopes:
                request = Request.of(session, feeds, fetches, targets)
                shadow, request = self._shadow(session, scopes, request)
            if shadow is None:
                if not _state.STATE.paused:
                    self._leave(session)
                return vanilla(session, options, feeds, fetches, targets, run_metadata)
            try:
                return shadow.run(request, options, run_metadata)
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

    def _shadow(
        self, session: Any, scopes: tuple[Scope, ...], request: Request
    ) -> tuple[Shadow | None, Request]:
        """The session's shadow and a request in its terms; None where the vanilla graph runs."""
        with self.lock:
            copy = self.found(session, scopes)
            if copy is None:
                self._leave(session)
                shadow = Shadow(self, session, scopes)
                copy = Copy.of(scopes, shadow.building, shadow, self.generation)
            shadow = copy.payload
            with copy.growing(scopes):
                request, op_ids = shadow.grow(request)
            copy.remember(op_ids)
            self.keep(session, copy, scopes)
            if not copy.building.is_changed:
                return None, request
            self._leave(session, besides=shadow)
            return shadow, request

    def _leave(self, session: Any, besides: Shadow | None = None) -> None:
        """Bring a session's variables back from its shadows."""
        with self.lock:
            for copy in self.copies.get(session, ()):
                if copy.payload is not besides:
                    copy.payload.leave()


def self_test() -> list[str]:
    """Count the products of a tiny graph, and mask the weight of its gradient."""

    class Doubler(amanda.Tool):
        """Counts matrix products and doubles their weight."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op().name == "product/MatMul":
                context.insert_before_op(self.double, inputs=[1])

        def double(self, weight: Any) -> Any:
            self.count += 1
            return weight * 2.0

    tool = Doubler()
    with tf.Graph().as_default() as graph:
        x, w = tf.ones([2, 2]), tf.ones([2, 2])
        y = tf.matmul(x, w, name="product")
        wanted = [y, *tf.gradients(y, [x, w])]
    with tf.compat.v1.Session(graph=graph) as session:
        with amanda.apply(tool, drivers=[TensorFlowGraphDriver]):
            values = session.run(wanted)
    problems = []
    if tool.count != 1:
        problems.append(f"a product in a session was counted {tool.count} times instead of once")
    for name, value, expected in zip(("output", "dx", "dw"), values, (4.0, 4.0, 2.0), strict=True):
        if float(value[0, 0]) != expected:
            problems.append(f"{name} of a doubled weight is {float(value[0, 0])}, not {expected}")
    return problems
