"""The output of a run: result files, the page, the tools' summaries and the last line.

``Report(tools, folder, rank, sys.stdout).deliver(statistics, seconds)`` writes and prints it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from amanda.cli import pages
from amanda.engine.tool_code import paused
from amanda.errors import AmandaWarning, described
from amanda.files import write_json
from amanda.interface.tool import Tool
from amanda.registry import drivers, plugins
from amanda.results import RunReport, Table
from amanda.scope.scope import Statistics
from amanda.state import FAILED
from amanda.text import printable
from amanda.tools.op_filter import OpFilter
from amanda.tools.reporting import plain_text

_RECURSION_LIMIT = 1000
"""Python's default; results are written with at least this limit."""

_LINES = "\n\t"
"""Control characters that stay in messages: those of others may have several lines."""


def complain(message: str) -> None:
    """Print a message to stderr, if it is still open."""
    try:
        text = printable(f"amanda: {message}", keep=_LINES)
        print(text, file=sys.__stderr__ or sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


def described_error(error: BaseException) -> str:
    """An exception in one line, with what Amanda has noted about it."""
    parts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return "; ".join(part.removeprefix("amanda: ") for part in parts)


_UNSHOWN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def described_warning(warning: warnings.WarningMessage) -> str:
    """A warning in one line; "" for one that is for the authors of a package, as in Python.

    One that is not Amanda's comes from a plugin or a tool: the line says where from.
    """
    if issubclass(warning.category, AmandaWarning):
        return str(warning.message)
    if issubclass(warning.category, _UNSHOWN):
        return ""
    kind = warning.category.__name__
    return f"{warning.message} ({kind} of {warning.filename}:{warning.lineno})"


@attrs.frozen
class NamedTool:
    """A tool of a run and its name there, which messages and files have."""

    name: str
    tool: Tool


@attrs.frozen
class Rank:
    """The place of this process in a distributed run."""

    number: int = 0
    count: int = 1

    @classmethod
    def of_environment(cls) -> Rank:
        """Read ``RANK`` and ``WORLD_SIZE``, which ``torchrun`` and other launchers set."""
        number, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not (number and count):
            return cls()
        is_given = number.isdecimal() and count.isdecimal() and max(len(number), len(count)) < 10
        if is_given and int(number) < int(count):
            return cls(int(number), int(count))
        warnings.warn(
            f"RANK={number} and WORLD_SIZE={count} do not name a process of a distributed run: the "
            "results are written as those of a single process",
            AmandaWarning,
            stacklevel=2,
        )
        return cls()

    @property
    def suffix(self) -> str:
        """The end of the names of this rank's files; "" if there is only one process."""
        return f"-rank{self.number}" if self.count > 1 else ""


@attrs.define
class Report:
    """Writes and prints the results of a run; one that fails does not keep the others.

    Attributes:
        tools: the tools of the run.
        folder: the folder of the result files; None to write none.
        rank: the place among several processes; only the first one prints.
        out: the stream of the summaries.
        page: the path of the page; None to write none.
        op_filter: restricts the tools to some operators and executions; empty for no filter.
        facts: lines about the run for the page, by heading.
        complain: prints a message about a result that is lost.
        hint: a line before the last one, about what else to ask for; "" for none.
        has_driver: whether a driver was there for the tools; else their summaries are not printed.
        has_failed: whether the program has; where it did before its first operator, none are.
        error: why the run is one of wrong usage, for stderr; "" if it is not.
        written: the files that have been written.
    """

    tools: Sequence[NamedTool]
    folder: Path | None
    rank: Rank
    out: TextIO
    page: Path | None = None
    op_filter: OpFilter = attrs.field(factory=OpFilter)
    facts: dict[str, str] = attrs.field(factory=dict)
    complain: Callable[[str], None] = complain
    hint: str = ""
    has_driver: bool = True
    has_failed: bool = False
    error: str = ""
    written: list[Path] = attrs.field(factory=list)
    _collected: list[pages.Collector] = attrs.field(factory=list)
    _lost: list[str] = attrs.field(factory=list)

    def deliver(self, statistics: Statistics, seconds: float) -> None:
        """Write the files; print the summaries and the last line.

        A result that cannot be computed or written is named by ``complain``; nothing is raised.

        Args:
            statistics: the figures of the scope.
            seconds: duration of the run.
        """
        # The program may have left it lower than results need.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_LIMIT))
        # Framework calls of a tool that computes its result are not operators of the program.
        with paused():
            self._make_folders()
            for named in self.tools:
                self._write(named)
            if self.page is not None:
                self._try("the page", self._write_page, self.page, statistics, seconds)
            if self.rank.number == 0:
                self._print(statistics, seconds)
                # Without any operator the last line says why; these would add nothing.
                if self.tools and statistics.ops_seen:
                    for option in self.op_filter.unmatched():
                        self.complain(f"warning: {option}")

    def _make_folders(self) -> None:
        """Make the folders that the program has removed, as one does that clears its own output."""
        for folder in (self.folder, self.page and self.page.parent):
            if folder is not None:
                # A folder that cannot be made is reported with the results that need it.
                with contextlib.suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)

    def _write(self, named: NamedTool) -> None:
        if self.folder is None and self.page is None:
            return
        collected = pages.Collector(named.name, named.tool)
        self._collected.append(collected)
        self._try(named.name, self._collect, collected, named.tool)
        if self.folder is not None:
            self._try(named.name, self._write_files, collected, named.tool, self.folder)

    def _collect(self, collected: pages.Collector, tool: Tool) -> None:
        result = _method(tool, "result")
        if result is None:
            return
        # Kept before it is written: a page can show a result that the disk has no space for.
        collected.result = result()
        if self.folder is not None:
            path = self.folder / f"{collected.name}{self.rank.suffix}.json"
            write_json(path, self._with_rank(collected.result))
            self._note_files(collected, path)

    def _with_rank(self, result: Any) -> Any:
        """A result for the file of a rank: `amanda merge` notices whose result is missing."""
        if self.rank.count == 1 or not isinstance(result, Mapping) or "rank" in result:
            return result
        return {**result, "rank": {"number": self.rank.number, "count": self.rank.count}}

    def _write_files(self, collected: pages.Collector, tool: Tool, folder: Path) -> None:
        if write := _method(tool, "write_files"):
            answer = write(folder, f"{collected.name}{self.rank.suffix}")
            self._note_files(collected, *_paths(answer))

    def _note_files(self, collected: pages.Collector, *paths: Path) -> None:
        collected.files += paths
        self.written += paths

    def _write_page(self, path: Path, statistics: Statistics, seconds: float) -> None:
        facts = {
            **self.facts,
            "namespaces": pages.namespaces(part.result for part in self._collected),
            "versions": pages.versions(),
            "operators": describe_ops(statistics),
            **({"compiled code": explain_ways(statistics.compiled)} if statistics.compiled else {}),
            "not seen": explain_unseen(statistics),
            "time": describe_time(statistics, seconds),
        }
        if self.rank.count > 1:
            facts["rank"] = f"{self.rank.number} of {self.rank.count}"
        tools = [part.report(path.parent) for part in self._collected]
        names = ", ".join(part.name for part in tools)
        title = f"amanda run: {names}" if names else "amanda run"
        pages.write_page(path, RunReport(title=title, facts=facts, tools=tools))
        self.written.append(path)

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
        for named in self.tools if has_summaries else ():
            self._try(named.name, self._print_summary, named)
        if self.written:
            files = ", ".join(path.name for path in self.written)
            folder = self.folder or self.written[0].parent
            print(printable(f"amanda: wrote {files} in {folder}"), file=self.out)
        for line in self._lost:
            print(printable(f"amanda: {line}"), file=self.out)
        if self.hint:
            print(f"amanda: {self.hint}", file=self.out)
        print(printable(last_line(statistics, seconds)), file=self.out, flush=True)

    def _print_summary(self, named: NamedTool) -> None:
        if print_summary := _method(named.tool, "print_summary"):
            print_summary(self.out)
        elif result := _method(named.tool, "result"):
            print(_plain_summary(named.name, result()), file=self.out)

    def _try(self, name: str, give: Callable[..., None], *arguments: Any) -> None:
        try:
            give(*arguments)
        except (Exception, SystemExit) as error:
            # A broken pipe ends all printing; the caller redirects the stream.
            if isinstance(error, BrokenPipeError) and give == self._print_summary:
                raise
            about = f"{type(error).__name__}: {error}"
            what = name if give == self._write_page else f"a result of {name}"
            self.complain(f"{what} is lost: {about}")
            self._lost.append(f"{what} is lost: {about}")
            for collected in self._collected:
                if collected.name == name:
                    collected.lost.append(about)


