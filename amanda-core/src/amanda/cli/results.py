"""What a run leaves behind: files, summaries and the last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from amanda.cli import pages
from amanda.files import write_json
from amanda.interface.tool import Tool
from amanda.registry import drivers, plugins
from amanda.results import RunReport, Table
from amanda.scope.scope import Statistics
from amanda.state import FAILED, STATE
from amanda.tools.op_filter import OpFilter
from amanda.tools.reporting import plain_text


def complain(message: str) -> None:
    """A message on stderr, if there still is one."""
    try:
        print(f"amanda: {message}", file=sys.__stderr__ or sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


@attrs.frozen
class NamedTool:
    """A tool of this run and the name that its messages and files carry."""

    name: str
    tool: Tool


@attrs.frozen
class Rank:
    """The place of this process in a distributed run."""

    number: int = 0
    count: int = 1

    @classmethod
    def of_environment(cls) -> Rank:
        """What ``torchrun`` and its like say in ``RANK`` and ``WORLD_SIZE``."""
        number, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        return cls(int(number), int(count)) if number.isdecimal() and count.isdecimal() else cls()

    @property
    def suffix(self) -> str:
        """What its files' names end in; "" where there is only one process."""
        return f"-rank{self.number}" if self.count > 1 else ""


@attrs.define
class Report:
    """Gives out the results of a run, and loses none because of another.

    Attributes:
        tools: the tools of the run.
        folder: where files go; None for none.
        rank: of several processes only the first prints.
        out: where summaries go.
        page: where the page goes; None for none.
        op_filter: restricts the tools to some operators and executions; empty for no filter.
        facts: what the page says of the run, beside what happened under the scope.
        complain: says that a result is lost.
        written: the files written.
    """

    tools: Sequence[NamedTool]
    folder: Path | None
    rank: Rank
    out: TextIO
    page: Path | None = None
    op_filter: OpFilter = attrs.field(factory=OpFilter)
    facts: dict[str, str] = attrs.field(factory=dict)
    complain: Callable[[str], None] = complain
    written: list[Path] = attrs.field(factory=list)
    _collected: list[pages.Collector] = attrs.field(factory=list)

    def give(self, statistics: Statistics, seconds: float) -> None:
        """Write the files; print the summaries and the last line.

        A result that cannot be given is named on stderr; nothing is raised.
        """
        # What a tool computes for its result is not the program's.
        STATE.paused += 1
        try:
            for named in self.tools:
                self._write(named)
            if self.page is not None:
                self._try("the page", self._draw, self.page, statistics, seconds)
            if self.rank.number == 0:
                self._print(statistics, seconds)
                # Where nothing ran at all, that is what there is to say.
                for option in (
                    self.op_filter.unmatched() if self.tools and statistics.ops_seen else ()
                ):
                    self.complain(f"warning: {option} fits no operator that the tools have met")
        finally:
            STATE.paused -= 1

    def _write(self, named: NamedTool) -> None:
        if self.folder is None and self.page is None:
            return
        collected = pages.Collector(named.name, named.tool)
        self._collected.append(collected)
        self._try(named.name, self._take, collected, named.tool)
        if self.folder is not None:
            self._try(named.name, self._files, collected, named.tool, self.folder)

    def _take(self, collected: pages.Collector, tool: Tool) -> None:
        result = _method(tool, "result")
        if result is None:
            return
        # A page has use for a result that cannot be written.
        collected.result = result()
        if self.folder is not None:
            path = self.folder / f"{collected.name}{self.rank.suffix}.json"
            write_json(path, collected.result)
            self._wrote(collected, path)

    def _files(self, collected: pages.Collector, tool: Tool, folder: Path) -> None:
        if write := _method(tool, "write_files"):
            self._wrote(collected, *(write(folder, f"{collected.name}{self.rank.suffix}") or ()))

    def _wrote(self, collected: pages.Collector, *paths: Path) -> None:
        collected.files += paths
        self.written += paths

    def _draw(self, path: Path, statistics: Statistics, seconds: float) -> None:
        facts = {
            **self.facts,
            "namespaces": pages.namespaces(part.result for part in self._collected),
            "versions": pages.versions(),
            "operators": seen(statistics),
            "not seen": not_seen(statistics),
            "time": took(statistics, seconds),
        }
        if self.rank.count > 1:
            facts["rank"] = f"{self.rank.number} of {self.rank.count}"
        tools = [part.report(path.parent) for part in self._collected]
        names = ", ".join(part.name for part in tools)
        title = f"amanda run: {names}" if names else "amanda run"
        pages.write_page(path, RunReport(title=title, facts=facts, tools=tools))
        self.written.append(path)

    def _print(self, statistics: Statistics, seconds: float) -> None:
        try:
            # The program's own output comes first, also through a pipe.
            self.out.flush()
            for named in self.tools:
                self._try(named.name, self._summary, named)
            if self.written:
                files = ", ".join(path.name for path in self.written)
                folder = self.folder or self.written[0].parent
                print(f"amanda: wrote {files} in {folder}", file=self.out)
            print(last_line(statistics, seconds), file=self.out, flush=True)
        except BrokenPipeError:
            # The reader is gone; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())
        except (OSError, ValueError) as error:
            self.complain(f"the summary is lost: {error}")

    def _summary(self, named: NamedTool) -> None:
        if print_summary := _method(named.tool, "print_summary"):
            print_summary(self.out)
        elif result := _method(named.tool, "result"):
            print(_plain_summary(named.name, result()), file=self.out)

    def _try(self, name: str, give: Callable[..., None], *arguments: Any) -> None:
        try:
            give(*arguments)
        except (Exception, SystemExit) as error:
            if isinstance(error, BrokenPipeError) and give == self._summary:
                raise
            about = f"{type(error).__name__}: {error}"
            what = name if give == self._draw else f"a result of {name}"
            self.complain(f"{what} is lost: {about}")
            for collected in self._collected:
                if collected.name == name:
                    collected.lost.append(about)


