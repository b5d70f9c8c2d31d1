"""Two tools: one of the common form, and one that is nothing but a class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import attrs

import amanda
from amanda import OpContext
from amanda.results import Table
from amanda.tools.description import describe
from amanda.tools.reporting import ReportingTool


@attrs.frozen(kw_only=True)
class LargestOptions:
    """The options of ``largest``.

    Attributes:
        ops: op types to look at; all by default.
        digits: digits to round to.
    """

    ops: Sequence[str] = ()
    digits: int = 2


class LargestTool(ReportingTool[LargestOptions]):
    """Finds the largest output of each operator."""

    name = "largest"
    Options = LargestOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found: dict[str, dict[str, Any]] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Watch the output of an operator that was asked for."""
        op = describe(context)
        if op.is_selected(self.options.ops):
            context.insert_after_op(self.look, row=op.row())

    def look(self, output: Any, row: dict[str, Any]) -> None:
        """Remember the largest output so far."""
        row = self.found.setdefault(row["id"], row)
        value = float(output.data.max())
        row["largest"] = max(row.get("largest", value), value)

    def op_rows(self) -> list[dict[str, Any]]:
        digits = self.options.digits
        return [{**row, "largest": round(row["largest"], digits)} for row in self.found.values()]

    def summary(self) -> dict[str, Any]:
        return {"largest": max((row["largest"] for row in self.op_rows()), default=None)}

    def tables(self) -> Iterable[Table]:
        rows = [(row["id"], row["largest"]) for row in self.op_rows()]
        yield Table("largest outputs", ("op", "largest"), rows)


class LogTool(amanda.Tool):
    """Prints what runs.

    Args:
        prefix: what each line begins with.
        fail: op type whose routine raises an error.
    """

    def __init__(self, prefix: str = "log", fail: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.fail = fail
        self.lines: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Log every operator."""
        context.insert_before_op(self.log, inputs=[], name=context.get_op().__name__)

    def log(self, name: str) -> None:
        """One line per execution."""
        if name == self.fail:
            raise ValueError(f"cannot log {name}")
        self.lines.append(f"{self.prefix}: {name}")

    def print_summary(self, file: TextIO) -> None:
        """The lines."""
        print(*self.lines, sep="\n", file=file)
