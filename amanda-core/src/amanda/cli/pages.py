"""The page of a run, ``amanda run --html``: what it is about, and the file.

How the page looks is the matter of a plugin (``amanda_render_report``): amanda-core
collects plain data.
"""

from __future__ import annotations

import io
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from amanda.errors import AmandaError
from amanda.files import plain_data, replaced
from amanda.interface.tool import Tool
from amanda.registry import distributions, drivers, plugins
from amanda.results import Chart, RunReport, Table, ToolReport

ALONE = "amanda-report"
"""Name of the page that is not in a folder of results."""


class PageError(AmandaError):
    """The page of a run cannot be made."""


def page_of(folder: Path | None, suffix: str) -> Path:
    """Where the page of a run goes: with its results, else into the current folder."""
    name = ALONE if folder is None else "report"
    return (folder or Path()) / f"{name}{suffix}.html"


def check_page(path: Path) -> None:
    """See that a plugin draws pages and that the file can take its place.

    Raises:
        PageError: it is not so; the message says what to do.
    """
    if plugins.report_renderer() is None:
        raise PageError(f"--html: {_nobody()}")
    if path.is_dir():
        raise PageError(f"--html: {path} is a folder; remove it")


def _nobody() -> str:
    why = plugins.not_loaded("amanda-tools")
    do = f" ({'; '.join(why)})" if why else "; try: pip install amanda-tools"
    return f"no plugin draws pages{do}"


def write_page(path: Path, report: RunReport) -> None:
    """Draw the page and write it.

    Raises:
        PageError: no plugin has drawn it.
        OSError: it cannot be written.
    """
    renderer = plugins.report_renderer()
    text = None if renderer is None else renderer(report=report)
    if text is None:
        raise PageError(_nobody())
    with replaced(path) as file:
        file.write(text)


@attrs.define
class Collector:
    """Asks a tool for what the page shows, and notes what it cannot give.

    Attributes:
        name: the tool's name in this run.
        tool: the tool.
        result: what its ``result()`` gave.
        files: what it has written.
        lost: messages about what could not be given.
    """

    name: str
    tool: Tool
    result: Any = None
    files: list[Path] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)

    def report(self, folder: Path) -> ToolReport:
        """All that the tool has to say on a page in `folder`."""
        tables = self._asked("tables", Table)
        nothing = self.result is None and not tables
        return ToolReport(
            name=self.name,
            about=_first_sentence(type(self.tool)),
            result=plain_data(self.result),
            tables=tables,
            charts=self._asked("charts", Chart),
            text=self._printed() if nothing else "",
            files=[p.relative_to(folder).as_posix() for p in self.files if folder in p.parents],
            lost=self.lost,
        )

    def _asked(self, name: str, kind: type[Any]) -> list[Any]:
        def asked() -> Iterable[Any]:
            give = getattr(self.tool, name, None)
            return give() if callable(give) else ()

        return [item for item in self._try(name, asked) if isinstance(item, kind)]

    def _printed(self) -> str:
        file = io.StringIO()

        def printed() -> Iterable[Any]:
            show = getattr(self.tool, "print_summary", None)
            return [show(file)] if callable(show) else ()

        self._try("print_summary", printed)
        return file.getvalue()

    def _try(self, what: str, give: Callable[[], Iterable[Any]]) -> list[Any]:
        try:
            return list(give())
        except (Exception, SystemExit) as error:
            self.lost.append(f"{what}: {type(error).__name__}: {error}")
            return []


def versions() -> str:
    """Python, our packages and the imported frameworks."""
    found = {"Python": platform.python_version(), **distributions.amanda_versions()}
    frameworks = dict.fromkeys(cls.framework for cls, _ in drivers.registered_drivers())
    for name in frameworks:
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = version
    return ", ".join(f"{name} {version}" for name, version in found.items())


def namespaces(results: Iterable[Any]) -> str:
    """Where the operators of results in the common form ran."""
    found = {
        str(name)
        for result in results
        if isinstance(result, Mapping) and isinstance(result.get("namespaces"), (list, tuple))
        for name in result["namespaces"]
    }
    return ", ".join(sorted(found))


def _first_sentence(cls: type) -> str:
    text = (cls.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(text.split())