def _method(tool: Tool, name: str) -> Callable[..., Any] | None:
    found = getattr(tool, name, None)
    return found if callable(found) else None


def last_line(statistics: Statistics, seconds: float) -> str:
    """Operators seen and instrumented, what was not seen and why, and the cost."""
    return (
        f"amanda: {seen(statistics)}; not seen: {not_seen(statistics)}; {took(statistics, seconds)}"
    )


def seen(statistics: Statistics) -> str:
    """How many operators were seen and instrumented."""
    count = statistics.ops_seen + statistics.backward_ops_seen
    return (
        f"{count} ops seen ({statistics.ops_seen} forward, "
        f"{statistics.backward_ops_seen} backward), {statistics.ops_instrumented} instrumented"
    )


def not_seen(statistics: Statistics) -> str:
    """What was not seen, and why."""
    missing = {**statistics.not_seen, **uncovered_frameworks()}
    if not missing and not any(e.cls.framework in sys.modules for e in drivers.drivers()):
        missing = {"no framework was imported": 0}
    reasons = (f"{reason} ({count})" if count else reason for reason, count in missing.items())
    return ", ".join(reasons) or "nothing known"


def took(statistics: Statistics, seconds: float) -> str:
    """The tools' share of the time."""
    share = 100 * statistics.tool_seconds / seconds if seconds > 0 else 0.0
    return f"tools took {statistics.tool_seconds:.2f} s of {seconds:.2f} s ({share:.0f}%)"


def uncovered_frameworks() -> dict[str, int]:
    """The imported frameworks that no driver could instrument, as reasons of the last line."""
    usable = {entry.cls.framework for entry in drivers.drivers() if not entry.reason}
    return {
        f"everything of {framework}, for want of a driver (amanda drivers tells why)": 0
        for framework in dict.fromkeys(
            [*plugins.KNOWN_FRAMEWORKS, *(cls.framework for cls in FAILED)]
        )
        if framework in sys.modules and framework not in usable
    }


def _plain_summary(title: str, result: Any) -> str:
    summary = result.get("summary", result) if isinstance(result, Mapping) else {"result": result}
    rows = [(key, value) for key, value in summary.items()]
    return plain_text(Table(title, ("figure", "value"), rows))
