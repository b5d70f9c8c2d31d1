"""Runs of graphs as tools with routines at derived points see them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda.engine.points import Points
from amanda.interface.points import Point
from amanda.state import LiveScope

Tell = Callable[[Sequence[LiveScope]], None]
"""Tells tools of a point."""


class InnerPasses:
    """The forward passes and steps within the runs of one copy.

    Args:
        points: of the driver.

    Attributes:
        points: the points of the driver.
        has_stepped: whether a branch has let an optimizer step since the last iteration ended.
        running: how many forward passes have begun and not ended.
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self.has_stepped = False
        self.running = 0

    def begin(
        self, name: str, trains: bool, differentiates: bool, scopes: Sequence[LiveScope]
    ) -> None:
        """Tell that an iteration begins.

        Args:
            name: of the graph.
            trains: whether an optimizer steps in it.
            differentiates: whether gradients are computed in it.
        """
        self.running += 1
        self.points.forward_begins(scopes, name, trains or differentiates, differentiates)

    def end(self, name: str, trains: bool, scopes: Sequence[LiveScope]) -> None:
        """Tell that it has ended."""
        self.running -= 1
        self.points.forward_ends(scopes, name, failed=False)
        if self.take() or trains:
            self.points.optimizer_ends(scopes)

    def go_on(self, name: str, scopes: Sequence[LiveScope]) -> None:
        """Tell that one iteration has ended and the next one begins."""
        self.end(name, True, scopes)
        self.begin(name, True, True, scopes)

    def step(self, scopes: Sequence[LiveScope]) -> None:
        """Note that a branch has let an optimizer step."""
        self.has_stepped = True

    def take(self) -> bool:
        """True if an optimizer has stepped in a branch; asked once."""
        has_stepped, self.has_stepped = self.has_stepped, False
        return has_stepped

    def abandon(self, scopes: Sequence[LiveScope]) -> None:
        """The run has raised."""
        self.has_stepped = False
        while self.running > 0:
            self.running -= 1
            self.points.forward_ends(scopes, "", failed=True)


Facts = Mapping[str, Any]
"""The facts about a call of a module for tools: its path, id, and target."""


class RunningModules:
    """The modules that the runs of one copy have entered and not left.

    Args:
        points: of the driver.
    """

    def __init__(self, points: Points) -> None:
        self._points = points
        self._lock = threading.Lock()
        self._open: list[tuple[Sequence[LiveScope], object, Facts]] = []
        self._runs = 0

    def begin_run(self) -> None:
        """A run begins."""
        with self._lock:
            self._runs += 1

    def end_run(self) -> None:
        """A run has ended: what it has entered is left, also where it has raised."""
        with self._lock:
            self._runs -= 1
            # Of runs at the same time it is not known which has entered a module.
            left, self._open = (self._open, []) if not self._runs else ([], self._open)
        for scopes, _, facts in reversed(left):
            self._points.module(scopes, Point.MODULE_EXIT, **facts)

    def enter(
        self, scopes: Sequence[LiveScope], call: object, facts: Facts, inputs: Sequence[Any]
    ) -> None:
        """A module is entered.

        Args:
            call: tells the call from others.
            inputs: the tensors that it is given.
        """
        facts = {**facts, "inputs": inputs}
        with self._lock:
            self._open.append((scopes, call, facts))
        self._points.module(scopes, Point.MODULE_ENTRY, **facts)

    def leave(self, call: object, outputs: Sequence[Any]) -> None:
        """A module is left.

        Args:
            outputs: the tensors that it gives.
        """
        with self._lock:
            places = range(len(self._open) - 1, -1, -1)
            place = next((i for i in places if self._open[i][1] is call), None)
            if place is None:
                return
            scopes, _, facts = self._open.pop(place)
        self._points.module(scopes, Point.MODULE_EXIT, **facts, outputs=outputs)


@attrs.define(eq=False)
class GraphRun:
    """One run of a copy of which tools are told, in both modes of graphs. It begins at once.

    A run that is a forward pass is a step, too, if an optimizer steps in it::

        with GraphRun(points, scopes, name, trains, differentiates, count, modules):
            ...                             # run the copy

    Args:
        points: of the driver.
        scopes: those that are told.
        name: the name of the pass that it is; "" for none.
        trains: whether an optimizer steps in it.
        differentiates: whether gradients are computed in it.
        count: counts the executions in it, if it does not raise; None if there are none.
        modules: tells of the modules that it enters; None where nobody is told.
        inner: tells of the passes within it, and of a branch that lets an optimizer step; None
            where nobody is told.
        take: gives what it has given to the model that it calls, as far as that is known.
    """

    _points: Points
    _scopes: Sequence[LiveScope]
    _name: str
    _trains: bool
    _differentiates: bool
    _count: Callable[[], None] | None
    _modules: RunningModules | None
    _inner: InnerPasses | None = None
    _take: Callable[[], Mapping[str, Any]] = dict

    def __attrs_post_init__(self) -> None:
        if self._name:
            # The forward part of a function that is differentiated is a function of its own.
            differentiates = self._differentiates
            in_training = self._trains or differentiates or self._name.endswith(".forward")
            self._points.forward_begins(self._scopes, self._name, in_training, differentiates)
        if self._modules is not None:
            self._modules.begin_run()

    def __enter__(self) -> None:
        """Do nothing: the run began when this object was made."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """The run has ended, or raised."""
        has_run = error is None
        if self._modules is not None:
            self._modules.end_run()
        if not has_run and self._inner is not None:
            self._inner.abandon(self._scopes)
        if has_run and self._count is not None:
            self._count()
        if self._name:
            self._points.forward_ends(self._scopes, self._name, not has_run, self._take())
            has_stepped = self._trains or (self._inner is not None and self._inner.take())
            if has_run and has_stepped:
                self._points.optimizer_ends(self._scopes)
