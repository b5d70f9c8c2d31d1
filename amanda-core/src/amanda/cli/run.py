"""``amanda run``: runs a program under tools; its source is not changed."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import math
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from amanda.cli import endings, grammar, mistakes, pages, program, tool_options, tracebacks
from amanda.cli.last_line import describe_missing_driver
from amanda.cli.messages import (
    WRONG_USAGE,
    CommandParser,
    complain,
    described_error,
    loading_plugins,
    print_message,
)
from amanda.cli.rank import Rank
from amanda.cli.results import NamedTool, Report
from amanda.cli.window import Trigger, Window, is_first_of_stage
from amanda.errors import AmandaError, FileError, UnknownNameError
from amanda.files import remove_temporary_folders
from amanda.interface.context import OpContext
from amanda.interface.tool import StopRun, Tool
from amanda.registry import drivers, plugins
from amanda.registry.plugins import BROKEN
from amanda.scope.apply import apply
from amanda.state import LIVE_SCOPES, LiveScope
from amanda.tools import load
from amanda.tools.op_filter import OpFilter
from amanda.tools.reporting import ReportingTool

USAGE = "amanda run [OPTIONS] [--] script.py ARGS | -m MODULE ARGS | -c TEXT ARGS | - ARGS"

GRAMMAR = """\
After a comma, key=value continues the options of a tool, and a name starts a new tool. The values
of a list are joined with '+'. amanda tools lists all tools, amanda tools NAME describes one."""

_EXAMPLES = """\
examples:
  amanda run -t count -- train.py --epochs 3
  amanda run -t flops,profile:by=module -o out --html -- train.py
  amanda run -t stats:tensors=weights+gradients,trace -o out -- -m package.train
  amanda run -t mytools.py:Norms:level=2 -- train.py"""

NO_TOOL = "no tool was given: try -t summary; amanda tools lists all"


class UsageError(ValueError):
    """The command line is wrong; nothing of the program has run."""


def named_path(text: str) -> Path:
    """A file or folder with a name, which an unset variable of the shell has not.

    Raises:
        ArgumentTypeError: it has none.
    """
    if text:
        return Path(text)
    raise argparse.ArgumentTypeError("needs a name, got an empty string")


def _names(text: str) -> list[str]:
    """A list of names, with one at least, which an unset variable of the shell has not.

    Raises:
        ArgumentTypeError: it is empty.
    """
    if names := grammar.split_names(text):
        return names
    raise argparse.ArgumentTypeError(f"needs one or more names, got {text!r}")


def number_from(least: int) -> Callable[[str], int]:
    """The conversion of an option to a whole number that is not less than `least`."""

    def convert(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {text!r}")

    return convert


def _one_per_stage(number: int) -> bool:
    """Any rank may be one of ``one-per-stage``: the first step shows which."""
    return True


def _ranks(text: str) -> Callable[[int], bool]:
    """Whether a rank is one of ``0,8-15``, or of a share of all, ``1%``.

    Raises:
        ArgumentTypeError: the text has another form.
    """
    if text == "one-per-stage":
        return _one_per_stage
    if (share := re.fullmatch(r"(\d{1,3})%", text)) and 0 < int(share[1]) <= 100:
        every = round(100 / int(share[1]))
        return lambda number: number % every == 0
    found = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part) for part in text.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in found if m]
    if len(ranges) < len(found) or not all(ranges):
        raise argparse.ArgumentTypeError(
            f"needs ranks such as 0,8-15, or 1%, or one-per-stage, got {text!r}"
        )
    return lambda number: any(number in each for each in ranges)


_FEW_RANKS = 8
"""Processes whose results are JSON unless asked otherwise."""

_OPTIONS: Sequence[tuple[str, dict[str, Any], str]] = (
    (
        "-t --tool --tools",
        {"metavar": "TOOL", "action": "append", "default": []},
        "tools and their options, TOOL[:key=value,...][,TOOL...]; may be repeated",
    ),
    (
        "-o --output",
        {"metavar": "DIR", "action": "append", "default": [], "type": named_path},
        "write the results as files into DIR (default: print summaries only)",
    ),
    (
        "--format",
        {"choices": ("json", "parquet")},
        f"of results (default: json with up to {_FEW_RANKS} processes); parquet survives a kill",
    ),
    (
        "--flush",
        {"metavar": "N", "type": number_from(1), "default": 100},
        "tables grow every N steps (default: 100)",
    ),
    (
        "--ranks",
        {"metavar": "LIST", "type": _ranks, "default": lambda number: True},
        "only these of several processes run under the tools: 0,8-15, 1%% or one-per-stage",
    ),
    (
        "--trigger",
        {"metavar": "FILE", "type": named_path},
        "the tools wait for this file, or for SIGUSR1, and begin on all ranks after one step",
    ),
    (
        "--steps",
        {"metavar": "N", "type": number_from(1)},
        "steps that --trigger lets the tools run (default: 10)",
    ),
    (
        "--html",
        {"action": "store_true"},
        "write a page about the run, for a browser: report.html in the folder of -o",
    ),
    (
        "--full",
        {"action": "store_true"},
        "print all rows and tables of the summaries (default: a first screen of each)",
    ),
    (
        "--ops",
        {"metavar": "A+B", "type": _names},
        "tools see operators of these types only (default: all)",
    ),
    (
        "--modules",
        {"metavar": "A+B", "type": _names},
        "and in modules whose paths match these patterns, such as 'layer1.*'",
    ),
    (
        "--every",
        {"metavar": "N", "type": number_from(1), "default": 1},
        "they act at each N-th execution of an operator (default: 1)",
    ),
    (
        "--skip",
        {"metavar": "N", "type": number_from(0), "default": 0},
        "and not at its first N executions (default: 0)",
    ),
    (
        "--driver",
        {"metavar": "NAME", "type": _names, "action": "extend"},
        "use this driver (see: amanda drivers)",
    ),
)
"""The options that come before the program: the names, the arguments for argparse, the help."""

WITH_VALUE = tuple(
    n for names, kind, _ in _OPTIONS if kind.keys() & {"metavar", "choices"} for n in names.split()
)
_WITHOUT_VALUE = ("--html", "--full", "--help")


def create_parser() -> CommandParser:
    """Create the parser of the options that come before the program."""
    own = CommandParser(
        prog="amanda run",
        usage=USAGE,
        description="Run a program under tools. Its source, its output and its exit status stay as "
        "they are.",
        epilog=f"{GRAMMAR}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for names, kind, text in _OPTIONS:
        own.add_argument(*names.split(), help=text, **kind)
    return own


_NO_VALUE = "--html takes no value; the page is report.html in the folder of -o"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status of the program, or 2 for wrong usage.

    The results are written and printed when Python exits.
    """
    ours, words = program.split(arguments, WITH_VALUE)
    out = sys.stdout
    try:
        given = parse_options(ours, words)
        with loading_plugins(), _random_kept():
            run = _prepare(given, ours, words)
        run.report.out = out
        run.describe(arguments)
    except (program.ProgramError, UsageError, AmandaError) as error:
        complain(f"error: {error}")
        return error.status if isinstance(error, program.ProgramError) else WRONG_USAGE
    except KeyboardInterrupt as error:
        endings.by_signal(signal.SIGINT, error)
    return run.execute()


