"""The base class of the two drivers that run instrumented copies of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from amanda.interface.action import Action
from amanda.state import STATE, Lock
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.copies import Copies
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.known_graphs import GraphIds
from amanda_tensorflow.graphs.tool_errors import FAILURES
from amanda_tensorflow.plugin import TensorFlowDriver


class GraphModeDriver(TensorFlowDriver):
    """A driver that runs instrumented copies of graphs.

    Attributes:
        ids: the ids of the graphs that have been met.
        copies: the instrumented copies.
        lock: held while copies are made, changed or dropped.
    """

    # Core's own dispatcher runs routines at once; in a graph they are inserted instead.
    dispatcher_class = GraphDispatcher

    def __init__(self, dispatcher: GraphDispatcher) -> None:
        super().__init__(dispatcher)
        self.dispatcher: GraphDispatcher = dispatcher
        self.ids = GraphIds()
        self.copies = Copies()
        self.lock = Lock()

    # -- life cycle -------------------------------------------------------

    def detach(self) -> None:
        super().detach()
        self.copies.release()

    def invalidate(self) -> None:
        # Counted at once: another thread may hold the lock while it makes a copy.
        self.copies.generation += 1
        # A tool's code does not wait for that thread, which may itself wait for the tool. It makes
        # no copies; those of a scope that it ends are dropped when the next block ends.
        if not STATE.paused:
            self.lock.hold(self.copies.drop_dead)

    # -- for the dispatcher -----------------------------------------------

    def vanilla(self) -> AbstractContextManager[Any]:
        # The dispatcher has no scopes while core pauses the thread for a tool's code.
        return nullcontext()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        return _internals.stop_recording()

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor)

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        if isolated and not _internals.no_tape_records():
            return _internals.stop_recording()
        return nullcontext()

    def count_failed_run(self, error: BaseException) -> None:
        """Count the operators of a run that has raised `error` as not seen.

        The runtime does not tell which of them have run. The end of a data set is no failure.
        """
        if not isinstance(error, tf.errors.OutOfRangeError):
            self.dispatcher.not_seen("operators in runs of graphs that failed", 0)


def raise_original(error: BaseException) -> None:
    """Raise the exception of a routine, if the runtime's `error` carries one."""
    original = FAILURES.original(error)
    if original is not None:
        raise original from None
