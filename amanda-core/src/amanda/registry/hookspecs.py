"""The five hooks of a plugin. They run when plugins are loaded or a run ends, never per operator.

An implementation may leave out hooks, must not import a framework, and is
marked with :data:`hookimpl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from amanda.interface.driver import Driver
    from amanda.results import RunReport

PROJECT = "amanda"
"""pluggy's project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def amanda_register_drivers() -> Sequence[type[Driver]]:  # type: ignore[empty-body]
    """Driver classes, with attributes set so that nothing has to be imported to list them."""


@hookspec
def amanda_register_tools() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Tools: short name to ``"module:Class"``."""


@hookspec
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Callable[..., Any]]]:  # type: ignore[empty-body]
    """Shared rules for ``MappingTool.standard()``: namespace prefix to rules.

    A rule is a function of a context or a pair of them (before, after).
    """


@hookspec
def amanda_report_header() -> str:  # type: ignore[empty-body]
    """One line for ``amanda doctor``."""


@hookspec(firstresult=True)
def amanda_render_report(report: RunReport) -> str | None:
    """The page, in HTML, that ``amanda run --html`` writes about a run.

    Called once, when the run has ended. The plugin that was registered last is asked first;
    None leaves it to the next one. What it needs is imported in the hook, not with the plugin.
    """
