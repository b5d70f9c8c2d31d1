"""Runs of graphs as tools with routines at derived points see them."""

from __future__ import annotations

from collections.abc import Sequence

from amanda.engine.points import Points
from amanda.state import LiveScope


class Passing:
    """A run of a graph: a forward pass, and a step if an optimizer steps in it. It begins at once.

    Args:
        points: of the driver.
        scopes: those that are told.
        name: the name of the graph.
        trains: whether an optimizer steps in it.
    """

    __slots__ = ("_name", "_points", "_scopes", "_trains")

    def __init__(
        self, points: Points, scopes: Sequence[LiveScope], name: str, trains: bool
    ) -> None:
        self._points = points
        self._scopes = scopes
        self._name = name
        self._trains = trains
        # The forward part of a function that is differentiated is a function of its own.
        points.forward_begins(scopes, name, trains or name.endswith(".forward"))

    def end(self, has_run: bool) -> None:
        """It has ended.

        Args:
            has_run: False if it has raised.
        """
        self._points.forward_ends(self._scopes, self._name)
        if has_run and self._trains:
            self._points.optimizer_ends(self._scopes)
