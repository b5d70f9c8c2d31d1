"""The base class of tools that report a result: options, result, tables, files.

A tool with this base has one options class, an attrs or data class. Its fields are the keyword
arguments of the tool's constructor, and the options of ``amanda run -t NAME:key=value``::

    @attrs.frozen(kw_only=True)
    class BusyOptions:
        ops: Sequence[str] = ()


    class BusyTool(ReportingTool[BusyOptions]):
        '''Finds busy operators.'''

        name = "busy"
        Options = BusyOptions

A tool need not have this base: ``amanda run`` reads the options from the signature of any tool's
constructor, and uses ``result()``, ``print_summary()``, ``write_files()``, ``tables()`` and
``charts()`` if a tool has them, and ``finish_run(op_filter)`` when the program has ended well, if
its ``needs_end`` is true.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TextIO, TypeVar

import attrs

from amanda.errors import close_matches
from amanda.interface.context import OpContext
from amanda.interface.points import PointContext
from amanda.interface.specs import PHASES
from amanda.interface.tool import Tool
from amanda.python.signatures import signature_of
from amanda.python.text import printable
from amanda.results import Chart, Table, plural
from amanda.scope.scope import add_not_seen
from amanda.state import LIVE_SCOPES, tool_locked

if typing.TYPE_CHECKING:
    from amanda.driver import Driver

OptionsT = TypeVar("OptionsT")

_T = TypeVar("_T")


def type_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Convert an option to a tuple of names; a single name may be given as a string."""
    return (names,) if isinstance(names, str) else tuple(names)


_APPLIES = "amanda.applies"


