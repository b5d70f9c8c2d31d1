"""The operator graph as a picture in layers from top to bottom: positions, and an SVG file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from amanda.text import printable
from amanda.tools.graph import Graph, TracedOp

WIDTH, HEIGHT = 180, 34
"""Size of an operator's box, in pixels."""

_GAP_X, _GAP_Y = 24, 40
"""Pixels between boxes."""

_SWEEPS = 4
"""Passes over the layers that order operators by their neighbours."""


def svg_lines(graph: Graph, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of an SVG file with the forward operators and their edges.

    Hovering shows id, module and line of an operator. An operator stands one layer below the lowest
    one that it reads from; within a layer operators are ordered by the mean position of their
    neighbours (barycentres; Sugiyama, Tagawa and Toda, 1981).
    """
    places = positions(graph)
    width = max((x for x, _ in places.values()), default=0) + WIDTH + _GAP_X
    height = max((y for _, y in places.values()), default=0) + HEIGHT + _GAP_Y
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    for edge in graph.edges:
        yield _edge(places[edge.producer], places[edge.consumer])
    for op in graph.ops:
        yield from _box(op, places[op.id], sources.get(op.id, ""))
    yield "</svg>"


def positions(graph: Graph) -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each operator's box, by id."""
    return place_nodes({op.id: [p.id for p in graph.producers(op.id)] for op in graph.ops})


def place_nodes(above: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each node's box.

    Args:
        above: node to the nodes that it reads from; in the order of the run.
    """
    layers = _layers(above)
    below: dict[str, list[str]] = {op_id: [] for op_id in above}
    for op_id, producers in above.items():
        for producer in producers:
            below[producer].append(op_id)
    column: dict[str, float] = {}
    for layer in layers:
        column.update((op_id, float(i)) for i, op_id in enumerate(layer))
    # Alternate directions: each pass orders the layers by the neighbours that it has just placed.
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours: Mapping[str, Sequence[str]] = above if downwards else below
        for layer in layers if downwards else reversed(layers):
            layer.sort(key=lambda op_id: _barycentre(op_id, neighbours, column))
            start = -len(layer) / 2
            column.update((op_id, start + i) for i, op_id in enumerate(layer))
    left = min(column.values(), default=0)
    return {
        op_id: (
            _GAP_X + (column[op_id] - left) * (WIDTH + _GAP_X),
            _GAP_Y / 2 + depth * (HEIGHT + _GAP_Y),
        )
        for depth, layer in enumerate(layers)
        for op_id in layer
    }


def _layers(above: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Group nodes by the length of the longest way to them."""
    depth: dict[str, int] = {}
    layers: list[list[str]] = []
    # Nodes come after those that they read from, except where a later execution of an earlier node
    # read from a later one: such an edge does not count.
    for op_id, producers in above.items():
        depth[op_id] = 1 + max((depth.get(producer, -1) for producer in producers), default=-1)
        while len(layers) <= depth[op_id]:
            layers.append([])
        layers[depth[op_id]].append(op_id)
    return layers


def _barycentre(
    op_id: str, neighbours: Mapping[str, Sequence[str]], column: Mapping[str, float]
) -> float:
    found = [column[other] for other in neighbours[op_id]]
    return sum(found) / len(found) if found else column[op_id]


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + WIDTH / 2, start[1] + HEIGHT
    x2, y2 = end[0] + WIDTH / 2, end[1]
    bend = max(_GAP_Y / 2, abs(y2 - y1) / 3)
    return (
        f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} '
        f'{x2:.0f},{y2:.0f}" fill="none" stroke="#8a94a6"/>'
    )


def _box(op: TracedOp, place: tuple[float, float], source: str) -> Iterator[str]:
    x, y = place
    about = "\n".join(text for text in (op.id, op.module, source) if text)
    yield f'<g class="op"><title>{_escaped(about)}</title>'
    yield (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colour(op.type)}" stroke="#4a5568"/>'
    )
    text = f'<text x="{x + WIDTH / 2:.0f}" text-anchor="middle"'
    yield f'{text} y="{y + 14:.0f}">{_cut(op.type)}</text>'
    yield f'{text} y="{y + 28:.0f}" font-size="10" fill="#4a5568">{_cut(op.module)}</text></g>'


def _cut(text: str) -> str:
    return _escaped(text if len(text) <= 28 else f"…{text[-27:]}")


def _escaped(text: str) -> str:
    # XML has no control characters, not even as references.
    return escape(printable(text, keep="\n"))


def colour(kind: str) -> str:
    """Return a light colour for an op type, the same in every picture."""
    return f"hsl({hue(kind)},60%,86%)"


def hue(kind: str) -> int:
    """Return the hue, in degrees, of an op type."""
    digest = hashlib.sha256(kind.encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:2], "big") % 360