def parse_options(ours: Sequence[str], words: Sequence[str]) -> argparse.Namespace:
    """Parse the options.

    Args:
        ours: the options, as written.
        words: the words after them.

    Raises:
        UsageError: one is unknown.
    """
    if any(word.startswith("--html=") for word in ours):
        raise UsageError(_NO_VALUE)
    given, unknown = create_parser().parse_known_args(ours)
    # -modules, which is -m odules.
    unknown += [word for word in words[:1] if f"-{word}".partition("=")[0] in WITH_VALUE]
    if unknown:
        known = (*WITH_VALUE, *_WITHOUT_VALUE)
        raise UsageError(mistakes.explain_option(unknown[0], given.tool, known))
    return given


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """Restore the random state: the program must not notice numbers that a plugin has drawn."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _prepare(given: argparse.Namespace, ours: Sequence[str], words: Sequence[str]) -> Run:
    """Create a run and apply its tools; nothing of the program runs yet.

    Args:
        given: the options.
        ours: the same, as written.
        words: the words after them.
    """
    try:
        target = program.parse(words)
    except program.ProgramError as error:
        if words or not (hint := mistakes.explain_no_program(ours)):
            raise
        raise UsageError(f"{error}; {hint}") from None
    try:
        target.check()
    except program.ProgramError as error:
        if given.html and (target.target.endswith(".html") or target.arguments[:1] == ("--",)):
            raise UsageError(_NO_VALUE) from None
        hint = mistakes.explain_target(target, given.tool)
        if not hint:
            raise
        raise UsageError(f"{error}; {hint}") from None
    check_settings()
    rank = Rank.of_environment()
    report = (
        create_report(given, rank)
        if given.ranks(rank.number)
        else Report([], None, rank, sys.stdout)
    )
    report.hint = (not given.tool and mistakes.explain_no_tool(target)) or report.hint
    run = Run(target, report)
    run.begin(given.driver)
    if report.hint and not report.rank.number:
        complain(report.hint)
    return run


def check_settings() -> None:
    """Check the environment variables of the drivers.

    Raises:
        UsageError: a driver does not know it.
    """
    for cls, _ in drivers.registered_drivers():
        if reason := drivers.explain_settings(cls):
            raise UsageError(reason)


def check_options(given: argparse.Namespace) -> None:
    """Check what `amanda sweep` checks once for all of its runs.

    Raises:
        UsageError: options do not fit.
        AmandaError: something that tables need is not installed; there is no such driver.
    """
    if given.steps and given.trigger is None:
        raise UsageError("--steps is for --trigger")
    if given.format == "parquet":
        plugins.table_store("--format parquet")
    if given.driver:
        drivers.select(given.driver)


def create_report(given: argparse.Namespace, rank: Rank) -> Report:
    """Create the tools, and the report that writes their results.

    Args:
        given: the options.
        rank: the place of this process among several.

    Raises:
        UsageError: an option is wrong.
        AmandaError: a tool's package is broken.
    """
    check_options(given)
    usual = plugins.page_tools() if given.html and not given.tool else []
    tools = create_tools(given.tool or usual, given.full)
    op_filter = OpFilter(given.ops or (), given.modules or (), given.every, given.skip)
    if len(given.output) > 1:
        named = " and ".join(map(str, given.output))
        raise UsageError(f"-o is given twice ({named}); all results go to one folder")
    # Absolute: the program may change the current folder.
    folder = given.output[0].absolute() if given.output else None
    _check_recordings(folder, tools)
    if folder is not None:
        check_folder(*given.output)
        _check_files(folder, (f"{named.name}{rank.suffix}.json" for named in tools))
    page = pages.page_path(folder, rank.suffix).absolute() if given.html else None
    if page is not None:
        pages.check_page(page)
        check_folder(page.parent)
    of_page = f"no tool was given: a page has {', '.join(usual)}; -t names others"
    hint = "" if given.tool else of_page if tools else NO_TOOL
    report = Report(tools, folder, rank, sys.stdout, page, op_filter, hint=hint)
    _add_tables(report, given)
    report.window = _window_of(report, given)
    return report


def _window_of(report: Report, given: argparse.Namespace) -> Window | None:
    """The part of the run in which the tools run; None for all of it.

    Raises:
        UsageError: options do not fit.
        AmandaError: a signal is not free.
    """
    is_staged = given.ranks is _one_per_stage
    if given.trigger is None:
        if not is_staged:
            return None
        begins: Callable[[int], bool] = (1).__eq__
        steps, close = math.inf, _do_nothing
    else:
        folder, is_signalled = report.folder, given.trigger == Path("SIGUSR1")
        if is_signalled and folder is None:
            raise UsageError("--trigger SIGUSR1: the ranks agree by a file: give a folder, -o DIR")
        path = folder / "trigger" if is_signalled and folder else given.trigger.absolute()
        trigger = Trigger(path, is_signalled=is_signalled)
        begins, steps, close = trigger.begins, given.steps or 10, trigger.close
    if not is_staged:
        return Window(begins, steps, close)
    return Window(
        lambda ended: begins(ended) and is_first_of_stage(report.rank.located().mesh), steps, close
    )


def _add_tables(report: Report, given: argparse.Namespace) -> None:
    """Let results be written as tables, if that is asked for or there are many ranks.

    Raises:
        UsageError: there is no folder for them.
        AmandaError: something that they need is not installed.
    """
    if given.format == "parquet" and report.folder is None:
        raise UsageError("--format parquet writes files: give a folder, -o DIR")
    is_usual = report.folder is not None and (report.rank.count or 0) > _FEW_RANKS
    if given.format == "json" or not (given.format or is_usual) or report.folder is None:
        return
    rank = report.rank
    tools = {n.name: n.tool for n in report.tools if isinstance(n.tool, ReportingTool)}
    try:
        store = plugins.table_store("--format parquet")
        report.tables = store.record(
            tools, report.folder, lambda: attrs.asdict(rank.located()), given.flush
        )
    except OSError as error:
        raise UsageError(f"cannot write to the output folder {report.folder}: {error}") from error
    except AmandaError as error:
        if given.format:
            raise
        report.hint = report.hint or f"warning: the results will be JSON of each rank; {error}"


def _check_recordings(folder: Path | None, tools: Iterable[NamedTool]) -> None:
    """Check that there is a folder for tools whose result is in their files.

    Raises:
        UsageError: there is none for one of them.
    """
    for name in (named.name for named in tools if getattr(named.tool, "needs_folder", False)):
        if folder is None:
            raise UsageError(f"{name} writes what it records into files: give a folder, -o DIR")


def create_tools(texts: Sequence[str], full: bool = False) -> list[NamedTool]:
    """Create the tools that the ``-t`` arguments name.

    Args:
        texts: the arguments.
        full: True if they are to print all tables and rows.

    Raises:
        UsageError: a tool or an option is unknown, or a value has the wrong form.
        AmandaError: a tool's package is broken.
    """
    made: list[NamedTool] = []
    try:
        specs = grammar.parse(texts)
        # Files are named after the short name, or the name of the class.
        names = pages.distinct([re.split("[/:]", spec.name)[-1] for spec in specs])
        for spec, name in zip(specs, names, strict=True):
            made.append(NamedTool(name, _create_tool(spec, _load(spec))))
    except grammar.GrammarError as error:
        raise UsageError(f"{error}; see: amanda tools") from error
    for tool in (named.tool for named in made):
        if isinstance(tool, ReportingTool):
            tool.prints_all = full
    return made


def _load(spec: grammar.ToolSpec) -> type[Tool]:
    try:
        return load(spec.name)
    except UnknownNameError as error:
        if not spec.follows:
            raise
        # -t stats:tensors=weights,gradients
        joined = f"{spec.follows}+{spec.name}"
        raise UsageError(
            f"{error}; if it is a value of a list, join it with '+': {joined}"
        ) from None


def _create_tool(spec: grammar.ToolSpec, cls: type[Tool]) -> Tool:
    name = spec.name
    try:
        return cls(**tool_options.convert(cls, spec))
    except tool_options.OptionError as error:
        raise UsageError(f"{error}; see: amanda tools {name}") from error
    except FileError as error:
        text = str(error).removeprefix(f"{name}: ")
        raise UsageError(f"tool {name}: {text}") from error
    except (TypeError, ValueError, OSError) as error:
        text = str(error).removeprefix(f"tool {name}: ")
        raise UsageError(f"tool {name}: {text}; see: amanda tools {name}") from error
    except BROKEN as error:
        raise _broken(f"tool {name} cannot be created", error) from error


def _broken(what: str, error: BaseException) -> UsageError:
    """The error in place of an exception in the code of a tool or driver.

    Raises:
        BaseException: the exception itself, where all tracebacks are wanted.
    """
    if tracebacks.are_full():
        raise error
    return UsageError(f"{what}: {described_error(error)} ({tracebacks.HOW_TO_SEE_ALL})")


def check_folder(folder: Path) -> None:
    """Create the output folder, and check that files can be written into it.

    Raises:
        UsageError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"amanda")
    except (OSError, ValueError) as error:
        # ValueError: the name holds a null character, as it can in a notebook.
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, FileExistsError):
            reason = "something of that name exists and is not a folder"
        raise UsageError(f"cannot write to the output folder {folder}: {reason}") from error