def applies_if(what: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Metadata of an option that has an effect only with some values of other options.

    It is refused where it would have none::

        depth: int = attrs.field(default=0, metadata=applies_if("by=module", lambda o: ...))

    Args:
        what: the other options that it needs, for the message.
        holds: of the options, whether it has an effect. False is never refused: what has no effect
            may be switched off.
    """
    return {_APPLIES: (what, holds)}


def _read_alone(cls: type[_T]) -> type[_T]:
    """Let methods that read what routines write, in any thread, run while none of them does."""
    for (
        name
    ) in "result op_rows window_rows summary tables charts print_summary write_files".split():
        if inspect.isfunction(method := vars(cls).get(name)):
            setattr(cls, name, _alone(method))
    return cls


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = method(*args, **kwargs)
        return list(found) if isinstance(found, Iterator) else found

    return functools.wraps(method)(lambda *args, **kwargs: tool_locked(read, args, kwargs))


@_read_alone
class ReportingTool(Tool, Generic[OptionsT]):
    """Base class of the tools that report a result.

    Methods that give results run under the tools' lock, those of subclasses too: call them while
    threads run the model.

    Attributes:
        name: the short name, as registered by the plugin.
        schema: version of the keys of :meth:`op_rows` and :meth:`summary`.
        figures: the keys of a row that are numbers to be summed, by phase for instance.
        shows_training: True to run the analyses again where training begins after evaluations: for
            tools that show facts of an operator's first execution.
        Options: the class of the options.
        prints_all: True to print all rows and columns of all tables, as ``amanda run --full`` does.
        steps: the iterations of the program that have ended.
        trains_late: True if training has begun after evaluations.
        options: the options of this instance.

    Raises:
        TypeError: an option does not exist or is missing.
        ValueError: the value of an option is not allowed.
    """

    name: ClassVar[str]
    schema: ClassVar[int] = 1
    figures: ClassVar[Sequence[str]] = ()
    shows_training: ClassVar[bool] = False
    Options: ClassVar[type]
    prints_all: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            # Read by help(), editors and `amanda run`.
            cls.__signature__ = _signature(cls.Options)  # type: ignore[attr-defined]
        _read_alone(cls)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = _signature(self.Options).parameters
        for name, value in options.items():
            if name not in known:
                raise TypeError(unknown_option(self.name, name, known))
            _check_choice(self.name, known[name], value)
        try:
            self.options: OptionsT = self.Options(**options)
        except (TypeError, ValueError) as error:
            # Validators of attrs put the attribute, its type and the value into further arguments,
            # which str(error) would show.
            if len(error.args) == 1:
                raise
            raise type(error)(f"{self.name}: {error.args[0]}") from None
        _check_effects(self.name, self.options, options)
        self.trains_late = False
        self._statistics: dict[int, Any] = {}
        self._has_gradients = False
        # Of earlier scopes: each scope numbers its iterations from 0.
        self._earlier_steps = 0
        self._step_figures = StepFigures()
        self._noted_figures: Mapping[str, float] = {}
        self._noted_counts: _Counts = {}
        self.add_inst_for_iteration(self._begin_step)
        self.add_inst_for_iteration(self._end_step, end=True)

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Keep the statistics of the scope, for what is not seen in it."""
        live = [scope for scope in LIVE_SCOPES if any(tool is self for tool in scope.tools)]
        found = {id(scope.statistics): scope.statistics for scope in live}
        if not found.keys() <= self._statistics.keys():
            self._earlier_steps = self.steps
        self._statistics.update(found)

    def not_seen(self) -> dict[str, int]:
        """The executions that were not seen by reason; 0 for an unknown number."""
        found = collections.Counter[str]()
        for statistics in self._statistics.values():
            for reason, count in statistics.not_seen.items():
                add_not_seen(found, reason, count)
        return dict(found)

    def unseen_tables(self, consequence: str) -> Iterable[Table]:
        """A table of what was not seen, if there is any.

        Args:
            consequence: for the tool's figures: "executions are lower bounds".
        """
        if missed := self.not_seen():
            title = f"{self.name}: {consequence}, for these executions were not seen"
            counts = [(reason, count or "?") for reason, count in missed.items()]
            yield Table(title, ("reason", "calls"), counts)

    @property
    def steps(self) -> int:
        """The iterations of the program that have ended."""
        return self._step_figures.count

    @property
    def steps_overlap(self) -> bool:
        """True if steps of several threads have overlapped: steps have no figures."""
        return any(of.overlaps for of in self._statistics.values())

    def _begin_step(self, point: PointContext) -> None:
        # Nothing has run since the end of a step that this one follows.
        if not point.follows:
            self._read_figures()
        if not (point.iteration or self.trains_late) and self.steps > self._earlier_steps:
            # Training begins after evaluations, which have other shapes and batches.
            self.trains_late = True
            if self.shows_training and point.runs_at_once:
                self.reanalyse()
        number = self._earlier_steps + point.iteration
        self._step_figures.begin(number, self._noted_figures, self._noted_counts, point.begin)

    def _end_step(self, point: PointContext) -> None:
        number = self._earlier_steps + point.iteration
        if self.steps_overlap:
            self._step_figures = StepFigures()
            self._step_figures.count = number + 1
            return
        self._read_figures()
        momentary = self.momentary_figures()
        self._step_figures.end(
            number, self._noted_figures, momentary, self._noted_counts, point.end
        )

    def shows(self, context: OpContext) -> bool:
        """True if results show an operator as it is in this analysis.

        False in a graph that is first run when gradients have been computed in another one, which
        is the graph of an evaluation, or of other sizes. Call it in each analysis, also in backward
        ones.
        """
        self._has_gradients |= not context.is_forward()
        return context.runs_at_once or not self._has_gradients

    def _read_figures(self) -> None:
        self._noted_figures = dict(self.running_figures())
        self._noted_counts = self.op_counts()

    def figures_of_steps(self) -> Mapping[int, Mapping[str, float]]:
        """The :meth:`running_figures` and :meth:`momentary_figures` of single steps by number, with
        the ``seconds`` that each took where they are known; of the last 1000 steps that have
        ended."""
        return self._step_figures.series

    def running_figures(self) -> Mapping[str, float]:
        """Figures of the run so far, of which results show the share of one step.

        Called at the end of each step, and at its begin if operators may have run since the step
        before: it must be quick.
        """
        return {}

    def momentary_figures(self) -> Mapping[str, float]:
        """Figures that are not sums, such as the memory in use, of the step that ends now.

        Called once at the end of each step: it must be quick.
        """
        return {}

    def op_counts(self) -> Mapping[str, Sequence[float]]:
        """Sums of single operators so far, by name; a row's ``per_step`` is the part of the last
        step.

        A sequence has one item per operator; each keeps its place, and new ones come at the end.
        Called where :meth:`running_figures` is, after it: it must return copies, and make no call
        of Python per operator.
        """
        return {}

    def op_counts_of_step(self) -> Mapping[str, Sequence[float]]:
        """What the last complete step added to :meth:`op_counts`; empty before the first one."""
        return self._step_figures.counts_of_last()

    @property
    def step_times(self) -> tuple[float, float] | None:
        """When the last step began and ended, in seconds of ``time.perf_counter``; None before one
        and where it is unknown."""
        return self._step_figures.times_of.get(self.steps - 1)

    @property
    def times_of_steps(self) -> list[tuple[float, float]]:
        """When each of the last nine steps began and ended, as :attr:`step_times`; without the
        first step of the program, which is slower, if there are others."""
        known = self._step_figures.times_of
        return [times for number, times in known.items() if number or len(known) == 1]

    def result(self) -> dict[str, Any]:
        """The result as plain data: the contents of ``DIR/<tool>.json``.

        ``summary`` has ``not_seen`` as well, the executions that were not seen by reason: figures
        are without them.
        """
        rows = self.op_rows()
        return {
            "tool": self.name,
            "schema": self.schema,
            "namespaces": sorted({row["namespace"] for row in rows}),
            "summary": {
                **self.summary(),
                **self.summary_of_steps(rows),
                "not_seen": self.not_seen(),
            },
            "ops": rows,
        }

    def summary_of_steps(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The part of the summary that the results of all tools have.

        ``steps``, the iterations that have ended, None where threads overlap; ``phases``, of each
        phase the number of ``ops`` and the sums of :attr:`figures`; ``per_step``, the
        :meth:`running_figures` and :meth:`momentary_figures` of the last step that has ended, with
        ``min`` and ``max`` of figures that are not the same in all steps.
        Nothing where the rows have no phases and no step was seen.
        """
        rows = list(rows)
        if rows and not self.steps and not any("phase" in row for row in rows):
            return {}
        return {
            "steps": None if self.steps_overlap else self.steps,
            "phases": figures_by_phase(rows, self.figures),
            "per_step": self._step_figures.last(),
        }

    def op_rows(self) -> list[dict[str, Any]]:
        """One dictionary per operator, with at least the keys ``id type module namespace``.

        Figures that add up are those of the run; ``per_step``, if a row has it, is a dictionary of
        the same figures for the last step that has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement op_rows()")

    def window_rows(self) -> Iterable[Mapping[str, Any]]:
        """The rows for tables of results, ``amanda run --format parquet``; read every N steps.

        Rows of :meth:`op_rows`: of their :attr:`figures` the part since the last call is taken, of
        a tool without any all numbers, as they are now. A tool that keeps samples may give rows of
        its own that have ``figure``, a name, and the ``count``, ``sum``, ``min``, ``max``,
        ``sum_squares`` and ``histogram`` of the samples since the last call.
        """
        return self.op_rows()

    def summary(self) -> dict[str, Any]:
        """The figures over all operators."""
        raise NotImplementedError(f"{type(self).__name__} must implement summary()")

    def tables(self) -> Iterable[Table]:
        """The tables of the printed summary and of the page of ``amanda run --html``."""
        return ()

    def charts(self) -> Iterable[Chart]:
        """The charts of the page of ``amanda run --html``."""
        return ()

    def print_summary(self, file: TextIO) -> None:
        """Print :meth:`tables` as plain text: a first screen, unless :attr:`prints_all`."""
        tables = list(self.tables())
        shown = [table for table in tables if self.prints_all or not table.detail]
        for table in shown:
            print(plain_text(table, self.prints_all), file=file)
        if more := len(tables) - len(shown):
            print(f"{self.name}: --full prints {plural(more, 'more table')}", file=file)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write further files than the JSON file, named ``stem.*``.

        Args:
            folder: the output folder.
            stem: the beginning of the file names.

        Returns:
            The paths of the files written.
        """
        return ()


_STEPS_KEPT = 64
"""Begins of steps that are kept: a first step may have looked like so many, before an optimizer has
stepped."""


_STEPS_IN_SERIES = 1000
"""Steps whose figures are kept."""


_STEPS_TIMED = 9
"""Steps whose begins and ends are kept."""


_Sums = Sequence[float]
_Counts = Mapping[str, _Sums]

_NO_COUNTS: _Counts = {}


class StepFigures:
    """The figures of single steps, found from those of the run at the begin and end of each.

    Attributes:
        count: steps that have ended.
        series: by the number of the step its figures, and its ``seconds`` where they are known; of
            the last 1000 steps.
        times_of: begin and end of the last steps by number, where they are known.
    """

    def __init__(self) -> None:
        self.count = 0
        self.series: collections.OrderedDict[int, dict[str, float]] = collections.OrderedDict()
        self.times_of: collections.OrderedDict[int, tuple[float, float]] = collections.OrderedDict()
        self._begins: collections.OrderedDict[int, Mapping[str, float]] = collections.OrderedDict()
        self._count_begins: dict[int, tuple[_Counts, float | None]] = {}
        self._counts: tuple[_Counts, _Counts] | None = None
        self._last: dict[str, float] = {}
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}

    def begin(
        self,
        number: int,
        figures: Mapping[str, float],
        counts: _Counts = _NO_COUNTS,
        moment: float | None = None,
    ) -> None:
        """Note the figures, the sums of operators and the time where a step begins, perhaps once
        more."""
        begins, count_begins = self._begins, self._count_begins
        _drop_from(begins, number)
        _drop_from(count_begins, number)
        begins[number] = figures
        _keep_last(begins, _STEPS_KEPT)
        if len(count_begins) > 1:
            # The counts are large. Only the first step may turn out to have continued after its
            # apparent end.
            count_begins.popitem()
        count_begins[number] = counts, moment

    def end(
        self,
        number: int,
        figures: Mapping[str, float],
        momentary: Mapping[str, float],
        counts: _Counts = _NO_COUNTS,
        moment: float | None = None,
    ) -> None:
        """Note the figures where a step ends.

        Args:
            number: of the step. A number that was noted before means that the step has gone on
                after an apparent end.
            figures: those of the run so far.
            momentary: those of the step.
            counts: sums of operators so far.
            moment: when it ends, in seconds.
        """
        begin = self._begins.get(number, {})
        last = {name: value - begin.get(name, 0) for name, value in figures.items()}
        last.update(momentary)
        self._note_last(number, last)
        begin_counts, began = self._count_begins.get(number, (None, None))
        self._counts = None if begin_counts is None else (begin_counts, counts)
        _drop_from(self.times_of, number)
        self.series[number] = dict(last)
        if began is not None and moment is not None:
            self.times_of[number] = began, moment
            _keep_last(self.times_of, _STEPS_TIMED)
            self.series[number]["seconds"] = moment - began
        _keep_last(self.series, _STEPS_IN_SERIES)

    def _note_last(self, number: int, last: dict[str, float]) -> None:
        """Note the figures of the last step, and spread those of the step before it."""
        if number >= self.count:
            _spread(self._last, self._low, self._high)
        elif number < self.count - 1:
            self._low, self._high = {}, {}
            _drop_from(self.series, number + 1)
        self._last, self.count = last, number + 1

    def counts_of_last(self) -> dict[str, list[float]]:
        """What the last step has added to the sums of operators; empty before one, without the
        names that its begin did not have."""
        if self._counts is None:
            return {}
        begin, end = self._counts
        return {
            name: [
                after - before
                for after, before in itertools.zip_longest(
                    values, begin[name][: len(values)], fillvalue=0
                )
            ]
            for name, values in end.items()
            if name in begin
        }

    def last(self) -> dict[str, Any]:
        """The figures of the last step, with ``min`` and ``max`` where steps differ."""
        found: dict[str, Any] = dict(self._last)
        low, high = dict(self._low), dict(self._high)
        _spread(found, low, high)
        varying = [name for name in found if low[name] != high[name]]
        if varying:
            found["min"] = {name: low[name] for name in varying}
            found["max"] = {name: high[name] for name in varying}
        return found


def _drop_from(items: dict[int, Any], number: int) -> None:
    """Drop the last items, from this number on."""
    while items and next(reversed(items)) >= number:
        items.popitem()


def _keep_last(items: collections.OrderedDict[int, Any], most: int) -> None:
    """Drop the first items beyond the number of items that are kept."""
    while len(items) > most:
        items.popitem(last=False)


def _spread(figures: Mapping[str, float], low: dict[str, float], high: dict[str, float]) -> None:
    """Widen the ranges by the figures of one step."""
    for name, value in figures.items():
        low[name] = min(value, low.get(name, value))
        high[name] = max(value, high.get(name, value))


def figures_by_phase(
    rows: Iterable[Mapping[str, Any]], figures: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The number of operators of each phase, and sums of the figures of their rows."""
    found: dict[str, dict[str, Any]] = {p: {"ops": 0, **dict.fromkeys(figures, 0)} for p in PHASES}
    ids = set[str]()
    for row in rows:
        group = found.get(row.get("phase", ""))
        if group is None:
            continue
        # A tool may have several rows of an operator.
        group["ops"] += row["id"] not in ids
        ids.add(row["id"])
        for name in figures:
            group[name] += row.get(name) or 0
    return found


def _check_choice(tool: str, option: inspect.Parameter, value: Any) -> None:
    # attrs does not check a Literal; the command line has done so already.
    if typing.get_origin(option.annotation) is not Literal:
        return
    choices = typing.get_args(option.annotation)
    if value not in choices:
        raise ValueError(
            f"tool {tool}: {option.name}={value} is not one of {', '.join(map(str, choices))}"
        )


def _check_effects(tool: str, options: Any, given: Mapping[str, Any]) -> None:
    """Refuse options that are given and have no effect with the other ones.

    Raises:
        ValueError: it names the first one.
    """
    fields: Iterable[Any] = attrs.fields(type(options)) if attrs.has(type(options)) else ()
    if dataclasses.is_dataclass(options):
        fields = dataclasses.fields(options)
    for field in fields:
        value = given.get(field.name, False)
        if value is False or _APPLIES not in field.metadata:
            continue
        what, holds = field.metadata[_APPLIES]
        if not holds(options):
            raise ValueError(f"tool {tool}: {field.name}={value} has no effect: it is for {what}")


def _signature(options: type) -> inspect.Signature:
    """The signature of an options class, with annotations as types instead of text."""
    found = signature_of(options)
    try:
        types = typing.get_type_hints(options)
    except NameError:
        # An annotation names something that is imported under TYPE_CHECKING only.
        return found
    parameters = [
        parameter.replace(annotation=types.get(parameter.name, parameter.annotation))
        for parameter in found.parameters.values()
    ]
    return found.replace(parameters=parameters, return_annotation=found.empty)


def unknown_option(tool: str, option: str, known: Iterable[str]) -> str:
    """The message for an option that a tool does not have, with close matches."""
    names = list(known)
    guess = close_matches(option, names)
    has = f"it has {', '.join(names)}" if names else "it has none"
    return f"tool {tool} has no option {option!r}{guess} ({has})"


_WIDTH = (100, 24)
"""Columns and lines where there is no terminal."""

_SHORTEST = 16
"""Characters that a name keeps, the first of a row two fifths of the line, or three if names would
be equal; columns from the right are left out where that is too wide."""

_AMOUNT = re.compile(r"(≥ )?[-+]?\d[\d.,]*(e[-+]?\d+)?( ?[\w%]{1,6})?( (to|of) [\d.]+)?|[-?]?")

_UNIT = re.compile(r"(.*\d(?: [kMGTP])?) ?(FLOP|B|%)")
"""An amount with a unit, which stands in the heading of a column where all have the same."""

_IS_SENTENCE = 5
"""Words of a text that is continued on further lines, and not cut as a name is."""


def plain_text(table: Table, full: bool = False) -> str:
    """Format a table as lines of text that fit the terminal; without rows only its title.

    Characters that a terminal would obey are written out.

    Args:
        table: the table.
        full: True for all rows and columns, however wide they are.
    """
    room = sys.maxsize if full else shutil.get_terminal_size(_WIDTH).columns
    title = _lines(printable(table.title), room)
    if not table.rows:
        return "\n  ".join(title)
    rows, more = (table.rows, "") if full else table.head()
    columns = [list(map(_cell, column)) for column in zip(table.columns, *rows, strict=True)]
    # The calls of a tree may be those of rows that are not shown.
    columns = [column for i, column in enumerate(columns) if not i or any(column[1:])]
    return "\n  ".join([*title, *_aligned(columns, room)]) + (f"\n{more}" if more else "")


def _aligned(columns: Sequence[Sequence[str]], room: int) -> Iterable[str]:
    """Yield the lines of columns of texts, the heading with its units first."""
    # Names and texts; the other columns are amounts, which are aligned to the right.
    texts = [not (i and all(map(_AMOUNT.fullmatch, c[1:]))) for i, c in enumerate(columns)]
    columns = [_with_unit(*c, is_text=is_text) for c, is_text in zip(columns, texts, strict=True)]
    widths = _fitting(columns, texts, room)
    lines: list[Sequence[str]] = []
    for cells in zip(*columns[: len(widths)], strict=True):
        lines += itertools.zip_longest(*map(_lines, cells, widths), fillvalue="")
    lines[1 + any(lines[1]) : 2] = [["-" * width for width in widths]]
    ways = [str.ljust if is_text else str.rjust for is_text in texts]
    for line in lines:
        padded = (way(cell, n) for way, cell, n in zip(ways, line, widths, strict=False))
        yield "  ".join(padded).rstrip()


def _with_unit(heading: str, *cells: str, is_text: bool) -> Sequence[str]:
    """A column with a second line of its heading: the unit that all of its amounts have, or ""."""
    found = [_UNIT.fullmatch(cell) for cell in cells]
    units = {m[2] if m else cell for m, cell in zip(found, cells, strict=True)} - {"", "-", "?"}
    if is_text or len(units) != 1 or not any(found):
        return (heading, "", *cells)
    return (heading, *units, *(m[1] if m else c for m, c in zip(found, cells, strict=True)))


def _cell(value: Any) -> str:
    return printable(str(value))


def _fitting(columns: Sequence[Sequence[str]], texts: Sequence[bool], room: int) -> list[int]:
    """Leave columns out, and make the widest texts narrower, until a line fits."""
    widths = [max(map(len, column)) for column in columns]
    names, few, most = {*columns[0]}, room * 2 // 5, min(room * 3 // 5, widths[0])
    cut = ((n, {"".join(_lines(name, n)) for name in names}) for n in range(few, most))
    first = next((n for n, shown in cut if len(shown) == len(names)), few)
    shortest = [first, *(_SHORTEST for _ in widths[1:])]
    least = [
        min(w, short) if is_text else w
        for w, short, is_text in zip(widths, shortest, texts, strict=True)
    ]
    needed = list(itertools.accumulate(width + 2 for width in least))
    kept = list(widths[: max(1, sum(width <= room for width in needed))])
    for _ in range(sum(kept) + 2 * len(kept) - room):
        excess = [width - short for width, short in zip(kept, least, strict=False)]
        kept[excess.index(max(excess))] -= max(excess) > 0
    return kept


def _lines(text: str, width: int) -> list[str]:
    """The lines of a cell: a sentence is continued, a name is cut in the middle, a path before."""
    if len(text) <= width:
        return [text]
    if len(text.split()) >= _IS_SENTENCE:
        return textwrap.wrap(text, width - 2, break_long_words=False, break_on_hyphens=False)
    # The end of a path is more informative than its beginning.
    head = 0 if "." in text or "/" in text else width // 2
    return [f"{text[:head]}…{text[len(text) - width + head + 1 :]}"]
