"""The common form of tools that report: options, result, tables, files.

A tool on this base has one options class, an attrs or data class. Its fields
are the keyword arguments of the tool's constructor and the options of
``amanda run -t NAME:key=value`` alike::

    @attrs.frozen(kw_only=True)
    class BusyOptions:
        ops: Sequence[str] = ()


    class BusyTool(ReportingTool[BusyOptions]):
        '''Finds busy operators.'''

        name = "busy"
        Options = BusyOptions

Nothing asks a tool to use this base: ``amanda run`` takes the options from the
signature of any tool's constructor, and uses ``result()``, ``print_summary()``,
``write_files()``, ``tables()`` and ``charts()`` of a tool that has them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TextIO, TypeVar

import attrs

from amanda.context import OpContext
from amanda.errors import close_matches
from amanda.tool import Tool

OptionsT = TypeVar("OptionsT")

MAX_ROWS = 20
"""Rows of a table that a summary prints; the files have all of them."""

OUTSIDE = "(outside of modules)"
"""Where tables say that an operator runs which no module runs."""


@attrs.frozen
class Table:
    """A part of a summary.

    Attributes:
        title: one line.
        columns: their headings; a column whose values are numbers is set to the right.
        rows: one value per column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def head(self) -> tuple[Sequence[Sequence[Any]], str]:
        """The rows that a summary prints, and a line about those it leaves out."""
        hidden = len(self.rows) - MAX_ROWS
        return self.rows[:MAX_ROWS], f"... and {hidden} more rows" if hidden > 0 else ""


@attrs.frozen(kw_only=True)
class Chart:
    """A picture of a result as plain data; who draws it decides what it looks like.

    Attributes:
        title: one line.
        kind: ``"bar"`` for named bars, those of several series stacked; ``"hist"`` for the
            upright bars of a histogram; ``"line"`` and ``"points"`` for values along an axis.
        labels: the name of each bar or bin; of lines and points their numbers on the x axis.
        values: the values of each series by its name, one per label, None for a gap.
        names: what each label stands for, where hovering is to tell more than the label.
        unit: of the values, such as ``"s"``, ``"B"`` or ``"FLOP"``; drawn with prefixes.
        axis: what the labels are, where that has to be said.
        log: whether powers of ten of the values are equally far apart; not for bars.
    """

    title: str
    kind: Literal["bar", "hist", "line", "points"]
    labels: Sequence[Any]
    values: Mapping[str, Sequence[float | None]]
    names: Sequence[str] = ()
    unit: str = ""
    axis: str = ""
    log: bool = False


def type_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """A list of op types, or of other names; a single one may be given as it is."""
    return (names,) if isinstance(names, str) else tuple(names)


