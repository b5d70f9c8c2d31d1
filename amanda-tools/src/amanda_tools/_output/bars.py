"""A chart of stacked bars as an SVG file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from amanda.results import Chart

_LONGEST_NAME = 90
_TWO = ("#33658a", "#dfe3e8")
_MANY = (
    "#33658a", "#e07a5f", "#81b29a", "#f2cc8f", "#8d6a9f", "#c44536", "#6a994e", "#4ea8de",
    "#b08968", "#c9ced6",
)  # fmt: skip


def draw_bars(chart: Chart, path: Path, *, notes: Sequence[str] = ()) -> None:
    """Draw a bar from the left for each label, made of its series.

    Args:
        chart: of the kind ``"bar"``.
        path: of the file.
        notes: what is written at the end of each bar.

    Raises:
        OSError: the file cannot be written.
    """
    # Not pyplot, which the program may use: it has a state.
    height = 1.6 + 0.4 * len(chart.labels) + 0.2 * len(chart.values)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    places = range(len(chart.labels))
    ends = [0.0] * len(chart.labels)
    bars = None
    colours = itertools.cycle(_TWO if len(chart.values) < 3 else _MANY)
    for (name, values), colour in zip(chart.values.items(), colours, strict=False):
        widths = [value or 0.0 for value in values]
        bars = axes.barh(places, widths, 0.7, ends, label=_cut(name), color=colour)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    if bars is not None and notes:
        axes.bar_label(bars, notes, padding=3)
    axes.set_yticks(places, [str(label) for label in chart.labels])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(chart.title)
    axes.xaxis.set_major_formatter(EngFormatter(chart.unit))
    axes.spines[["top", "right"]].set_visible(False)
    if chart.values:
        figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    write_svg(figure, path)


def write_svg(figure: Figure, path: Path) -> None:
    """Write a drawing: the same file for the same figures, and text stays text.

    Raises:
        OSError: the file cannot be written.
    """
    with matplotlib.rc_context({"svg.hashsalt": "amanda", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _cut(name: str) -> str:
    # Names of templates are long; a leading underscore would hide it from the legend.
    head, tail = 2 * _LONGEST_NAME // 3, _LONGEST_NAME // 3
    text = name if len(name) <= _LONGEST_NAME else f"{name[:head]}…{name[-tail:]}"
    return text.lstrip("_")
