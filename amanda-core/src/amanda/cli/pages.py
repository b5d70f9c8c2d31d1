"""The page of a run, ``amanda run --html``: collects its contents and writes the file.

:class:`Collector` asks each tool for its contents as plain data; :func:`draw` gives them to the
plugin that draws pages (the hook ``amanda_render_report``). :func:`report_of` makes the contents
from tools alone, for ``amanda.report`` and notebooks.
"""

from __future__ import annotations

import html
import io
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.errors import AmandaError, described
from amanda.files import plain_data, replaced
from amanda.interface.points import PointContext
from amanda.interface.specs import specs_of
from amanda.interface.tool import Tool, check_tool, deferrable
from amanda.registry import distributions, drivers, plugins
from amanda.results import Chart, RunReport, Table, ToolReport
from amanda.scope.switches import vanilla

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
    text = draw(report)
    with replaced(path) as file:
        file.write(text)


def draw(report: RunReport) -> str:
    """Let a plugin draw a page; returns its text.

    Raises:
        PageError: no plugin has drawn it.
    """
    renderer = plugins.report_renderer()
    text = None if renderer is None else renderer(report=report)
    if text is None:
        raise PageError(_no_renderer())
    if not isinstance(text, str):
        raise PageError(f"amanda_render_report() gave {described(text)}, not the text of a page")
    return text


_DARK = (
    'body[data-jp-theme-light="false"]',  # JupyterLab, Notebook 7, and pages of nbconvert
    'body[data-vscode-theme-kind$="dark"]',
    'body[data-vscode-theme-kind="vscode-high-contrast"]',
    'html[theme="dark"]',  # Colab
    'html[data-theme="dark"]',  # sites made by Sphinx
)
_LIGHT = (
    'body[data-jp-theme-light="true"]',
    'body[data-vscode-theme-kind$="light"]',
    'html[theme="light"]',
    'html[data-theme="light"]',
)
"""CSS selectors of notebooks' light theme. A frame takes its colour scheme from its element; if no
selector matches, it follows the browser."""

_HEIGHT = "40rem"


def frame_of(report: RunReport) -> str:
    """The HTML of a frame for notebooks with a page, in the colours of the notebook's theme.

    The page has no access to the notebook, loads nothing, and runs no script but its own; the lower
    edge of the frame can be drawn down.

    Raises:
        PageError: no plugin has drawn the page.
    """
    schemes = "".join(
        f"{','.join(f'{mark} .amanda-frame' for mark in marks)}{{color-scheme:{scheme}}}"
        for marks, scheme in ((_DARK, "dark"), (_LIGHT, "light"))
    )
    return (
        f"<style>{schemes}</style>"
        f'<div style="height:{_HEIGHT};min-height:8rem;resize:vertical;overflow:hidden">'
        '<iframe class="amanda-frame" sandbox="allow-scripts" '
        'style="display:block;width:100%;height:100%;border:0" '
        f'srcdoc="{html.escape(draw(report))}"></iframe></div>'
    )


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


def has_results(tool: Tool) -> bool:
    """True if a tool has a method that gives what a page shows."""
    return any(method_of(tool, n) for n in ("result", "tables", "charts", "print_summary"))


def report_of(tools: Sequence[Tool]) -> RunReport:
    """The contents of a page of tools alone, such as those of a scope that has ended.

    Raises:
        TypeError: one is no tool.
        ValueError: one has no results.
        Exception: of its ``result()``.
    """
    for tool in tools:
        check_tool(tool, "amanda.report()")
        if not has_results(tool):
            raise ValueError(
                f"amanda.report(): {type(tool).__name__} has no results: it needs a method "
                "result(), tables(), charts() or print_summary()"
            )
    names = distinct([str(getattr(tool, "name", type(tool).__name__)) for tool in tools])
    # Framework calls of a tool that computes its result are not operators of the program.
    with vanilla():
        parts = [Collector(name, tool) for name, tool in zip(names, tools, strict=True)]
        for part in parts:
            part.result = (method_of(part.tool, "result") or _no_result)()
        sections = [part.report(Path()) for part in parts]
    facts = {"namespaces": namespaces(part.result for part in parts), "versions": versions()}
    return RunReport(title=", ".join(names), facts=facts, tools=sections)


def frame_of_tool(tool: Tool) -> str | None:
    """The HTML of a tool's page for notebooks; None without results, or without a plugin for it."""
    can_draw = plugins.report_renderer() is not None and has_results(tool)
    return frame_of(report_of([tool])) if can_draw else None


def _no_result() -> None:
    """Stands for the ``result()`` of a tool that has none."""


def distinct(names: Sequence[str]) -> list[str]:
    """A name for each tool, which no other one has: with a number from the second one on."""
    found: list[str] = []
    for name in names:
        number, unique = 1, name
        # A package may call a tool count-2.
        while unique in found or (number > 1 and unique in names):
            number += 1
            unique = f"{name}-{number}"
        found.append(unique)
    return found


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
