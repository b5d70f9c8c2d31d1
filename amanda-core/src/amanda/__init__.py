"""Amanda: a unified instrumentation framework for deep neural networks.

A *tool* is written once and runs on any model in any framework for which a
driver is installed. After the ASPLOS'24 paper of the same name
(doi:10.1145/3617232.3624864).
"""

from collections.abc import Iterable as _Iterable
from os import PathLike as _PathLike
from pathlib import Path as _Path
from typing import Any as _Any

from amanda.interface.context import OpContext
from amanda.interface.driver import Driver
from amanda.interface.tool import FRAMES, StopRun, Tool, deferrable, traceable
from amanda.registry.hookspecs import hookimpl
from amanda.scope.apply import apply
from amanda.scope.switches import (
    ad_disabled,
    ad_enabled,
    cache_disabled,
    cache_enabled,
    disabled,
    enabled,
    new_iteration,
)

from amanda import inline, tool, tools  # isort: skip - tools need the names above
from amanda.tools.alignment import align  # isort: skip
from amanda.registry import drivers  # isort: skip - plugins need all of them

__version__ = "0.1.0"

__all__ = [
    "Driver",
    "OpContext",
    "StopRun",
    "Tool",
    "__version__",
    "ad_disabled",
    "ad_enabled",
    "align",
    "apply",
    "cache_disabled",
    "cache_enabled",
    "deferrable",
    "disabled",
    "enabled",
    "flops",
    "hookimpl",
    "inline",
    "new_iteration",
    "report",
    "summary",
    "tool",
    "tools",
    "traceable",
]


def summary(model: _Any, input: _Any = None, **options: _Any) -> _Any:
    """Run a model once and summarize it: the tree of its modules with shapes and costs.

    The model runs in evaluation mode, without gradients, and is left as it was. ``amanda run -t
    summary`` does the same for the models of a program. The tool is in the package amanda-tools.

    Args:
        model: a module of PyTorch or a layer of Keras.
        input: a tensor; a tuple or list of the positional arguments; a dictionary, of keyword
            arguments in PyTorch; or a shape, ``(4, 64)``, or a list of shapes, for zeros of the
            model's dtype on its device. Without it a built model of Keras runs with zeros of its
            own input shape, and of another one the tree and the parameters are shown.
        options: options of the tool: ``depth=2`` shows two levels.

    Returns:
        An object that prints as a table, in notebooks too, with the rows in ``modules``.

    Raises:
        UnknownNameError: amanda-tools is not installed.
        TypeError: `model` is not a module of a framework, or an option does not exist.
        NoDriverError: no driver sees the framework of the model.
        ValueError: the model fails with zeros of the shape.
    """
    found: _Any = tools.load("summary")
    return found.of(model, input, **options)


def flops(model: _Any, input: _Any = None, **options: _Any) -> _Any:
    """Run a model once and count its floating-point operations, two per multiply-accumulate.

    Args:
        model: as for ``amanda.summary``.
        input: as for ``amanda.summary``; needed, except for a built model of Keras.
        options: options of the tool: ``elementwise=True`` also counts elementwise work.

    Returns:
        An object that prints as tables, in notebooks too, with the numbers ``flops``, ``macs`` and
        ``params``; ``bound``, which is ``"lower"`` if not all is known; and ``result``.

    Raises:
        UnknownNameError: amanda-tools is not installed.
        TypeError: there is no input, or as for ``amanda.summary``.
        NoDriverError, ValueError: as for ``amanda.summary``.
    """
    found: _Any = tools.load("flops")
    return found.of(model, input, **options)


def report(tools: Tool | _Iterable[Tool], path: str | _PathLike[str]) -> _Path:
    """Write the page of tools, as ``amanda run --html`` does: one HTML file that loads nothing.

    Example: ``amanda.report([flops, trace], "out.html")``

    Args:
        tools: one tool or several, usually after their scope has ended. A tool needs a method
            ``result()``, ``tables()``, ``charts()`` or ``print_summary()``.
        path: the file; an existing one is replaced.

    Returns:
        The path of the file.

    Raises:
        TypeError: one is no tool.
        ValueError: a tool has no results.
        AmandaError: no installed package draws pages; amanda-tools does.
        OSError: the file cannot be written.
    """
    from amanda.cli import pages

    is_one = isinstance(tools, (Tool, str)) or not isinstance(tools, _Iterable)
    given: _Any = [tools] if is_one else tools
    pages.write_page(_Path(path), pages.report_of(list(given)))
    return _Path(path)


def _frame_of(tool: Tool) -> str | None:
    from amanda.cli import pages

    return pages.frame_of_tool(tool)


FRAMES.append(_frame_of)


def load_ipython_extension(shell: _Any) -> None:
    """Add the magics of :mod:`amanda.cli.notebook`; called by ``%load_ext amanda``."""
    from amanda.cli import notebook

    notebook.load(shell)


def unload_ipython_extension(shell: _Any) -> None:
    """Remove them; called by ``%unload_ext amanda``."""
    from amanda.cli import notebook

    notebook.unload(shell)


drivers.watch_imports()
