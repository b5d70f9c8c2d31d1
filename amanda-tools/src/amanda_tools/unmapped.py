"""``unmapped``: operators without a canonical type or without a rule for their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from amanda import OpContext
from amanda.results import Table
from amanda.tools import canonical
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.phases import PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool

__all__ = ["UnmappedTool"]


class UnmappedTool(PrintingTool[PhaseOptions]):
    """Lists a model's forward operators that no mapping rule describes.

    A tool that reads canonical types and attributes does not understand them. A rule is added with
    ``amanda.tools.canonical.attribute_rules``.

    Example: ``amanda run -t unmapped:phases=all -o out -- train.py``
    """

    name = "unmapped"
    Options = PhaseOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._found: dict[str, tuple[OpDescription, str]] = {}
        self._seen: dict[str, OpDescription] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        self._seen[op.id] = op
        if not canonical.has_type(context):
            self._found[op.id] = op, "type"
        elif not canonical.has_rule(context):
            self._found[op.id] = op, "rule"

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that is not described.

        ``missing``: type, where it has no canonical type, or rule, where it has one and no rule
        gives its attributes.
        """
        return [{**op.row(), "missing": missing} for op, missing in self._found.values()]

    def summary(self) -> dict[str, Any]:
        """``ops``, the forward operators looked at; ``unmapped``, those that are not described;
        ``by_type``. They are of the phases that the option names."""
        found, seen = self._listed()
        return {"ops": len(seen), "unmapped": len(found), "by_type": _by_type(found)}

    def _listed(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of the phases that the option names: not described, and all."""
        seen = shown((op.row() for op in self._seen.values()), self.options)
        return shown(self.op_rows(), self.options), seen

    def tables(self) -> Iterable[Table]:
        """Yield a table of the types that are not described, the most frequent first."""
        found, seen = self._listed()
        title = f"unmapped: {len(found)} of {len(seen)} forward operators"
        rows = [
            (kind, of["name"], of["ops"], f"canonical {of['missing']}")
            for kind, of in _by_type(found).items()
        ]
        yield Table(title, ("type", "framework's name", "ops", "missing"), rows)
        yield from other_phases("unmapped", self.op_rows(), self.options)


def _by_type(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Count rows by type, the most frequent first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        empty = {"name": row["name"], "ops": 0, "missing": row["missing"]}
        group = found.setdefault(str(row["type"]), empty)
        group["ops"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["ops"]))
