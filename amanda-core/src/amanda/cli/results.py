"""The output of a run: result files, the page, and the tools' summaries.

``Report(tools, folder, rank, sys.stdout).deliver(statistics, seconds)`` writes and prints it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from amanda.cli import last_line, pages
from amanda.cli.messages import WRONG_USAGE, complain, described_error
from amanda.cli.rank import Rank
from amanda.cli.window import Window
from amanda.engine.tool_code import paused
from amanda.errors import AmandaError, described
from amanda.files import plain_data, write_json
from amanda.interface.tool import StopRun, Tool
from amanda.python.text import printable
from amanda.registry import plugins
from amanda.results import RunReport, Table
from amanda.scope.apply import apply
from amanda.scope.scope import Statistics
from amanda.tools.op_filter import OpFilter
from amanda.tools.reporting import ReportingTool, plain_text

_RECURSION_LIMIT = 1000
"""Python's default; results are written with at least this limit."""


@attrs.frozen
class NamedTool:
    """A tool of a run and its name there, which messages and files have."""

    name: str
    tool: Tool


@attrs.define
class Report:
    """Writes and prints the results of a run; a result that fails does not prevent the others from
    being written.

    Attributes:
        tools: the tools of the run.
        folder: the folder of the result files; None to write none.
        rank: the place among several processes; only the first one prints.
        out: the stream of the summaries.
        page: the path of the page; None to write none.
        op_filter: restricts the tools to some operators and executions; empty for no filter.
        facts: lines about the run for the page, by heading.
        complain: prints a message about a result that is lost.
        show: shows a page; gets its HTML in a frame, and the summaries for where no HTML is shown.
            None to print the summaries only.
        hint: what else to ask for, said before the program begins; "" for nothing.
        has_driver: True if a driver was there for the tools; else their summaries are not printed.
        has_failed: True if the program failed; if it failed before its first operator, no summaries
            are printed.
        error: why the run is one of wrong usage, for stderr; "" if it is not.
        stopped: the reason for which a tool has ended the program; "" if none has.
        written: the files that have been written.
        modules: notes the tensors of modules, for the page.
        graph: records the graph for the page, if no tool of the run does.
        tables: writes the rows of the tools as tables, in place of their JSON; None for JSON.
        window: the part of the run in which the tools run; None for all of it.
    """

    tools: Sequence[NamedTool]
    folder: Path | None
    rank: Rank
    out: TextIO
    page: Path | None = None
    op_filter: OpFilter = attrs.field(factory=OpFilter)
    facts: dict[str, str] = attrs.field(factory=dict)
    complain: Callable[[str], None] = complain
    show: Callable[[str, str], None] | None = None
    hint: str = ""
    has_driver: bool = True
    has_failed: bool = False
    error: str = ""
    stopped: str = ""
    written: list[Path] = attrs.field(factory=list)
    modules: pages.ModuleTensors = attrs.field(factory=pages.ModuleTensors)
    graph: Any = None
    tables: Any = None
    window: Window | None = None
    _collected: list[pages.Collector] = attrs.field(factory=list)
    _lost: list[str] = attrs.field(factory=list)

    def scope(self, drivers: Sequence[str] | None) -> apply:
        """The scope of the tools, and of what the page needs.

        Raises:
            FileError: a file that a tool writes from the begin on cannot be written.
        """
        for named in self.tools if self.folder is not None else ():
            if begin := pages.method_of(named.tool, "begin_files"):
                begin(self.folder, f"{named.name}{self.rank.suffix}")
        tools = [named.tool for named in self.tools]
        if self._has_page:
            self.graph = _graph_tool(tools)
            tools += [self.modules, *([self.graph] if self.graph is not None else ())]
        tools += [self.tables] if self.tables is not None else []
        scope = apply(*tools, drivers=drivers, op_filter=self.op_filter or None)
        if self.window is None:
            return scope
        self.window.begun, self.window.deliver = self._begin_window, self.deliver
        return self.window.around(scope, drivers)

    def _begin_window(self, step: int) -> None:
        self.facts["tools began"] = f"after step {step}"
        if self.tables is not None:
            self.tables.begin(step)

    def note_end(self, how: str | BaseException) -> None:
        """Note how the program has ended, or what it has raised; the first of several holds."""
        if isinstance(how, StopRun):
            self.stopped = self.stopped or str(how) or "by a tool"
            how = f"stopped: {self.stopped}"
        # The type only: str() of the exception may run code of the program.
        text = how if isinstance(how, str) else f"by {type(how).__name__}"
        self.facts.setdefault("program ended", text)

    def finish(self) -> int:
        """Let tools do what they do once a program has ended well, while its objects are there.

        Returns the exit status: that of wrong usage if a tool cannot.
        """
        status = 0
        for tool in self.tools_with_end:
            try:
                tool.finish_run(self.op_filter)
            except Exception as error:
                is_told = isinstance(error, (AmandaError, OSError))
                self.complain(f"error: {error if is_told else described_error(error)}")
                status = WRONG_USAGE
        return status

    @property
    def tools_with_end(self) -> list[Any]:
        """The tools that do something when the program has ended, in the first process only."""
        tools = [named.tool for named in self.tools if self.rank.number == 0]
        return [tool for tool in tools if getattr(tool, "needs_end", False)]

    @property
    def _has_page(self) -> bool:
        return self.page is not None or self.show is not None

    def deliver(self, statistics: Statistics, seconds: float) -> None:
        """Write the files; print the summaries and the last line.

        A result that cannot be computed or written is named by ``complain``; nothing is raised.

        Args:
            statistics: the figures of the scope.
            seconds: duration of the run.
        """
        if self.window is not None:
            if not self.window.has_results:
                self._explain_none(self.window)
                return
            self.window.has_results = False
            statistics, seconds = self.window.scope.statistics, self.window.seconds
            self.written, self._collected, self._lost = [], [], []
        # The program may have left it lower than results need.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_LIMIT))
        # Framework calls of a tool that computes its result are not operators of the program.
        with paused():
            self._make_folders()
            for named in self.tools:
                self._write(named)
            if self.tables is not None:
                self.tables.has_ended = not self.has_failed
                with self._noted("a part of the tables"):
                    self.written += _paths(self.tables.write_files(self.folder, ""))
            if self.page is not None:
                with self._noted("the page"):
                    report = self._run_report(statistics, seconds, self.page.parent)
                    pages.write_page(self.page, report)
                    self.written.append(self.page)
            if self.rank.number == 0:
                self._print(statistics, seconds)
                # Without any operator the last line says why; these would add nothing.
                if self.tools and statistics.ops_seen:
                    for option in self.op_filter.unmatched():
                        self.complain(f"warning: {option}")

    def _explain_none(self, window: Window) -> None:
        """Say why there are no results, if there have been none before."""
        unbegun = "warning: the program ended before the tools began"
        why = f"error: {self.error}" if self.error else unbegun
        if not (self.rank.number or self.has_failed or window.seconds):
            self.complain(why)

    def _make_folders(self) -> None:
        """Make the folders that the program has removed, as one does that clears its own output."""
        for folder in (self.folder, self.page and self.page.parent):
            if folder is not None:
                # A folder that cannot be made is reported with the results that need it.
                with contextlib.suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)

    def _write(self, named: NamedTool) -> None:
        if self.folder is None and not self._has_page:
            return
        collected = pages.Collector(named.name, named.tool)
        self._collected.append(collected)
        stem = f"{named.name}{self.rank.suffix}"
        with self._noted(f"a result of {named.name}", collected):
            if result := pages.method_of(named.tool, "result"):
                # Kept before it is written: a page shows a result that the disk has no space for.
                collected.result = result()
                in_tables = self.tables is not None and isinstance(named.tool, ReportingTool)
                if self.folder is not None and not in_tables:
                    path = self.folder / f"{stem}.json"
                    write_json(path, self._with_rank(collected.result))
                    self._note_files(collected, path)
        if self.folder is not None:
            with self._noted(f"a result of {named.name}", collected):
                if write := pages.method_of(named.tool, "write_files"):
                    self._note_files(collected, *_paths(write(self.folder, stem)))

    def _with_rank(self, result: Any) -> Any:
        """A result for the file of a rank: `amanda merge` notices whose result is missing."""
        if self.rank.count == 1 or not isinstance(result, Mapping) or "rank" in result:
            return result
        return {**result, "rank": attrs.asdict(self.rank.located())}

    def _note_files(self, collected: pages.Collector, *paths: Path) -> None:
        collected.files += paths
        self.written += paths

    def _run_report(self, statistics: Statistics, seconds: float, folder: Path) -> RunReport:
        """The contents of the page, which is in `folder`."""
        compiled = last_line.explain_ways(statistics.compiled)
        facts = {
            **self.facts,
            "namespaces": pages.namespaces(part.result for part in self._collected),
            "versions": pages.versions(),
            "operators": last_line.describe_ops(statistics),
            **({"compiled code": compiled} if compiled else {}),
            "not seen": last_line.explain_unseen(statistics),
            "time": last_line.describe_time(statistics, seconds),
        }
        if self.rank.count != 1:
            facts["rank"] = str(self.rank.located())
        tools = [part.report(folder) for part in self._collected]
        names = ", ".join(part.name for part in tools)
        title = f"amanda run: {names}" if names else "amanda run"
        graph: Mapping[str, Any] = {}
        if self.graph is not None:
            with self._noted("the graph of the page"):
                graph = plain_data(self.graph.result())
        rows = self.modules.rows()
        return RunReport(title=title, facts=facts, tools=tools, modules=rows, graph=graph)

    def _print(self, statistics: Statistics, seconds: float) -> None:
        is_ours = False
        try:
            # The program's output comes before the summaries, also through a pipe.
            self.out.flush()
            is_ours = True
            with _any_character(self.out):
                self._print_parts(statistics, seconds)
        except (OSError, ValueError, AttributeError) as error:
            # AttributeError: without a standard output, sys.stdout is None.
            is_unread = isinstance(error, BrokenPipeError)
            if not is_unread:
                why = "standard output is closed" if self.out is None else error
                self.complain(f"the summary is lost: {why}")
            if isinstance(error, OSError) and (is_ours or is_unread):
                # Nobody reads the pipe, or the disk is full: without this Python tries once more
                # to write our text when it exits, reports a second error and changes the status.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())

    def _print_parts(self, statistics: Statistics, seconds: float) -> None:
        if self.error:
            self.complain(f"error: {self.error}")
        ops = statistics.ops_seen + statistics.backward_ops_seen
        # Tables of zeros would say nothing.
        has_summaries = self.has_driver and (ops or not self.has_failed)
        if has_summaries:
            self._give_summaries(statistics, seconds)
        if self.written:
            files = ", ".join(path.name for path in self.written)
            folder = self.folder or self.written[0].parent
            print(printable(f"amanda: wrote {files} in {folder}"), file=self.out)
        for line in self._lost:
            print(printable(f"amanda: {line}"), file=self.out)
        line = last_line.last_line(statistics, seconds, self.stopped)
        print(printable(line), file=self.out, flush=True)

    def _give_summaries(self, statistics: Statistics, seconds: float) -> None:
        """Print the summaries, or show the page with them."""
        out = self.out if self.show is None else io.StringIO()
        for named in self.tools:
            # A broken pipe ends all printing; _print() redirects the stream.
            with self._noted(f"a result of {named.name}", passing=BrokenPipeError):
                _print_summary(named, out)
        if self.show is not None and isinstance(out, io.StringIO):
            page = ""
            with self._noted("the page"):
                page = pages.frame_of(self._run_report(statistics, seconds, Path()))
            self.show(page, out.getvalue())

    @contextlib.contextmanager
    def _noted(
        self,
        what: str,
        collected: pages.Collector | None = None,
        passing: type[Exception] | tuple[()] = (),
    ) -> Iterator[None]:
        """Note that a result is lost, instead of an exception within it.

        Args:
            what: the result, for the message.
            collected: the tool's part of the page, which shows the message; None for none.
            passing: exceptions that are raised.
        """
        try:
            yield
        except passing:
            raise
        except (Exception, SystemExit) as error:
            about = f"{type(error).__name__}: {error}"
            self.complain(f"{what} is lost: {about}")
            self._lost.append(f"{what} is lost: {about}")
            if collected is not None:
                collected.lost.append(about)


