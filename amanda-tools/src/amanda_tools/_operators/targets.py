"""The operators that an optimization tool acts on, by type, and why not on others.

::

    targets = Targets(("conv2d", "linear"), exclude=("decoder.*",))
    if targets.takes(describe(context)): ...
    targets.skipped                 # operators of these types that were not treated, and why
"""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._operators.op_table import row_of


@attrs.define
class Targets:
    """Selects the model's operators by type, without excluded ones; remembers which types occurred.

    Operators of other phases, as those that initialise weights, are left alone and counted.

    Attributes:
        types: canonical types, or the framework's names.
        exclude: patterns of op ids and module paths (``*``, ``?``, ``[...]``).
        is_default: the types are the tool's default, not the user's choice.
        skipped: id to (operator, reason) of operators of the types that are not treated.
        outside: phase to the ids of operators of the types that are outside of the model.
    """

    types: Sequence[str]
    exclude: Sequence[str] = ()
    is_default: bool = False
    skipped: dict[str, tuple[OpDescription, str]] = attrs.field(factory=dict)
    outside: dict[str, set[str]] = attrs.field(
        factory=lambda: collections.defaultdict[str, set[str]](set)
    )
    _met: set[str] = attrs.field(factory=set)
    _excluding: set[str] = attrs.field(factory=set)

    def takes(self, op: OpDescription, *, has_weight: bool = False) -> bool:
        """Decide whether the tool acts on an operator.

        Args:
            op: the operator.
            has_weight: count a matrix product as ``linear``: one of its factors is a parameter.
        """
        self._met |= {op.type, op.name}
        is_excluded = self._excludes(op)
        is_product = "multiplies_activations" in row_of(op.type).traits
        is_linear = has_weight and is_product and "linear" in self.types
        if is_linear:
            self._met.add("linear")
        if not op.is_selected(self.types) and not is_linear:
            return False
        if op.phase not in MODEL:
            self.outside[op.phase].add(op.id)
            return False
        if is_excluded:
            self.skip(op, "it is excluded")
            return False
        return True

    def _excludes(self, op: OpDescription) -> bool:
        """True if a pattern matches; remembers which patterns do, whatever the operator's type."""
        found = {
            pattern
            for pattern in self.exclude
            for name in (op.id, op.module)
            if name == pattern or fnmatch.fnmatchcase(name, pattern)
        }
        self._excluding |= found
        return bool(found)

    def skip(self, op: OpDescription, reason: str) -> None:
        """Remember why an operator of the types is not treated."""
        self.skipped[op.id] = (op, reason)

    def never_met(self) -> list[str]:
        """Return the types that no operator had; of default types only if no operator had any."""
        missing = [kind for kind in self.types if kind not in self._met]
        return missing if len(missing) == len(self.types) or not self.is_default else []

    def exclude_never_met(self) -> list[str]:
        """Return the patterns of ``exclude`` that match no operator, as misspelt ones do."""
        return [pattern for pattern in self.exclude if pattern not in self._excluding]

    def summary(self) -> dict[str, Any]:
        """Return keys of a summary: skipped operators, types and patterns that did not occur."""
        return {
            "skipped": self.rows(),
            "ops_never_met": self.never_met(),
            "exclude_never_met": self.exclude_never_met(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per skipped operator, with the ``reason``."""
        return [
            {"id": op.id, "type": op.type, "module": op.module, "reason": reason}
            for op, reason in self.skipped.values()
        ]

    def tables(self, tool: str) -> Iterable[Table]:
        """Yield tables of skipped operators, and of types and patterns that did not occur."""
        if self.skipped:
            rows = [(row["id"], row["type"], row["reason"]) for row in self.rows()]
            yield Table(f"{tool}: {len(rows)} ops skipped", ("op", "type", "reason"), rows)
        if self.outside:
            counts = [(phase, len(ids)) for phase, ids in self.outside.items()]
            yield Table(f"{tool}: left alone, outside of the model", ("phase", "ops"), counts)
        yield from self.unmet(tool)

    def unmet(self, tool: str) -> Iterable[Table]:
        """Yield tables of types and patterns that did not occur."""
        for title, column, names in (
            ("types of ops= that no operator has", "type", self.never_met()),
            ("patterns of exclude= that match nothing", "pattern", self.exclude_never_met()),
        ):
            if names:
                yield Table(f"{tool}: {title}", (column,), [(name,) for name in names])