class ReportingTool(Tool, Generic[OptionsT]):
    """Base of the tools that give a result.

    Attributes:
        name: the short name, as in the entry point.
        schema: version of what :meth:`op_rows` and :meth:`summary` give.
        Options: the class of the options.
        options: the options of this instance.

    Raises:
        TypeError: an option does not exist or is missing.
        ValueError: an option has a value that it cannot have.
    """

    name: ClassVar[str]
    schema: ClassVar[int] = 1
    Options: ClassVar[type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            # What help(), editors and `amanda run` read.
            cls.__signature__ = _signature(cls.Options)  # type: ignore[attr-defined]

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
            # The validators of attrs add what they were called with to their message.
            if len(error.args) == 1:
                raise
            raise type(error)(f"{self.name}: {error.args[0]}") from None

    def result(self) -> dict[str, Any]:
        """What the tool has found, as plain data: what ``DIR/<tool>.json`` holds."""
        rows = self.op_rows()
        return {
            "tool": self.name,
            "schema": self.schema,
            "namespaces": sorted({row["namespace"] for row in rows}),
            "summary": self.summary(),
            "ops": rows,
        }

    def op_rows(self) -> list[dict[str, Any]]:
        """One dict per operator, with at least ``id type module namespace``."""
        raise NotImplementedError(f"{type(self).__name__} must say what it found: op_rows()")

    def summary(self) -> dict[str, Any]:
        """The figures over all operators."""
        raise NotImplementedError(f"{type(self).__name__} must say what it found: summary()")

    def tables(self) -> Iterable[Table]:
        """The summary as tables for people."""
        return ()

    def charts(self) -> Iterable[Chart]:
        """Pictures for the page that ``amanda run --html`` writes."""
        return ()

    def print_summary(self, file: TextIO) -> None:
        """Print :meth:`tables` as plain text."""
        for table in self.tables():
            print(plain_text(table), file=file)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write what does not go into the JSON file, as ``folder/stem.*``; returns the paths."""
        return ()


def _check_choice(tool: str, option: inspect.Parameter, value: Any) -> None:
    if typing.get_origin(option.annotation) is not Literal:
        return
    choices = typing.get_args(option.annotation)
    if value not in choices:
        raise ValueError(
            f"tool {tool}: {option.name}={value} is not one of {', '.join(map(str, choices))}"
        )


def _signature(options: type) -> inspect.Signature:
    """The signature of an options class, its annotations resolved where they can be."""
    found = inspect.signature(options)
    try:
        types = typing.get_type_hints(options)
    except NameError:
        # It names types that exist for type checkers only.
        return found
    parameters = [
        parameter.replace(annotation=types.get(parameter.name, parameter.annotation))
        for parameter in found.parameters.values()
    ]
    return found.replace(parameters=parameters, return_annotation=found.empty)


@attrs.frozen
class OpDescription:
    """What the rows of all tools say of an operator.

    Attributes:
        id: the operator's id, of a backward operator its own.
        type: what it computes: canonical (``conv2d``) where a mapping rule knows
            it, else the framework's name for it.
        name: the framework's name for it.
        module: path of the module that runs it.
        namespace: where it runs.
        forward: of a backward operator the forward operator's id, else "".
    """

    id: str
    type: str
    name: str
    module: str
    namespace: str
    forward: str = ""

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.forward else "forward"

    @property
    def place(self) -> str:
        """Where tables say that it runs, see :func:`place`."""
        return place(self.id, self.module)

    def row(self) -> dict[str, Any]:
        """The keys that every row has, and those that a backward operator's has."""
        row = {
            "id": self.id,
            "type": self.type,
            "name": self.name,
            "direction": self.direction,
            "module": self.module,
            "namespace": self.namespace,
        }
        return {**row, "forward": self.forward} if self.forward else row

    def is_selected(self, types: Sequence[str]) -> bool:
        """Whether one of `types` is its type or name; no types at all select everything."""
        return not types or self.type in types or self.name in types


def describe(context: OpContext) -> OpDescription:
    """The operator of a context, in the terms that all tools share.

    The types are canonical if the tool depends on ``MappingTool.standard()``.
    """
    op_id, name = context.get_op_id(), op_name(context.get_op())
    kind = str(context["op_type"] or name)
    module, namespace = context.get_module(), str(context.namespace)
    if context.is_forward():
        return OpDescription(op_id, kind, name, module, namespace)
    backward_name = op_name(context.get_backward_op())
    backward_type = str(context["backward_op_type"] or backward_name)
    backward_id = str(context.get_backward_op_id())
    return OpDescription(backward_id, backward_type, backward_name, module, namespace, op_id)


def place(op_id: str, module: str) -> str:
    """The module's path; of an outermost module's own forward its name, from the id."""
    outermost = op_id.partition("/")[0].partition("#")[0]
    return module or outermost or OUTSIDE


def op_name(op: Any) -> str:
    """The framework's name for an operator: its ``__name__``, or its ``type``."""
    name = getattr(op, "__name__", None) or getattr(op, "type", None)
    return str(name or type(op).__name__)


def unknown_option(tool: str, option: str, known: Iterable[str]) -> str:
    """The message for an option that a tool does not have, with the close matches."""
    names = list(known)
    guess = close_matches(option, names)
    has = f"it has {', '.join(names)}" if names else "it has none"
    return f"tool {tool} has no option {option!r}{guess} ({has})"


def plain_text(table: Table) -> str:
    """A table as lines of text; of one without rows the title."""
    if not table.rows:
        return table.title
    rows, more = table.head()
    cells = [[str(value) for value in row] for row in rows]
    columns = list(zip(table.columns, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(widths))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(table.columns), ["-" * width for width in widths], *cells]
    ]
    return "\n".join([table.title, *(f"  {line}" for line in lines), *([more] if more else [])])


def write_json(path: Path, data: Any) -> None:
    """Write plain data so that the file is either complete or not there.

    What JSON has no form for is written as text, infinities included.

    Raises:
        OSError: the file cannot be written.
    """
    with replaced(path) as file:
        json.dump(plain_data(data), file, indent=1, default=str, allow_nan=False)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A file to write text into, which takes the place of `path` once it is complete.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def plain_data(value: Any) -> Any:
    """The same in types that JSON has; infinities and NaN, for which it has none, as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
