"""``%load_ext amanda``: runs cells of a notebook under tools, with the options of ``amanda run``.

``%amanda -t flops`` applies tools to the lines that follow it in its cell; ``%%amanda -t flops``
does the same as the first line of a cell. IPython runs the cell itself: traceback, history, the
value of the last expression and ``await`` are as without the magic.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic
from IPython.core.interactiveshell import InteractiveShell

from amanda.cli import messages, program, run, tracebacks
from amanda.cli.rank import Rank
from amanda.errors import AmandaError
from amanda.registry import plugins

VARIABLE = "_amanda"
"""Name of the variable that holds the tools of the last cell."""

_OPTIONS = "[-t TOOL[:key=value,...][,TOOL...]]... [-o DIR] [--ops A+B] ..."


def load(shell: InteractiveShell) -> None:
    """Register the magics in a shell."""
    extension = AmandaMagics(shell)
    _EXTENSIONS[shell] = extension
    shell.register_magic_function(extension.amanda, "line_cell", "amanda")
    # Line transforms run after IPython has checked whether the cell is complete, so that a terminal
    # still asks for further lines; first in the list, ours runs before the one that turns a cell
    # magic into a call.
    shell.input_transformer_manager.line_transforms.insert(0, as_line_magic)


def unload(shell: InteractiveShell) -> None:
    """Undo :func:`load`."""
    if _EXTENSIONS.pop(shell, None) is None:
        return
    shell.input_transformer_manager.line_transforms.remove(as_line_magic)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("amanda", None)


def as_line_magic(lines: list[str]) -> list[str]:
    """Replace ``%%amanda`` in the first line of a cell by ``%amanda``.

    The other lines keep their numbers, for tracebacks; the first of them may be another cell magic.
    """
    if not lines or lines[0].split()[:1] != ["%%amanda"]:
        return lines
    return [lines[0][1:], *cell_magic(lines[1:])]


class AmandaMagics:
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._cell: ToolsOfCell | None = None

    def amanda(self, line: str, cell: str | None = None) -> None:
        """Run the rest of this cell under tools: ``%amanda -t flops,trace -o out``.

        As the first line of a cell: %%amanda -t flops. It takes the options of amanda run
        (%amanda --help lists them). A page of the tools comes after the output of the cell; they
        stay in the variable _amanda, a dict by name.
        """
        if cell is not None:
            # Called by name (run_cell_magic): in cells as_line_magic() has replaced %%amanda.
            self._shell.run_cell(f"%%amanda {line}\n{cell}")
            return
        if self._cell is not None and not self._cell.is_over:
            raise UsageError("this cell already runs under tools; give all of them to one %amanda")
        given = _parse(line)
        try:
            show = None if plugins.report_renderer() is None else self._show
            scope = run.ReportedScope(given, Rank(), show)
            scope.report.facts["command"] = f"%%amanda {line}"
            if scope.report.hint:
                messages.print_message(scope.report.hint)
            cell_tools = ToolsOfCell(self._shell, scope)
            cell_tools.begin()
            self._cell = cell_tools
        except (program.ProgramError, run.UsageError, AmandaError) as error:
            raise UsageError(str(error)) from error

    def _show(self, page: str, summaries: str) -> None:
        """Show a page; a terminal shows the summaries."""
        shown = {"text/plain": summaries.rstrip()} | ({"text/html": page} if page else {})
        self._shell.display_pub.publish(shown)


_EXTENSIONS: dict[InteractiveShell, AmandaMagics] = {}


class ToolsOfCell:
    """Applies tools to the rest of one cell, and reports when the cell has ended.

    Args:
        shell: the shell that runs the cell.
        scope: the tools, and where their results are written.

    Attributes:
        is_over: True if the cell has ended.
    """

    def __init__(self, shell: InteractiveShell, scope: run.ReportedScope) -> None:
        self._shell = shell
        self._scope = scope
        self._depth = 0
        self._handler: tuple[Any, Any] = ((), None)
        self.is_over = False

    def begin(self) -> None:
        """Apply the tools until the cell ends.

        Raises:
            AmandaError: they cannot be applied.
        """
        shell = self._shell
        self._scope.begin()
        shell.user_ns[VARIABLE] = self._scope.tools
        shell.events.register("pre_execute", self._enter_cell)
        shell.events.register("post_execute", self._leave_cell)
        self._handler = (shell.custom_exceptions, shell.CustomTB)
        if not shell.custom_exceptions:
            shell.set_custom_exc((BaseException,), _exception_handler(self._scope.tools.values()))

    def _enter_cell(self) -> None:
        # The cell runs another cell inside of it, as %%capture does.
        self._depth += 1

    def _leave_cell(self) -> None:
        if self._depth:
            self._depth -= 1
            return
        self.is_over = True
        shell = self._shell
        shell.custom_exceptions, shell.CustomTB = self._handler
        shell.events.unregister("pre_execute", self._enter_cell)
        shell.events.unregister("post_execute", self._leave_cell)
        self._scope.end()


def _parse(line: str) -> argparse.Namespace:
    """Parse the options of a magic.

    Raises:
        UsageError: they are wrong, or ask for help.
    """
    own = run.create_parser()
    own.prog, own.usage = "%amanda", f"%%amanda {_OPTIONS}"
    own.epilog = run.GRAMMAR
    own.description, own.error = "Run a cell under tools.", _refuse  # type: ignore[method-assign]
    try:
        given = own.parse_args(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"%%amanda {line}: {error}") from error
    except SystemExit:
        raise UsageError("the cell was not run") from None
    return given


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{messages.plain(message)}; see: %amanda --help")


def _exception_handler(tools: Any) -> Callable[..., None]:
    """A handler for IPython that shows an uncaught exception without the frames of Amanda."""
    modules = {type(tool).__module__ for tool in tools}

    def show(
        shell: InteractiveShell,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        tracebacks.hide_frames(error, modules)
        shell.showtraceback((kind, error, error.__traceback__), running_compiled_code=True)

    return show