def _graph_tool(tools: Sequence[Tool]) -> Any:
    """Create the tool that records the graph; None if one of the run does, or none is installed."""
    # The user has not asked for it: one that cannot be made ends no run.
    with contextlib.suppress(Exception):
        return plugins.registry().manager.hook.amanda_record_graph(tools=tools)
    return None


def _print_summary(named: NamedTool, out: TextIO) -> None:
    if print_summary := pages.method_of(named.tool, "print_summary"):
        print_summary(out)
    elif result := pages.method_of(named.tool, "result"):
        print(_plain_summary(named.name, result()), file=out)


@contextlib.contextmanager
def _any_character(stream: TextIO) -> Iterator[None]:
    """Within it, characters that the encoding of a stream lacks are written out."""
    errors, reconfigure = getattr(stream, "errors", None), getattr(stream, "reconfigure", None)
    if reconfigure is None or errors is None:
        yield
        return
    reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        reconfigure(errors=errors)


def _paths(answer: Any) -> list[Path]:
    """The files that ``write_files()`` of a tool says to have written, one or several.

    Raises:
        TypeError: something other than paths.
    """
    given = [answer] if isinstance(answer, (str, os.PathLike)) else answer
    try:
        return [Path(path) for path in given or ()]
    except TypeError:
        raise TypeError(
            f"write_files() returned {described(answer)}; it returns the paths of its files"
        ) from None


def _plain_summary(title: str, result: Any) -> str:
    summary = result.get("summary", result) if isinstance(result, Mapping) else {"result": result}
    if not isinstance(summary, Mapping):
        summary = {"summary": summary}
    return plain_text(Table(title, ("figure", "value"), list(summary.items())))
