"""The bar chart of what each mechanism sees (paper, Figure 9)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_COLOURS = ("#33658a", "#e07a5f", "#81b29a", "#f2cc8f", "#8d6a9f")


def draw(mechanisms: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the operators that each mechanism sees, forward and backward, as SVG.

    Args:
        mechanisms: as :meth:`CoverageTool.summary` gives them.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    directions = ("forward", "backward")
    height = 0.8 / len(mechanisms)
    # Not pyplot, which the program may use: it has a state.
    figure = Figure(figsize=(7, 1.2 + 0.7 * len(mechanisms)), layout="constrained")
    axes = figure.subplots()
    for number, (name, figures) in enumerate(mechanisms.items()):
        places = [place + (number + 0.5) * height - 0.4 for place in range(len(directions))]
        bars = axes.barh(
            places,
            [figures[way]["ops"] for way in directions],
            height,
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
        )
        axes.bar_label(bars, [_label(figures[way]) for way in directions], padding=3)
    axes.set_yticks(range(len(directions)), directions)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("operators seen")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(mechanisms), frameon=False)
    # The same picture for the same figures; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "amanda", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _label(figures: Mapping[str, Any]) -> str:
    share = figures["share"]
    return "none there" if share is None else f"{figures['ops']} ({100 * share:.0f} %)"
