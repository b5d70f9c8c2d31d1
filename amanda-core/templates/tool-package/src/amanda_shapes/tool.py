"""``shapes``: the output shapes of each operator, and the operators with varying shapes."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from amanda import OpContext
from amanda.results import Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import ReportingTool

Shapes = tuple[tuple[int, ...] | None, ...]
"""The shapes of all outputs of one execution; None for an output that is not a tensor."""


@attrs.frozen(kw_only=True)
class ShapesOptions:
    """The options: keyword arguments of the tool, and ``-t shapes:key=value``.

    ``amanda tools`` shows their types, their defaults and the descriptions below.

    Attributes:
        ops: op types to watch; all by default.
        varying: list only operators whose shapes change from execution to execution.
    """

    ops: Sequence[str] = ()
    varying: bool = False


class ShapesTool(ReportingTool[ShapesOptions]):
    """Lists the output shapes of each operator, and the operators with varying shapes."""

    name = "shapes"
    group = "look"
    schema = 1
    Options = ShapesOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ops: dict[str, OpDescription] = {}
        self._seen: dict[str, collections.Counter[Shapes]] = {}
        # Its rules give PyTorch's `conv2d` and TensorFlow's `Conv2D` the same type.
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Insert the routine after the selected operators; called once per operator."""
        op = describe(context)
        if op.is_selected(self.options.ops):
            self._ops[op.id] = op
            self._seen.setdefault(op.id, collections.Counter())
            context.insert_after_op(self.count_shapes, op_id=op.id)

    def count_shapes(self, *outputs: Any, op_id: str) -> None:
        """Count the shapes of an execution. Returning None leaves the outputs unchanged."""
        self._seen[op_id][tuple(map(shape_of, outputs))] += 1

    # -- the result -------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """For each operator ``executions``, and ``shapes`` with their number, most frequent first."""
        return [
            {
                **op.row(),
                "executions": self._seen[op.id].total(),
                "shapes": [
                    {"outputs": shapes, "executions": times}
                    for shapes, times in self._seen[op.id].most_common()
                ],
            }
            for op in self._ops.values()
            if self._seen[op.id] and (len(self._seen[op.id]) > 1 or not self.options.varying)
        ]

    def summary(self) -> dict[str, Any]:
        """The number of operators, and of operators with varying shapes."""
        return {
            "ops": len(self._ops),
            "varying_ops": sum(len(seen) > 1 for seen in self._seen.values()),
        }

    def tables(self) -> Iterable[Table]:
        """One table: an operator and its shapes in each row."""
        rows = [
            (row["id"], row["type"], row["executions"], "; ".join(map(_format, row["shapes"])))
            for row in self.op_rows()
        ]
        found = self.summary()
        counts = f"{found['varying_ops']} of {found['ops']} operators"
        title = f"{self.name}: {counts} have varying shapes"
        yield Table(title, ("op", "type", "executions", "shapes"), rows)


def shape_of(output: Any) -> tuple[int, ...] | None:
    """The shape of a tensor of any framework; None for an object without a shape."""
    shape = getattr(output, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def _format(entry: dict[str, Any]) -> str:
    """``2x3 + 4``: the shapes of two outputs."""
    sizes = ["?" if shape is None else "x".join(map(str, shape)) for shape in entry["outputs"]]
    return " + ".join(size or "scalar" for size in sizes)
