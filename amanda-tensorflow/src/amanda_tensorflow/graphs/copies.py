"""Instrumented copies: for which scopes each was made, and whether it is still up to date."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from amanda.engine.records import OpRecord
from amanda.interface.points import Point
from amanda.state import STATE, LiveScope
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.executions import Executions
from amanda_tensorflow.graphs.passes import GraphRun

Report = Callable[[Sequence[LiveScope]], GraphRun]
"""Reports the start of a run to the tools of some scopes."""


@attrs.define(eq=False)
class Copy:
    """The instrumented copy of a graph for some scopes.

    Attributes:
        scopes: weak references to these scopes, outermost first.
        building: what was inserted; its graph is the copy.
        payload: what the driver runs. A function driver has None where nothing is inserted:
            the vanilla function runs.
        executions: counts the runs; None if there is nothing to count.
        report: reports the start of a run to the tools; None where nobody is told.
        generation: the generation of :class:`Copies` in which it was last found up to date.
    """

    scopes: tuple[weakref.ref[LiveScope], ...]
    building: Building
    payload: Any
    generation: int
    executions: Executions | None = None
    report: Report | None = None
    _records: list[tuple[weakref.ref[LiveScope], str, OpRecord]] = attrs.field(factory=list)
    _noted: int = 0
    _wanted: tuple[bool, bool] = (False, False)

    @classmethod
    def of(
        cls, scopes: Sequence[LiveScope], building: Building, payload: Any, generation: int
    ) -> Copy:
        """The copy for some scopes, which it does not keep alive."""
        building.scopes = ()
        copy = cls(tuple(weakref.ref(s) for s in scopes), building, payload, generation)
        copy._wanted = _wanted_points(scopes)
        return copy

    @contextmanager
    def growing(self, scopes: tuple[LiveScope, ...]) -> Iterator[None]:
        """Within it, operators are added to the copy, for the scopes that it was made for."""
        self.building.scopes = scopes
        try:
            yield
        finally:
            self.building.scopes = ()

    def remember(self, keys: Sequence[str]) -> None:
        """Note the records of the operators in the copy, by which it is found out of date."""
        if len(keys) == self._noted:
            return
        self._noted = len(keys)
        self._records.clear()
        for reference in self.scopes:
            scope = reference()
            for key in keys:
                record = scope.cache.get(key) if scope is not None else None
                if record is not None:
                    self._records.append((reference, key, record))

    def is_for(self, scopes: Sequence[LiveScope]) -> bool:
        """True if the copy was made for exactly these scopes."""
        if len(scopes) != len(self.scopes):
            return False
        for reference, scope in zip(self.scopes, scopes, strict=True):
            if reference() is not scope:
                return False
        return True

    def is_dead(self) -> bool:
        """True if a scope of the copy has ended."""
        found = [reference() for reference in self.scopes]
        return any(scope is None or not scope.alive for scope in found)

    def is_current(self) -> bool:
        """True if all that its analyses have recorded still holds, and the derived points that
        tools have routines at."""
        scopes = [reference() for reference in self.scopes]
        if _wanted_points([scope for scope in scopes if scope is not None]) != self._wanted:
            return False
        for reference, key, record in self._records:
            scope = reference()
            if scope is None or scope.cache.get(key) is not record or not record.complete:
                return False
            if any(child.redo for child in record.children.values()):
                return False
        return True

    def release(self) -> None:
        """Release the tools: nodes of the copy that run after the scope call no routine."""
        for routine in self.building.routines:
            routine.release()
        self.building.counts.clear()
        self.executions = self.report = None
        if hasattr(self.payload, "close"):
            self.payload.close()


class Copies:
    """The copies of one driver, by vanilla function or session, which it does not keep alive.

    Attributes:
        generation: counts how often copies may have become out of date; they are checked then.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._known: weakref.WeakKeyDictionary[Any, list[Copy]] = weakref.WeakKeyDictionary()

    def of(self, key: Any) -> Sequence[Copy]:
        """All copies of a function or a session."""
        return self._known.get(key, ())

    def find(self, key: Any, scopes: Sequence[LiveScope]) -> Copy | None:
        """The copy for some scopes, if there is one that is up to date."""
        if not STATE.cache:
            return None
        for copy in self._known.get(key, ()):
            if copy.is_for(scopes):
                # Read first: what is invalidated meanwhile is looked at again next time.
                generation = self.generation
                if copy.generation == generation:
                    return copy
                if copy.is_current():
                    copy.generation = generation
                    return copy
        return None

    def keep(self, key: Any, copy: Copy, scopes: Sequence[LiveScope]) -> None:
        """Keep a copy for later runs, in place of one that is out of date."""
        copies = self._known.setdefault(key, [])
        for other in [other for other in copies if other.is_for(scopes) and other is not copy]:
            copies.remove(other)
            other.release()
        if copy not in copies:
            copies.append(copy)

    def drop_dead(self) -> None:
        """Drop the copies whose scopes have ended."""
        for copies in self._lists():
            for copy in [copy for copy in copies if copy.is_dead()]:
                # Released first, as others are not to miss it before its variables are back.
                copy.release()
                with contextlib.suppress(ValueError):
                    copies.remove(copy)

    def release(self) -> None:
        """Let go of all copies."""
        for copies in self._lists():
            for copy in tuple(copies):
                copy.release()
        self._known.clear()

    def _lists(self) -> list[list[Copy]]:
        """All lists of copies, in one step: other threads keep copies meanwhile."""
        found = (self._known.get(key) for key in (ref() for ref in self._known.keyrefs()) if key)
        return [copies for copies in found if copies is not None]


def _wanted_points(scopes: Sequence[LiveScope]) -> tuple[bool, bool]:
    """True if a tool of some scopes has a routine at modules, and at any derived point."""
    tools = [tool for scope in scopes for tool in scope.tools]
    modules = Point.MODULE_ENTRY, Point.MODULE_EXIT
    return (
        any(tool.has_routines_at(*modules) for tool in tools),
        any(tool.has_routines_at(*Point) for tool in tools),
    )
