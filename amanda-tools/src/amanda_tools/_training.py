"""Tools that act while a trainer trains; each trainer's own callback is a thin layer over it.

::

    class TheirCallback(ToolsOfTraining, their.Callback):
        trains = their.Trainer, "fit"    # if it does not report exceptions
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from amanda.cli import run
from amanda.cli.rank import Rank
from amanda.interface.tool import StopRun, Tool
from amanda.python.patching import PatchSet


class ToolsOfTraining:
    """Applies tools from the begin of a training to its end, and delivers their results then.

    Args:
        tools: what ``amanda run -t`` takes: ``"flops,nan,stats:every=10"``.
        output: the folder of the result files; None to print summaries only.
        html: True for a page about the run, ``report.html`` in the folder.
        full: True to print all rows and tables.

    Attributes:
        tools: the tools of the last training by name.
        trains: the class and the name of the method that trains, which is wrapped while callbacks
            of this kind exist: Keras (3.15) and transformers (5.23) do not tell callbacks that a
            training has failed. None if the trainer does.

    Raises:
        ValueError: an option is wrong.
        AmandaError: a tool does not exist or cannot be loaded.
    """

    trains: ClassVar[tuple[type, str] | None] = None

    def __init__(
        self, tools: str, output: str | Path | None = None, html: bool = False, full: bool = False
    ) -> None:
        super().__init__()
        self.tools: dict[str, Tool] = {}
        self._given = run.create_parser().parse_args([])
        self._given.tool, self._given.html, self._given.full = [tools], html, full
        self._given.output = [] if output is None else [Path(output)]
        # Each training has tools of its own; these are made for their errors.
        run.ReportedScope(self._given, Rank())
        self._scope: run.ReportedScope | None = None
        if self.trains is not None:
            _add(self.trains)
            weakref.finalize(self, _remove, self.trains).atexit = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Apply new tools: the method of Keras and of transformers."""
        self.begin(Rank.of_environment())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Deliver the results: the method of all three."""
        self.end()

    def begin(self, rank: Rank) -> None:
        """Apply new tools.

        Args:
            rank: the place of this process among several.

        Raises:
            AmandaError: they cannot be applied.
        """
        self.end()
        scope = run.ReportedScope(self._given, rank)
        command = f"{type(self).__module__}.Callback({self._given.tool[0]!r})"
        scope.report.facts["command"] = command
        scope.begin()
        self.tools, self._scope = scope.tools, scope
        _OPEN[self] = threading.get_ident()

    def end(self, failure: BaseException | None = None) -> None:
        """End the scope and deliver the results, if the tools are applied.

        Args:
            failure: the exception that has ended the training; None if none has.
        """
        scope, self._scope = self._scope, None
        if scope is not None:
            del _OPEN[self]
            scope.report.has_failed = not (failure is None or isinstance(failure, StopRun))
            scope.report.note_end(failure or "normally")
            scope.end()


_OPEN: dict[ToolsOfTraining, int] = {}
"""The callbacks whose tools are applied, and the thread that trains."""


_WRAPPED: dict[tuple[type, str], tuple[PatchSet, Any]] = {}
_CALLBACKS: Counter[tuple[type, str]] = Counter()
"""The methods that train, wrapped while callbacks of theirs exist, and how many there are."""


def _add(method: tuple[type, str]) -> None:
    _CALLBACKS[method] += 1
    if method not in _WRAPPED:
        patches = PatchSet()
        patches.wrap(*method, _leaving)
        _WRAPPED[method] = patches, vars(method[0])[method[1]]


def _remove(method: tuple[type, str]) -> None:
    _CALLBACKS[method] -= 1
    patches, ours = _WRAPPED[method]
    # Another library may have wrapped it since.
    if not _CALLBACKS[method] and vars(method[0]).get(method[1]) is ours:
        del _WRAPPED[method]
        patches.undo()


def _leaving(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that trains, at whose end no callback has tools applied."""

    @functools.wraps(train)
    def trained(*args: Any, **kwargs: Any) -> Any:
        before = set(_OPEN)
        try:
            return train(*args, **kwargs)
        finally:
            thread = threading.get_ident()
            for callback in [one for one in _OPEN if _OPEN[one] == thread and one not in before]:
                callback.end(sys.exception())

    return trained
