"""Instrumented copies of graphs, and what the drivers of both graph modes share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.records import OpRecord
from amanda.interface.action import Action
from amanda.namespace import Namespace
from amanda.patching import PatchSet
from amanda.state import STATE, LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map import recording
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.op_ids import GraphIds
from amanda_tensorflow.graphs.tool_errors import FAILURES
from amanda_tensorflow.plugin import TensorFlowDriver


@attrs.define(eq=False)
class Copy:
    """The instrumented copy of a graph for some scopes.

    Attributes:
        scopes: these scopes, outermost first.
        building: what was inserted; its graph is the copy.
        payload: what the driver runs; None where nothing is to be done to the
            graph, so that the vanilla one runs.
        generation: when it was last found to be up to date.
    """

    scopes: tuple[weakref.ref[LiveScope], ...]
    building: Building
    payload: Any
    generation: int
    _records: list[tuple[weakref.ref[LiveScope], str, OpRecord]] = attrs.field(factory=list)
    _noted: int = 0

    @classmethod
    def of(
        cls, scopes: Sequence[LiveScope], building: Building, payload: Any, generation: int
    ) -> Copy:
        """The copy for some scopes, which it holds weakly."""
        building.scopes = ()
        return cls(tuple(weakref.ref(s) for s in scopes), building, payload, generation)

    @contextmanager
    def growing(self, scopes: tuple[LiveScope, ...]) -> Iterator[None]:
        """Within it, more is added to it."""
        self.building.scopes = scopes
        try:
            yield
        finally:
            self.building.scopes = ()

    def remember(self, op_ids: Sequence[str]) -> None:
        """Note what it was made from; nothing is done where it has not grown."""
        if len(op_ids) == self._noted:
            return
        self._noted = len(op_ids)
        self._records.clear()
        for reference in self.scopes:
            scope = reference()
            for op_id in op_ids:
                record = scope.cache.get(op_id) if scope is not None else None
                if record is not None:
                    self._records.append((reference, op_id, record))

    def is_for(self, scopes: Sequence[LiveScope]) -> bool:
        """Whether it was made for exactly these scopes."""
        return len(scopes) == len(self.scopes) and all(
            reference() is scope for reference, scope in zip(self.scopes, scopes, strict=True)
        )

    def is_dead(self) -> bool:
        """Whether one of its scopes is over."""
        found = [reference() for reference in self.scopes]
        return any(scope is None or not scope.alive for scope in found)

    def is_current(self) -> bool:
        """Whether all that its analyses have recorded still holds."""
        for reference, op_id, record in self._records:
            scope = reference()
            if scope is None or scope.cache.get(op_id) is not record or not record.complete:
                return False
            if any(child.redo for child in record.children.values()):
                return False
        return True

    def release(self) -> None:
        """Let go of the tools; what outlives the scope runs without them."""
        for function in self.building.routines:
            function.release()
        if hasattr(self.payload, "close"):
            self.payload.close()


class GraphModeDriver(TensorFlowDriver):
    """A driver that runs instrumented copies of graphs."""

    # Core's own dispatcher runs routines at once; in a graph they are inserted instead.
    dispatcher_class = GraphDispatcher

    def __init__(self, dispatcher: GraphDispatcher) -> None:
        super().__init__(dispatcher)
        self.dispatcher: GraphDispatcher = dispatcher
        self.known = GraphIds()
        self.patches = PatchSet()
        self.lock = threading.RLock()
        self.generation = 0
        self.copies: weakref.WeakKeyDictionary[Any, list[Copy]] = weakref.WeakKeyDictionary()

    @property
    def namespace(self) -> Namespace:
        """``tensorflow/2.21/function`` or ``tensorflow/2.21/graph``."""
        version = ".".join(tf.__version__.split(".")[:2])
        return Namespace(f"tensorflow/{version}/{self.mode}")

    # -- life cycle -------------------------------------------------------

    def attach(self) -> None:
        """Patch the place where graphs are run.

        Raises:
            CapabilityError: this TensorFlow lacks a private symbol; it is named.
        """
        _internals.require(self.mode)
        recording.install()
        try:
            self.patch()
        except BaseException:
            self.detach()
            raise

    def patch(self) -> None:
        """Patch TensorFlow through ``self.patches``."""
        raise NotImplementedError

    def detach(self) -> None:
        self.patches.undo()
        for copies in self.copies.values():
            for copy in copies:
                copy.release()
        self.copies.clear()

    def invalidate(self) -> None:
        self.generation += 1
        with self.lock:
            for copies in self.copies.values():
                for copy in [copy for copy in copies if copy.is_dead()]:
                    copies.remove(copy)
                    copy.release()

    # -- for the dispatcher -----------------------------------------------

    def vanilla(self) -> AbstractContextManager[Any]:
        # Core pauses the thread that runs a tool's code, which is all there is to it.
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

    # -- copies -----------------------------------------------------------

    def found(self, key: Any, scopes: Sequence[LiveScope]) -> Copy | None:
        """The copy for an object and some scopes, if there is one that is up to date."""
        if not STATE.cache:
            return None
        for copy in self.copies.get(key, ()):
            if copy.is_for(scopes):
                if copy.generation == self.generation:
                    return copy
                generation = self.generation
                if copy.is_current():
                    copy.generation = generation
                    return copy
        return None

    def keep(self, key: Any, copy: Copy, scopes: Sequence[LiveScope]) -> None:
        """Keep a copy for later runs, in place of one that is out of date."""
        copies = self.copies.setdefault(key, [])
        for other in [other for other in copies if other.is_for(scopes) and other is not copy]:
            copies.remove(other)
            other.release()
        if copy not in copies:
            copies.append(copy)


def raise_original(error: BaseException) -> None:
    """Raise the exception of a routine that TensorFlow's runtime has turned into `error`."""
    original = FAILURES.original(error)
    if original is not None:
        raise original from None
