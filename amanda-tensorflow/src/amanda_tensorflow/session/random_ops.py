"""Random operators of a session, whose generators an instrumented copy shares.

``tf.random.uniform`` and others keep the state of a generator in the session that runs them, beside
their name: all runs of the session draw from it, whatever they fetch. A copy would begin with a
state of its own, and a program would draw other numbers under a tool. Therefore a random operator
of a copy is a node that runs the vanilla one in the user's session, on the values that the copy has
computed. One in a called function cannot be run by itself, and the run stays vanilla::

    replay = Replay(graph, instrument, draws_from(session))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.random_state import is_seeded
from amanda_tensorflow.graphs.run_time_routines import PythonNode, is_routable
from amanda_tensorflow.graphs.sites import OpSite


def draws_from(
    session: Any, apart: dict[str, str]
) -> Callable[[OpSite, Any], Callable[[Sequence[Any]], Any] | None]:
    """A function that adds the seeded random operators of a session's graph to a copy.

    Args:
        apart: gets, by the name of a call, the name of a random operator in it.

    Returns:
        A function that is given a vanilla operator and its site, and gives one that adds the
        operator of the copy, given its inputs there; None for all others.
    """
    graph, reference = session.graph, weakref.ref(session)

    def adding(site: OpSite, op: Any) -> Callable[[Sequence[Any]], Any] | None:
        if not is_seeded(op) or not _is_routable(op):
            return None
        if op.graph is graph:
            is_shared = can_be_shared(op)
            return (lambda inputs: Draw(reference, op).added(inputs)) if is_shared else None
        if site.outermost.graph is graph:
            apart[_call_of(site)] = f"{site.prefix}{op.name}"
        return None

    return adding


def can_be_shared(op: Any) -> bool:
    """True if a random operator can be run by itself: what it waits for would run with it."""
    return not op.control_inputs and _is_routable(op)


def _call_of(site: OpSite) -> str:
    """The name of the call in the outermost graph for whose sake a function is replayed."""
    while site.parent is not None and site.parent.parent is not None:
        site = site.parent
    return site.prefix.removesuffix("/")


def _is_routable(op: Any) -> bool:
    return all(map(is_routable, (*op.inputs, *op.outputs)))


class Draw(PythonNode):
    """Runs a random operator of the user's session.

    Args:
        session: a reference to the session.
        op: the operator.
    """

    def __init__(self, session: Callable[[], Any], op: Any) -> None:
        super().__init__()
        self._session = session
        self._of = op

    def added(self, inputs: Sequence[Any]) -> Any:
        """Add the node to the current graph. Returns the operator."""
        outputs = self._of.outputs
        shapes = [tensor.shape for tensor in outputs]
        # The gradient function of the operator suits the node, whose inputs are the same.
        self.insert(inputs, [tensor.dtype for tensor in outputs], shapes, self._of.type)
        return self.op

    def compute(self, values: Sequence[Any]) -> list[Any]:
        feeds = [(t, v.numpy()) for t, v in zip(self._of.inputs, values, strict=True)]
        outputs = list(self._of.outputs)
        drawn = _internals.run_in_this_thread(self._session(), outputs, feeds=feeds)
        return [tf.constant(value) for value in drawn]
