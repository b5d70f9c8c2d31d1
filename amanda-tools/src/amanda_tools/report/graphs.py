"""The operator graph of a page, in several levels of detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda_tools.drawing import HEIGHT, WIDTH, hue, placed

MAX_NODES = 6000
"""Nodes of a level; finer ones are left out."""


@attrs.frozen(kw_only=True)
class GraphView:
    """A graph in levels from coarse to fine.

    At each level modules to some depth are one node; at the finest one all operators are.

    Attributes:
        levels: what the browser draws, see :func:`_level`.
        note: what is left out; "" if nothing is.
    """

    levels: Sequence[Mapping[str, Any]]
    note: str = ""

    @property
    def chosen(self) -> int:
        """The level to begin with: the finest that is not large."""
        small = [i for i, level in enumerate(self.levels) if len(level["nodes"]) <= 400]
        return max(small, default=0)

    def data(self) -> dict[str, Any]:
        """What the browser gets."""
        size = {"width": WIDTH, "height": HEIGHT}
        return {**size, "chosen": self.chosen, "levels": list(self.levels)}


def graph_of(result: Mapping[str, Any]) -> GraphView | None:
    """The graph of a result that has ``ops`` and ``edges``; None of one that has not.

    An edge leads from ``producer`` to ``consumer``, which are ids of operators.
    """
    ops, edges = _mappings(result.get("ops")), _mappings(result.get("edges"))
    pairs = [(str(e.get("producer", "")), str(e.get("consumer", ""))) for e in edges]
    met = {op_id for pair in pairs for op_id in pair}
    known = {
        str(op["id"]): op
        for op in ops
        if "id" in op and (op.get("direction") != "backward" or str(op["id"]) in met)
    }
    pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
    if not pairs:
        return None
    levels: list[dict[str, Any]] = []
    omitted = 0
    for depth in range(1, _deepest(known.values()) + 2):
        groups = {op_id: _group(op, depth) for op_id, op in known.items()}
        count = len(set(groups.values()))
        if levels and count == len(levels[-1]["nodes"]):
            levels.pop()
        if count > MAX_NODES:
            omitted = len(known)
            break
        levels.append(_level(depth, known, groups, pairs))
    if levels and len(levels[-1]["nodes"]) == len(known):
        levels[-1]["title"] = "all operators"
    note = f"{omitted:,} operators are too many to draw; modules stand for them." if omitted else ""
    return GraphView(levels=levels, note=note) if levels else None


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def _deepest(ops: Iterable[Mapping[str, Any]]) -> int:
    return max((len(_parts(op)) for op in ops), default=0)


def _parts(op: Mapping[str, Any]) -> list[str]:
    module = str(op.get("module") or "")
    return module.split(".") if module else []


def _group(op: Mapping[str, Any], depth: int) -> str:
    """The node that an operator belongs to: a module of this depth, or itself."""
    parts = _parts(op)
    return "\0".join(parts[:depth]) + "\0" if len(parts) >= depth else str(op["id"])


def _level(
    depth: int,
    ops: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, str],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Its ``title``; ``nodes`` as (label, place, x, y, hue, number of operators, text to
    search); ``edges`` as numbers of nodes."""
    members: dict[str, list[str]] = {}
    for op_id, group in groups.items():
        members.setdefault(group, []).append(op_id)
    above: dict[str, dict[str, None]] = {group: {} for group in members}
    for producer, consumer in pairs:
        if groups[producer] != groups[consumer]:
            above[groups[consumer]][groups[producer]] = None
    places = placed({group: list(readers) for group, readers in above.items()})
    numbers = {group: number for number, group in enumerate(members)}
    nodes = [
        _node(group, [ops[op_id] for op_id in of], places[group]) for group, of in members.items()
    ]
    edges = [[numbers[p], numbers[group]] for group, producers in above.items() for p in producers]
    return {"title": f"modules to depth {depth}", "nodes": nodes, "edges": edges}


def _node(
    group: str, ops: Sequence[Mapping[str, Any]], place: tuple[float, float]
) -> tuple[Any, ...]:
    first = ops[0]
    x, y = round(place[0]), round(place[1])
    if not group.endswith("\0"):
        about = [str(first.get(key) or "") for key in ("id", "module", "source")]
        kind, module = str(first.get("type", "")), str(first.get("module") or "")
        return kind, module, x, y, hue(kind), 1, "\n".join(part for part in about if part)
    path = group[:-1].replace("\0", ".")
    kinds: dict[str, int] = {}
    for op in ops:
        kind = str(op.get("type", ""))
        kinds[kind] = kinds.get(kind, 0) + 1
    order = sorted(kinds.items(), key=lambda item: -item[1])
    about = [path, f"{len(ops)} operators: " + ", ".join(f"{n} {kind}" for kind, n in order)]
    label = path.rpartition(".")[2]
    return label, f"{len(ops)} operators", x, y, hue(label), len(ops), "\n".join(about)
