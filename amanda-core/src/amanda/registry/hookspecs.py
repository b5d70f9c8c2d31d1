"""The five hooks that a plugin may implement.

A plugin is a module that an entry point of the group ``amanda`` names::

    from amanda import hookimpl

    @hookimpl
    def amanda_register_tools():
        return {"zeros": "mytools.zeros:ZerosTool"}

Hooks are called when plugins are loaded, by ``amanda doctor``, or when a run ends; never at an
operator. A plugin module must not import a framework.
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
def amanda_report_header() -> str:  # type: ignore[empty-body]
    """A line about the plugin for ``amanda doctor``, such as the version of its framework."""


@hookspec(firstresult=True)
def amanda_render_report(report: RunReport) -> str | None:
    """Draw the page of a run for ``amanda run --html``, as the text of an HTML file.

    Called once, when the run has ended. The first plugin that does not return None draws the page;
    amanda-tools, which always draws one, is asked last. Import what drawing needs in the hook.

    Args:
        report: the contents of the page.
    """
