"""``unmapped``: operators without a canonical type or without a rule for their attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from amanda import OpContext
from amanda.results import Table
from amanda.tools import canonical
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.printing import PrintingTool

__all__ = ["UnmappedOptions", "UnmappedTool"]


@attrs.frozen(kw_only=True)
class UnmappedOptions:
    """The options of ``unmapped``.

    Attributes:
        setup: also operators that build and initialise models.
    """

    setup: bool = False


class UnmappedTool(PrintingTool[UnmappedOptions]):
    """Lists a model's forward operators that no mapping rule describes.

    A tool that reads canonical types and attributes does not understand them. A rule is added with
    ``amanda.tools.canonical.attribute_rules``.

    Example: ``amanda run -t unmapped:setup=true -o out -- train.py``
    """

    name = "unmapped"
    Options = UnmappedOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._found: dict[str, tuple[OpDescription, str]] = {}
        self._seen: set[str] = set()
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if op.phase == "setup" and not self.options.setup:
            return
        self._seen.add(op.id)
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
        ``by_type``."""
        by_type: dict[str, dict[str, Any]] = {}
        for op, missing in self._found.values():
            group = by_type.setdefault(op.type, {"name": op.name, "ops": 0, "missing": missing})
            group["ops"] += 1
        order = sorted(by_type.items(), key=lambda item: -item[1]["ops"])
        return {"ops": len(self._seen), "unmapped": len(self._found), "by_type": dict(order)}

    def tables(self) -> Iterable[Table]:
        """The types that are not described, the most frequent first."""
        found = self.summary()
        title = f"unmapped: {found['unmapped']} of {found['ops']} forward operators"
        rows = [
            (kind, of["name"], of["ops"], f"canonical {of['missing']}")
            for kind, of in found["by_type"].items()
        ]
        yield Table(title, ("type", "framework's name", "ops", "missing"), rows)
