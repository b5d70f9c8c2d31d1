"""The operator graph of a page, at several levels of detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda.tools.description import OUTSIDE, place
from amanda_tools._operators.module_paths import depth_of, prefix_of
from amanda_tools._output.graph_drawing import HEIGHT, WIDTH, hue, place_nodes

MAX_NODES = 6000
"""Nodes of a level; levels with more are left out."""

_FEW_NODES = 300
"""The finest level with at most so many nodes is shown first."""

_COARSER = 1.15
"""A level needs this many times fewer nodes than the next one to be of use."""

_GAP = 48
"""Pixels between parts of the graph that nothing connects."""

_AROUND = f"{OUTSIDE}\0"
"""Node of the operators that make weights and inputs; its edges, which would lead everywhere,
are left out."""


@attrs.frozen(kw_only=True)
class GraphView:
    """A graph at levels from coarse to fine.

    At each level modules down to some depth are one node each; at the finest, operators are.

    Attributes:
        levels: data for the browser, see :func:`_level`.
        note: a sentence about levels left out; "" if none is.
    """

    levels: Sequence[Mapping[str, Any]]
    note: str = ""

    @property
    def chosen(self) -> int:
        """Number of the level shown first: the finest with at most :data:`_FEW_NODES` nodes."""
        small = [i for i, level in enumerate(self.levels) if len(level["nodes"]) <= _FEW_NODES]
        return max(small, default=0)

    def data(self) -> dict[str, Any]:
        """Return the JSON data for the browser."""
        size = {"width": WIDTH, "height": HEIGHT}
        return {**size, "chosen": self.chosen, "levels": list(self.levels)}


def graph_of(result: Mapping[str, Any]) -> GraphView | None:
    """Make the graph of a result with ``ops`` and ``edges``; None without them.

    Edges lead from ``producer`` to ``consumer``, which are ids of operators.
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
    return _view(known, pairs) if pairs else None


def _view(ops: Mapping[str, Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> GraphView:
    around = _around(ops, pairs)
    depths = range(1, max(depth_of(_module(op)) for op in ops.values()) + 1)
    choices = {
        f"modules to depth {depth}": {i: _group(op, depth, i in around) for i, op in ops.items()}
        for depth in depths
    }
    choices["all operators"] = {op_id: op_id for op_id in ops}
    levels: list[Mapping[str, Any]] = []
    note = ""
    for title, groups in reversed(choices.items()):
        size = len(set(groups.values()))
        if size > MAX_NODES:
            note = f"{len(ops):,} operators are too many to draw; modules stand for them."
        # A level that is hardly coarser than the next one helps nobody.
        elif not levels or _COARSER * size < len(levels[0]["nodes"]):
            levels.insert(0, _level(title, ops, groups, pairs))
    return GraphView(levels=levels, note=note)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def _module(op: Mapping[str, Any]) -> str:
    return str(op.get("module") or "")


def _around(ops: Mapping[str, Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> set[str]:
    """Return the operators that no way from a module leads to.

    They make weights and inputs, or update weights.
    """
    after: dict[str, list[str]] = {}
    for producer, consumer in pairs:
        after.setdefault(producer, []).append(consumer)
    waiting = [i for i, op in ops.items() if place(i, _module(op)) != OUTSIDE]
    if not waiting:
        # Without modules all operators are such, and none is special.
        return set()
    reached = set(waiting)
    while waiting:
        new = [i for i in after.get(waiting.pop(), ()) if i not in reached]
        reached.update(new)
        waiting += new
    return set(ops) - reached


def _group(op: Mapping[str, Any], depth: int, is_around: bool) -> str:
    """Return the node that an operator belongs to: a module at this depth, or itself."""
    if is_around:
        return _AROUND
    module = _module(op)
    if depth_of(module) < depth:
        return str(op["id"])
    # Ids begin with the model, so that modules of two models are told apart.
    owner = str(op["id"]).partition("/")[0].removesuffix(f".{module}")
    return f"{owner}\0{prefix_of(module, depth)}\0"


def connected_parts(nodes: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Split nodes into parts that no edge connects, the largest first."""
    leader = {node: node for node in nodes}

    def find(node: str) -> str:
        while leader[node] != node:
            # Path halving keeps the trees of this union-find flat.
            leader[node] = node = leader[leader[node]]
        return node

    for one, other in pairs:
        leader[find(one)] = find(other)
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(find(node), []).append(node)
    return sorted(found.values(), key=len, reverse=True)


def _level(
    title: str,
    ops: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, str],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Lay out one level.

    Returns:
        ``title``; ``nodes`` as (label, second line, x, y, hue, number of operators, text to
        search); ``edges`` as pairs of node numbers.
    """
    members: dict[str, list[str]] = {}
    for op_id, group in groups.items():
        members.setdefault(group, []).append(op_id)
    above: dict[str, dict[str, None]] = {group: {} for group in members}
    for producer, consumer in pairs:
        if groups[producer] not in (groups[consumer], _AROUND):
            above[groups[consumer]][groups[producer]] = None
    places = place_parts({group: list(readers) for group, readers in above.items()})
    numbers = {group: number for number, group in enumerate(places)}
    nodes = [_node(group, [ops[i] for i in members[group]], *at) for group, at in places.items()]
    edges = [[numbers[p], numbers[group]] for group, producers in above.items() for p in producers]
    return {"title": title, "nodes": nodes, "edges": edges}


def place_parts(above: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Return positions of all nodes: unconnected parts side by side, the largest first."""
    pairs = [(p, node) for node, producers in above.items() for p in producers]
    found: dict[str, tuple[float, float]] = {}
    x = y = shelf = widest = 0.0
    for part in connected_parts(list(above), pairs):
        places = place_nodes({node: above[node] for node in part})
        width = max(at[0] for at in places.values()) + WIDTH
        # The largest part, which is the first, sets the width of all rows.
        widest = widest or max(width, 10 * WIDTH)
        if x and x + width > widest:
            x, y, shelf = 0.0, y + shelf + _GAP, 0.0
        found.update((node, (round(x + at[0]), round(y + at[1]))) for node, at in places.items())
        x += width
        shelf = max(shelf, max(at[1] for at in places.values()) + HEIGHT)
    return found


def _node(group: str, ops: Sequence[Mapping[str, Any]], x: float, y: float) -> tuple[Any, ...]:
    first = ops[0]
    if not group.endswith("\0"):
        about = [str(first.get(key) or "") for key in ("id", "module", "source")]
        kind, module = str(first.get("type", "")), _module(first)
        return kind, module, x, y, hue(kind), 1, "\n".join(part for part in about if part)
    path = group[:-1].split("\0")
    kinds: dict[str, int] = {}
    for op in ops:
        kind = str(op.get("type", ""))
        kinds[kind] = kinds.get(kind, 0) + 1
    order = sorted(kinds.items(), key=lambda item: -item[1])
    count = f"{len(ops)} operator{'s' if len(ops) > 1 else ''}"
    contents = ", ".join(f"{n} {kind}" for kind, n in order)
    about = [".".join(part for part in path if part), f"{count}: {contents}"]
    return path[-1], count, x, y, hue(path[-1]), len(ops), "\n".join(about)