@contextlib.contextmanager
def _any_character(stream: TextIO) -> Iterator[None]:
    """Within it, characters that the encoding of a stream lacks are written out."""
    errors, reconfigure = getattr(stream, "errors", None), getattr(stream, "reconfigure", None)
    if reconfigure is None or errors is None:
        yield
        return
    reconfigure(errors="backslashreplace")
    yield
    reconfigure(errors=errors)


def _method(tool: Tool, name: str) -> Callable[..., Any] | None:
    found = getattr(tool, name, None)
    return found if callable(found) else None


def last_line(statistics: Statistics, seconds: float) -> str:
    """The last line of a run: operators seen, compiled code, reasons for unseen ones, the cost."""
    compiled = explain_ways(statistics.compiled)
    return (
        f"amanda: {describe_ops(statistics)}; "
        f"{f'compiled code ran {compiled}; ' if compiled else ''}"
        f"not seen: {explain_unseen(statistics)}; "
        f"{describe_time(statistics, seconds)}"
    )


def describe_ops(statistics: Statistics) -> str:
    """The numbers of operators that were seen and instrumented."""
    count = statistics.ops_seen + statistics.backward_ops_seen
    return (
        f"{count} ops seen ({statistics.ops_seen} forward, "
        f"{statistics.backward_ops_seen} backward), {statistics.ops_instrumented} instrumented"
    )