def _check_files(folder: Path, names: Iterable[str]) -> None:
    """Check that no folder has the name of a result: the run would lose it at its end.

    Raises:
        UsageError: one has.
    """
    for name in names:
        if (folder / name).is_dir():
            raise UsageError(f"{folder / name} is a folder, and a result goes there; remove it")


class ReportedScope:
    """Tools that act on a part of a process, such as a cell of a notebook or a training loop.

    ::

        scope = ReportedScope(create_parser().parse_args(["-t", "flops"]), Rank())
        scope.begin()
        scope.end()  # prints and writes the results

    Args:
        given: the options.
        rank: the place of this process among several.
        show: shows the page, see :class:`~amanda.cli.results.Report`; None for no page.

    Attributes:
        report: the tools, and where their results are written.
        tools: the tools by name.

    Raises:
        UsageError: an option is wrong.
        AmandaError: a tool's package is broken.
    """

    def __init__(
        self, given: argparse.Namespace, rank: Rank, show: Callable[[str, str], None] | None = None
    ) -> None:
        self.report = create_report(given, rank)
        self.report.show = show if self.report.tools else None
        self.report.out, self.report.complain = sys.stdout, print_message
        self.tools = {named.name: named.tool for named in self.report.tools}
        self._scope = self.report.scope(given.driver)
        self._started = 0.0

    def begin(self) -> None:
        """Apply the tools.

        Raises:
            AmandaError: they cannot be applied.
        """
        self._scope.__enter__()
        self._started = time.perf_counter()

    def end(self) -> None:
        """End the scope, and deliver the results."""
        seconds = time.perf_counter() - self._started
        try:
            self._scope.__exit__(None, None, None)
        finally:
            self.report.finish()
            self.report.deliver(self._scope.statistics, seconds)


