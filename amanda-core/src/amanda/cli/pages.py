"""The page of a run, ``amanda run --html``: collects its contents and writes the file.

:class:`Collector` asks each tool for its contents as plain data; :func:`write_page` gives them to
the plugin that draws pages (the hook ``amanda_render_report``) and writes the text that it returns.
"""

from __future__ import annotations

import io
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from amanda.errors import AmandaError, described
from amanda.files import plain_data, replaced
from amanda.interface.points import PointContext
from amanda.interface.specs import specs_of
from amanda.interface.tool import Tool, deferrable
from amanda.registry import distributions, drivers, plugins
from amanda.results import Chart, RunReport, Table, ToolReport

ALONE = "amanda-report"
"""File name, without suffix, of a page that is not written into a folder of results."""


class PageError(AmandaError):
    """The page of a run cannot be made."""


def page_path(folder: Path | None, suffix: str) -> Path:
    """The path of a page: in the folder of the results, else in the current folder.

    Args:
        folder: the folder of the results; None if no results are written.
        suffix: the end of the file name, for the rank.
    """
    name = ALONE if folder is None else "report"
    return (folder or Path()) / f"{name}{suffix}.html"


def check_page(path: Path) -> None:
    """Check that a plugin draws pages and that no folder has the name of the page.

    Raises:
        PageError: no plugin does, or a folder has; the message says what to do.
    """
    if plugins.report_renderer() is None:
        raise PageError(f"--html: {_no_renderer()}")
    if path.is_dir():
        raise PageError(f"--html: {path} is a folder; remove it")


def _no_renderer() -> str:
    return f"no plugin draws pages; {plugins.advise('amanda-tools')}"


def write_page(path: Path, report: RunReport) -> None:
    """Let a plugin draw a page, and write it.

    Raises:
        PageError: no plugin has drawn it.
        OSError: it cannot be written.
    """
    renderer = plugins.report_renderer()
    text = None if renderer is None else renderer(report=report)
    if text is None:
        raise PageError(_no_renderer())
    if not isinstance(text, str):
        raise PageError(f"amanda_render_report() gave {described(text)}, not the text of a page")
    with replaced(path) as file:
        file.write(text)


_CALL = re.compile(r"#\d+")
"""The number of a repeated call in an id."""


class ModuleTensors(Tool):
    """Notes what modules are given and what they return, in the last step where there is one."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self._now: dict[str, dict[str, Any]] = {}
        self._in_step: dict[str, dict[str, Any]] = {}
        self.add_inst_for_module(self._left, exit=True)
        self.add_inst_for_iteration(self._end_step, end=True)

    @deferrable
    def _left(self, point: PointContext) -> None:
        if point.outputs is None:
            return
        path = _CALL.sub("", point.id)
        row = {
            "path": path,
            "type": "" if point.target is None else type(point.target).__name__,
            "inputs": specs_of(point.inputs),
            "outputs": specs_of(point.outputs),
        }
        if path == point.id:
            self._now[path] = row
        else:
            self._now.setdefault(path, row)

    def _end_step(self, _: PointContext) -> None:
        # What is evaluated after a step is not of it.
        self._in_step |= self._now
        self._now = {}

    def rows(self) -> list[dict[str, Any]]:
        """The ``modules`` of :class:`~amanda.results.RunReport`."""
        return [
            {**row, **{key: [s and s.row() for s in row[key]] for key in ("inputs", "outputs")}}
            for row in (self._now | self._in_step).values()
        ]


@attrs.define
class Collector:
    """Collects the contents of a tool's section of the page; a failure is noted, not raised.

    Attributes:
        name: the tool's name in this run.
        tool: the tool.
        result: return value of its ``result()``; None without one.
        files: the files that it has written.
        lost: a message for each part that failed.
    """

    name: str
    tool: Tool
    result: Any = None
    files: list[Path] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)

    def report(self, folder: Path) -> ToolReport:
        """The tool's section of a page in `folder`."""
        tables = self._ask("tables", Table)
        nothing = self.result is None and not tables
        # In a list of one item: _try() takes functions that give several values.
        result = self._try("result", lambda: [plain_data(self.result)])
        return ToolReport(
            name=self.name,
            about=_first_sentence(type(self.tool)),
            result=result[0] if result else None,
            tables=tables,
            charts=self._ask("charts", Chart),
            text=self._print_summary() if nothing else "",
            files=[p.relative_to(folder).as_posix() for p in self.files if folder in p.parents],
            lost=self.lost,
        )

    def _ask(self, name: str, kind: type[Any]) -> list[Any]:
        found = self._try(name, lambda: self._items(name))
        wrong = [item for item in found if not isinstance(item, kind)]
        if wrong:
            self.lost.append(f"{name}: {described(wrong[0])} is not a {kind.__name__}")
        return [item for item in found if isinstance(item, kind)]

    def _items(self, name: str) -> list[Any]:
        method = method_of(self.tool, name)
        return [*method()] if method else []

    def _print_summary(self) -> str:
        """The printed summary of a tool that has neither a result nor tables."""
        file = io.StringIO()

        def show() -> list[Any]:
            method = method_of(self.tool, "print_summary")
            return [method(file)] if method else []

        self._try("print_summary", show)
        return file.getvalue()

    def _try(self, what: str, give: Callable[[], Iterable[Any]]) -> list[Any]:
        try:
            return list(give())
        # A result may be as broken as the tool: the page shows the message in its place.
        except (Exception, SystemExit) as error:
            self.lost.append(f"{what}: {type(error).__name__}: {error}")
            return []


def method_of(tool: Tool, name: str) -> Callable[..., Any] | None:
    """A method that a tool may have; None without it."""
    found = getattr(tool, name, None)
    return found if callable(found) else None


def versions() -> str:
    """The versions of Python, of Amanda's distributions and of the imported frameworks."""
    found = {"Python": platform.python_version(), **distributions.amanda_versions()}
    frameworks = dict.fromkeys(cls.framework for cls, _ in drivers.registered_drivers())
    for name in frameworks:
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = version
    return ", ".join(f"{name} {version}" for name, version in found.items())


def namespaces(results: Iterable[Any]) -> str:
    """The namespaces in results of the common form (``ReportingTool.result()``), as one text."""
    found = {
        str(name)
        for result in results
        if isinstance(result, Mapping) and isinstance(result.get("namespaces"), (list, tuple))
        for name in result["namespaces"]
    }
    return ", ".join(sorted(found))


def _first_sentence(cls: type) -> str:
    text = str(cls.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(text.split())
