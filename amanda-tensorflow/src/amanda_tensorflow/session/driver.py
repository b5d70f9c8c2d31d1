"""The driver ``tensorflow-graph``: runs instrumented copies of graphs for a session.

The copies of each session's graph are in :mod:`amanda_tensorflow.session.copies`; the user's graph
stays as it is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

import amanda
from amanda.engine.points import Points
from amanda.errors import CoverageWarning
from amanda.interface.proofs import Proof
from amanda.python.patching import PatchSet, named_as
from amanda.state import STATE, LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.base_driver import GraphModeDriver, raise_original
from amanda_tensorflow.graphs.copies import Copy
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.passes import GraphRun
from amanda_tensorflow.graphs.run_time_routines import may_wait_for_tools
from amanda_tensorflow.graphs.self_test import Doubler
from amanda_tensorflow.plugin import TensorFlowGraphDriver
from amanda_tensorflow.session.copies import Prepared, SessionCopies
from amanda_tensorflow.session.run_kinds import kind_of
from amanda_tensorflow.session.runs import Key, SessionRun, key_of

PARTIAL = "runs of Session.partial_run, and beside them"
SERVER = "runs of a session of a tf.compat.v1.train.Server"


class SessionDriver(TensorFlowGraphDriver, GraphModeDriver):
    """Runs instrumented copies of graphs in place of the vanilla ones."""

    def __init__(self, dispatcher: GraphDispatcher) -> None:
        super().__init__(dispatcher)
        self._partly: weakref.WeakSet[Any] = weakref.WeakSet()

    def patch(self, patches: PatchSet) -> None:
        patches.wrap(_internals.BaseSession, "_call_tf_sessionrun", self._running)
        patches.wrap(_internals.BaseSession, "_call_tf_sessionprun", self._running_partly)
        patches.wrap(_internals.BaseSession, "partial_run_setup", self._preparing_partly)

    def _running(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of ``BaseSession._call_tf_sessionrun``, which calls the runtime.

        What it is `given` are feeds, fetches, targets and the run's metadata.
        """

        def run(session: Any, options: Any, *given: Any) -> Any:
            if _internals.is_shadow(session):
                return vanilla(session, options, *given)
            scopes, call = self.dispatcher.scopes(), self._run_vanilla
            # Asked here, as most runs need no call then.
            is_special = scopes and (session.sess_str or session in self._partly)
            if not scopes or (is_special and self._stays_vanilla(session)):
                return call(vanilla, session, options, *given)
            ready, prepared = self.lock.hold(self._ready, session, scopes, given[:3])
            if ready is not None:
                call = partial(_run_copy, ready)
            try:
                if prepared.kind is not None or prepared.modules is not None:
                    with _told_run(self.dispatcher.points, scopes, prepared):
                        return call(vanilla, session, options, *given)
                result = call(vanilla, session, options, *given)
            except Exception as error:
                self.count_failed_run(error)
                raise
            if prepared.executions is not None:
                prepared.executions.add()
            return result

        return named_as(vanilla, run)

    def _stays_vanilla(self, session: Any) -> bool:
        """True if a session cannot be instrumented: its runs are counted as not seen."""
        if session in self._partly:
            self.dispatcher.not_seen(PARTIAL)
            return True
        if not session.sess_str:
            return False
        # The sessions of a server share its variables, which a shadow would take from the others.
        self.dispatcher.not_seen(SERVER)
        warnings.warn(
            f"the session of {session.sess_str.decode()} runs vanilla: sessions of a "
            "tf.compat.v1.train.Server share their variables and are not instrumented",
            CoverageWarning,
            stacklevel=5,
        )
        return True

    def _preparing_partly(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of ``BaseSession.partial_run_setup``.

        A partial run reads variables as soon as it is set up. From then on the session is vanilla,
        for the variables must not move to a shadow before its last part.
        """

        def set_up(session: Any, *args: Any, **kwargs: Any) -> Any:
            if self.dispatcher.scopes():
                self._leave(session)
                self._partly.add(session)
            return vanilla(session, *args, **kwargs)

        return named_as(vanilla, set_up)

    def detach(self) -> None:
        super().detach()
        self._partly.clear()

    def _running_partly(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of ``BaseSession._call_tf_sessionprun``: partial runs are vanilla."""

        def run(session: Any, *args: Any) -> Any:
            if self.dispatcher.scopes():
                self.dispatcher.not_seen(PARTIAL)
            self._leave(session)
            return vanilla(session, *args)

        return named_as(vanilla, run)

    def _ready(
        self, session: Any, scopes: tuple[LiveScope, ...], handles: tuple[Any, Any, Any]
    ) -> tuple[Callable[[Any, Any], Any] | None, Prepared]:
        """A function that executes a run under some scopes, and the run as it was prepared.

        To be called while the lock is held.

        Args:
            handles: the runtime's handles of feeds (with their values), fetches and targets.

        Returns:
            None for the function if the vanilla graph runs.
        """
        key = key_of(*handles)
        copy = self.copies.find(session, scopes)
        prepared = None if copy is None else copy.payload.prepared(key)
        if copy is None or prepared is None:
            copy, prepared = self._prepare(session, scopes, copy, key, handles)
        copies: SessionCopies = copy.payload
        ready = copies.runner(prepared, tuple(handles[0].values()))
        if ready is not None:
            # Not by a call, in each run, where there is one copy.
            for other in self.copies.of(session):
                if other is not copy:
                    other.payload.leave()
        return ready, prepared

    def _prepare(
        self,
        session: Any,
        scopes: tuple[LiveScope, ...],
        copy: Copy | None,
        key: Key,
        handles: tuple[Any, Any, Any],
    ) -> tuple[Copy, Prepared]:
        """Prepare a run that the copy was not prepared for; makes the copy if there is none."""
        # Making a copy reads variables, which must be in the user's session then.
        if copy is None:
            self._leave(session)
            made = SessionCopies(self.dispatcher, self.ids, session, scopes)
            copy = Copy.of(scopes, made.building, made, self.copies.generation)
        copies: SessionCopies = copy.payload
        with copy.growing(scopes):
            run = SessionRun.of(session.graph, *handles)
            prepared = copies.prepare(key, run)
        if self.dispatcher.points.is_wanted(scopes):
            prepared.kind = kind_of(run)
        copy.remember(copies.keys)
        self.copies.keep(session, copy, scopes)
        return copy, prepared

    def _run_vanilla(
        self, vanilla: Callable[..., Any], session: Any, options: Any, *given: Any
    ) -> Any:
        """Run the user's graph. For a tool's code without threads of the runtime: all may wait for
        it."""
        if not STATE.paused:
            self._leave(session)
        elif may_wait_for_tools():
            with _internals.in_this_thread(options) as here:
                return vanilla(session, here, *given)
        return vanilla(session, options, *given)

    def _leave(self, session: Any) -> None:
        """Move a session's variables back from its shadows."""
        self.lock.hold(self._leave_shadows, session)

    def _leave_shadows(self, session: Any) -> None:
        for copy in self.copies.of(session):
            copy.payload.leave()

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """Return one proof; if it fails, the driver is of no use."""
        return [Proof("sessions", _prove)]


def _told_run(points: Points, scopes: tuple[LiveScope, ...], prepared: Prepared) -> GraphRun:
    """Report the start of a run to the tools."""
    name = "session" if prepared.kind in ("train", "forward") else ""
    told = name, prepared.kind == "train", False
    count = None if prepared.executions is None else prepared.executions.add
    return GraphRun(points, scopes, *told, count, prepared.modules)


def _run_copy(
    ready: Callable[[Any, Any], Any], vanilla: Any, session: Any, options: Any, *given: Any
) -> Any:
    """Run a copy in place of the user's graph; raise what a routine has raised."""
    try:
        return ready(options, given[-1])
    except BaseException as error:
        raise_original(error)
        raise


def _prove() -> Sequence[str]:
    """Double the weight of a product in a tiny graph that holds its gradient."""
    tool = Doubler()
    with tf.Graph().as_default() as graph:
        x, w = tf.ones([2, 2]), tf.ones([2, 2])
        y = x @ w
        wanted = [y, *tf.gradients(y, [x, w])]
    scope = amanda.apply(tool, drivers=[TensorFlowGraphDriver])
    with tf.compat.v1.Session(graph=graph) as session, scope:
        return tool.problems("a session", session.run(wanted))