class Run:
    """One run of a program under tools.

    Attributes:
        report: writes and prints the results.
    """

    def __init__(self, target: program.GivenProgram, report: Report) -> None:
        self._target = target
        self.report = report
        self._scope = apply()
        self._opened: LiveScope | None = None
        self._process = os.getpid()
        self._started = 0.0
        self._asked: Sequence[str] = ()
        self._is_found = True
        self._is_interrupted = False
        # Its first entry is the folder of `amanda`, whose place the program's folder takes.
        self._path = sys.path[:] if getattr(sys.flags, "safe_path", False) else sys.path[1:]
        self._is_finishing = False
        self._at_exit: Callable[[], Any] = _do_nothing
        self._terminated = 0

    def begin(self, drivers: Sequence[str] | None) -> None:
        """Apply the tools, and have the results delivered however the program ends.

        Raises:
            AmandaError: the tools cannot be applied.
        """
        self._asked = drivers or ()
        self._scope = self.report.scope(drivers)
        if self.report.window is not None:
            self.report.window.deliver = self._own_imports()(self.report.deliver)
        _apply(self._scope)
        self._opened = LIVE_SCOPES[-1]
        # A tool may keep its data in temporary files, which weakref.finalize removes at exit. Its
        # exit function is registered with the first finalizer: here, so that it runs after
        # _finish, which needs the files.
        weakref.finalize(self, _do_nothing)
        # Exit functions run in reverse order: registered before any of the program, this one runs
        # when the program's threads have ended and its exit functions have run.
        self._deliver_at_exit()
        endings.handle_signals(self._terminate)
        endings.watch(self._leave)

    def _deliver_at_exit(self) -> None:
        """Register the exit function, unless it is registered.

        A program can drop all exit functions (``atexit._clear``), which the weak reference shows.
        """
        if self._at_exit() is None:
            finish = functools.partial(self._finish)
            self._at_exit = weakref.ref(finish)
            atexit.register(finish)

    def describe(self, arguments: Sequence[str]) -> None:
        """Note the command line and the time, for the page."""
        self.report.facts["command"] = shlex.join(["amanda", "run", *arguments])
        self.report.facts["started"] = time.strftime("%Y-%m-%d %H:%M:%S %z")

    def execute(self) -> int:
        """Run the program; returns the exit status where the program itself does not set it.

        Raises:
            SystemExit: of the program; Python takes the status from it, and prints a text.
            KeyboardInterrupt: the program was interrupted; Python then ends by the signal.
        """
        self._started = time.perf_counter()
        modules = {type(named.tool).__module__ for named in self.report.tools} | {Window.__module__}
        tracebacks.hide_in_threads(modules)
        threading.excepthook = functools.partial(self._end_thread, threading.excepthook)
        try:
            self._target.run()
        except program.ProgramError as error:
            self._is_found = False
            complain(f"error: {error}")
            return error.status
        except SystemExit as error:
            status = _exit_status(error)
            self.report.note_end(f"with exit status {status}")
            wanted = self._check_drivers(status)
            if wanted != status:
                return wanted
            raise
        except StopRun as stop:
            self.report.note_end(stop)
            return self._check_drivers(0)
        except BaseException as error:
            failure = error
        else:
            self.report.note_end("normally")
            return self._check_drivers(0)
        finally:
            self._deliver_at_exit()
        # Not in the except clause, which would be the context of an exception in the excepthook.
        return self._fail(failure, modules)

    def _fail(self, failure: BaseException, modules: set[str]) -> int:
        """Show the exception that has ended the program; returns the exit status.

        Args:
            modules: those of the tools.

        Raises:
            KeyboardInterrupt: it is one.
        """
        self.report.note_end(failure)
        if tracebacks.is_refusal(failure, modules):
            complain(f"error: {failure} ({tracebacks.HOW_TO_SEE_ALL})")
            return self._check_drivers(WRONG_USAGE)
        tracebacks.show(failure, modules)
        if isinstance(failure, KeyboardInterrupt):
            # Python ends by the signal, without a second traceback.
            sys.excepthook = _print_nothing
            self._is_interrupted = True
            self._check_drivers(1)
            raise failure
        return self._check_drivers(1)

    def _check_drivers(self, status: int) -> int:
        """The exit status of a run: 2 if the program ended well, and tools had no driver or could
        not do what they do at its end."""
        self.report.has_failed = status != 0
        if not self.report.tools or self._opened is None or self._is_finishing:
            # Without a scope, or the program has run all exit functions, and the scope has ended.
            return status
        # A forked child runs without the tools, and its parent reads its status.
        if os.getpid() != self._process:
            return status
        # A framework may be imported by another one, which computes. The statistics count later.
        has_seen = self._opened.cache.counts()[0] or not plugins.explain_unseen(
            drivers.covered_frameworks()
        )
        if self._opened.drivers and has_seen:
            return status or self._finish_tools()
        self.report.has_driver = False
        if status == 0:
            self.report.error = f"nothing was instrumented: {describe_missing_driver(self._asked)}"
        return status or 2

    def _finish_tools(self) -> int:
        """Let tools act on the program's objects; returns the exit status.

        The scope, which else ends after the exit functions, ends before: tools run the model.
        """
        if not self.report.tools_with_end:
            return 0
        with self._own_imports():
            self._end_scope()
            return self.report.finish()

    def _end_thread(self, show: Callable[[Any], Any], failure: threading.ExceptHookArgs) -> None:
        """Show what has ended a thread. After ``StopRun`` others end at their next operator."""
        if not isinstance(failure.exc_value, StopRun):
            show(failure)
            return
        self.report.note_end(failure.exc_value)
        for named in self.report.tools:
            named.tool.add_inst_for_op(functools.partial(_stop, self.report.stopped))
            named.tool.reanalyse()

    def _finish(self) -> None:
        # A forked child inherits the exit function; the results are the parent's.
        if os.getpid() != self._process or self._is_finishing:
            return
        self._is_finishing = True
        seconds = time.perf_counter() - self._started
        try:
            self._deliver(seconds)
        except KeyboardInterrupt:
            complain("interrupted while the results were written; those that are missing are lost")
            self._terminated = signal.SIGINT
        # Exit functions may not run.
        remove_temporary_folders()
        endings.restore_signals(self._terminate)
        if self._terminated:
            endings.by_signal(self._terminated)
        if self._is_interrupted:
            endings.remember_interrupt()

    def _deliver(self, seconds: float) -> None:
        with self._own_imports():
            self._end_scope()
            if self._is_found:
                self.report.deliver(self._scope.statistics, seconds)

    def _end_scope(self) -> None:
        try:
            if self._opened is not None and self._opened.alive:
                self._scope.__exit__(None, None, None)
        except BROKEN as error:
            complain(f"the scope did not end properly: {described_error(error)}")

    @contextlib.contextmanager
    def _own_imports(self) -> Iterator[None]:
        """Within it, Python looks for modules first in the folders from before the program began,
        and then in the program's: the program may have a file with the name of a module of ours."""
        theirs = sys.path
        sys.path = [*self._path, *(entry for entry in theirs if entry not in self._path)]
        try:
            yield
        finally:
            sys.path = theirs

    def _leave(self, how: str) -> None:
        """Deliver the results before the program ends without its exit functions."""
        if self._is_finishing:
            return
        self.report.note_end(f"by {how}")
        self.report.has_failed = True
        self._finish()
        if "exec" in how:
            complain(
                f"the program replaces itself by another one ({how}), which runs without amanda: "
                "the results are those of the first; amanda run has to be a part of its command"
            )

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Deliver the results, then end by the signal, as the program would have."""
        if os.getpid() == self._process:
            if self._is_finishing and not self._terminated:
                # The results are being delivered: end when they are. A second signal ends at once.
                self._terminated = number
                return
            self.report.note_end(f"by {signal.Signals(number).name}")
            self.report.has_failed = True
            self._finish()
        endings.by_signal(number)


def _apply(scope: apply) -> None:
    """Begin the scope of a run.

    Raises:
        UsageError: code of a tool or driver has failed, which is not a refusal.
    """
    try:
        scope.__enter__()
    except AmandaError:
        raise
    except BROKEN as error:
        raise _broken("the tools cannot be applied", error) from error


def _exit_status(error: SystemExit) -> int:
    """The exit status that Python takes from a ``SystemExit``."""
    try:
        code = error.code
    except Exception:
        # Python prints the exception itself then.
        return 1
    return code if isinstance(code, int) else int(code is not None)


def _stop(reason: str, context: OpContext) -> None:
    """An analysis that ends the program."""
    raise StopRun(reason)


def _do_nothing() -> None:
    """A finalizer that is needed for the order of exit functions only."""


def _print_nothing(*arguments: Any) -> None:
    """An excepthook for an exception whose traceback has been shown."""