def explain_ways(parts: Mapping[str, str]) -> str:
    """Count how the named parts of a program ran, as text; "" without any."""
    ways = collections.Counter(parts.values())
    return ", ".join(f"{way}: {count}" for way, count in ways.most_common())


def explain_unseen(statistics: Statistics) -> str:
    """The reasons for which operators were not seen, with their numbers where they are known."""
    missing = {**statistics.not_seen, **uncovered_frameworks()}
    missing |= dict.fromkeys(plugins.explain_unseen(drivers.covered_frameworks()), 0)
    if not missing and not any(e.cls.framework in sys.modules for e in drivers.drivers()):
        missing = {"no framework was imported": 0}
    reasons = (f"{reason} ({count})" if count else reason for reason, count in missing.items())
    return ", ".join(reasons) or "nothing known"


def describe_missing_driver(asked: Sequence[str]) -> str:
    """Why no driver was attached, and what to do.

    Args:
        asked: the drivers that the command line names.
    """
    if asked := asked or plugins.read_list("AMANDA_DRIVERS"):
        wanted = {name.rpartition("/")[2] for name in asked}
        named = [cls for cls, _ in drivers.registered_drivers() if cls.name in wanted]
        frameworks = " or ".join(dict.fromkeys(cls.framework for cls in named))
        return f"the program has not imported {frameworks} (asked for: {', '.join(asked)})"
    unseen = plugins.explain_unseen(drivers.covered_frameworks())
    if found := [*unseen, *uncovered_frameworks()]:
        return f"not seen: {', '.join(found)}"
    names = ", ".join(dict.fromkeys(e.cls.framework for e in drivers.drivers()))
    if not names:
        return f"no driver is installed; {plugins.suggest_driver()}"
    return (
        f"the program has not imported a framework that has a driver ({names}) in this process; "
        "a process that it starts needs an amanda run of its own"
    )


def describe_time(statistics: Statistics, seconds: float) -> str:
    """The time spent in the tools' routines and analyses, and its share of the run."""
    share = 100 * statistics.tool_seconds / seconds if seconds > 0 else 0.0
    return f"tools took {statistics.tool_seconds:.2f} s of {seconds:.2f} s ({share:.0f}%)"


def uncovered_frameworks() -> dict[str, int]:
    """A reason for the last line for each imported framework that no driver instruments."""
    usable = drivers.covered_frameworks()
    return {
        f"all of {framework}, which has no usable driver (see: amanda drivers)": 0
        for framework in dict.fromkeys(
            [*plugins.suggested_drivers(), *(cls.framework for cls in FAILED)]
        )
        if framework in sys.modules and framework not in usable
    }


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
