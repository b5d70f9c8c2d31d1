"""The densities of the operators, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the share of critical neurons, synapses and weights of each operator as an SVG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    from amanda_tools._output.bars import write_svg

    # The names stand upright below the axes: a letter of seven points is some 0.06 inches long.
    height = 4 + 0.06 * max((len(row["id"]) for row in rows), default=0)
    figure = Figure(figsize=(min(4 + 0.3 * len(rows), 60), height), layout="constrained")
    axes = figure.subplots()
    for kind, marker in (("neuron", "o"), ("synapse", "s"), ("weight", "^")):
        shares = [row[f"{kind}_density"] for row in rows]
        places = [i for i, share in enumerate(shares) if share is not None]
        known = [shares[i] for i in places]
        axes.plot(places, known, marker=marker, markersize=4, linewidth=1, label=f"{kind}s")
    axes.set_xticks(range(len(rows)), [row["id"] for row in rows], rotation=90, fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_ylabel("critical share")
    axes.set_title(title)
    axes.legend()
    write_svg(figure, path)
