"""The hooks that a plugin may implement.

A plugin is a module that an entry point of the group ``amanda`` names::

    from amanda import hookimpl

    @hookimpl
    def amanda_register_tools():
        return {"zeros": "mytools.zeros:ZerosTool"}

Hooks are called when plugins are loaded, by ``amanda doctor``, or when a run begins or ends; never
at an operator. A plugin module must not import a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from amanda.interface.driver import Driver
    from amanda.interface.tool import Tool
    from amanda.results import RunReport, Table

PROJECT = "amanda"
"""pluggy's project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def amanda_register_drivers() -> Sequence[type[Driver]]:  # type: ignore[empty-body]
    """The driver classes of the plugin; their attributes are read without importing a framework."""


@hookspec
def amanda_register_tools() -> Mapping[str, str]:  # type: ignore[empty-body]
    """The tools of the plugin, short name to ``"module:Class"``."""


@hookspec
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Callable[..., Any]]]:  # type: ignore[empty-body]
    """Rules for ``MappingTool.standard()``, namespace prefix to rules.

    A rule is a function of a context, or a pair of such functions (before, after) around the
    analyses of other tools.
    """


@hookspec
def amanda_suggest_drivers() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Distributions to suggest to users of frameworks, name of the module to name of the
    distribution that has a driver for it.

    Used where the framework is installed or imported and no driver for it is registered.
    """


@hookspec
def amanda_report_problems(frameworks: Collection[str]) -> Sequence[str]:  # type: ignore[empty-body]
    """Problems of the installation and its settings, for ``amanda doctor``.

    Args:
        frameworks: the modules that usable drivers instrument.

    Returns:
        One line each, with the remedy. Problems of a driver belong to its own checks.
    """


@hookspec
def amanda_explain_unseen(frameworks: Collection[str]) -> Sequence[str]:  # type: ignore[empty-body]
    """The parts of the program that no driver sees, for the last line of ``amanda run``.

    A run in which no operator was seen fails if a plugin names such a part. The hook may read
    ``sys.modules``; it imports nothing.

    Args:
        frameworks: the modules that usable drivers instrument.

    Returns:
        One phrase each, with the reason: ``"all of X: no driver sees X"``.
    """


@hookspec
def amanda_suggest_page_tools() -> Sequence[str]:  # type: ignore[empty-body]
    """Name the tools of ``amanda run --html`` without ``-t``.

    Returns:
        Names of registered tools, in the order of the page.
    """


@hookspec(firstresult=True)
def amanda_record_graph(tools: Sequence[Tool]) -> Tool | None:
    """Create the tool that records the graph of a page.

    Its result has ``ops``, rows of operators, and ``edges`` with ``producer`` and ``consumer``,
    their ids. The first plugin that does not return None has created it; amanda-tools is asked
    last.

    Args:
        tools: the tools of the run; none is needed if one of them has such a result.
    """


@hookspec(firstresult=True)
def amanda_render_report(report: RunReport) -> str | None:
    """Draw the page of a run for ``amanda run --html``, as the text of an HTML file.

    Called once, when the run has ended. The first plugin that does not return None draws the page;
    amanda-tools, which always draws one, is asked last. Import what drawing needs in the hook.

    Args:
        report: the contents of the page.
    """


class TableStore(Protocol):
    """Writes the rows of tools as tables while a program runs, and reads the tables of all ranks.

    Its functions raise an ``AmandaError`` whose message is for the user.
    """

    def record(
        self,
        tools: Mapping[str, Tool],
        folder: Path,
        place: Callable[[], Mapping[str, Any]],
        every: int,
    ) -> Tool:
        """Create the tool that writes rows at the end of each `every` steps.

        Its ``write_files(folder, stem)`` is called when the run has ended; before, ``has_ended`` is
        set, to False where the program has failed or was stopped by a signal. If its scope begins
        after steps of the run, it is told by ``begin(steps)``.

        Args:
            tools: the ``ReportingTool`` of the run by their names there.
            folder: of the results, which exists.
            place: gives what is known of the rank, with its ``number``, ``count`` and ``host``.
        """

    def merge(self, folder: str) -> tuple[Sequence[str], Sequence[str]]:
        """Write one table per tool; the names of the files, and a line for what is left out."""

    def query(self, folder: str, sql: str) -> tuple[Table, Sequence[str]]:
        """Answer a query of SQL, "" for what can be asked; and a line for what is left out."""

    def report(self, folder: str) -> RunReport:
        """The contents of a page about the ranks."""


@hookspec(firstresult=True)
def amanda_open_tables() -> TableStore | None:
    """Give the functions behind ``amanda run --format parquet`` and ``amanda query``.

    The first plugin that does not return None gives them; amanda-tools is asked last. A module with
    these functions will do. Raise an ``AmandaError`` where something is not installed.
    """


class Cluster(Protocol):
    """Runs Python on the machines of a cluster, for ``amanda sweep``."""

    async def run(self, words: Sequence[str], folder: Path) -> int:
        """Run ``python WORDS`` in the current folder, which all machines have.

        A task that is cancelled ends the process.

        Args:
            words: the arguments of Python.
            folder: for what it prints, ``output.txt`` and ``errors.txt``.

        Returns:
            The exit status.

        Raises:
            AmandaError: the process is lost.
        """

    def close(self) -> None:
        """Leave the cluster."""


@hookspec(firstresult=True)
def amanda_open_cluster(address: str) -> Cluster | None:
    """Connect to the cluster of ``RAY_ADDRESS``, which is set, for ``amanda sweep``.

    The first plugin that does not return None gives it; amanda-tools, which uses Ray, is asked
    last. Raise an ``AmandaError`` where there is no such cluster, or something is not installed.
    """
