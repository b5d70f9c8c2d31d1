"""Lays out charts: from a :class:`~amanda.results.Chart` to positions; writes SVG files of them.

:func:`lay_out` computes the layout of the files ``<tool>.svg``, a template writes it. (Charts of a
page are drawn by a library in the browser.) :func:`write_svg` writes a file::

    write_svg(Chart(title="calls", kind="bar", labels=["a", "b"], values={"calls": [3, 1]}), path)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.files import replaced
from amanda.results import Chart
from amanda_tools._output.chart_data import sum_at_one_depth
from amanda_tools._output.templating import environment
from amanda_tools._output.units import format_short

MAX_BARS = 24
"""Bars of a chart; those that follow are in the tables only."""

WIDTH, HEIGHT = 640.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 10.0, 34.0
"""Size of a drawing with axes, and its margins for them, in pixels."""

AXES = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "bottom": BOTTOM}
"""The same sizes, for templates."""

COLOURS = (
    "#3b73b9", "#d98032", "#4c9a6a", "#b5485d", "#7a62b0", "#8a7a4c", "#3d97a8", "#b0578f",
    "#7f9a3b", "#9aa3ad",
)  # fmt: skip
"""Colours of the series in files; ``style.css`` has them for pages, light and dark."""

_MOST_HOVERED = 200
"""Points of a line that show their values when hovered over; longer lines have none."""

_TICKS = 5
_BAR_HEIGHT, _BARS_WIDTH, _LETTER = 22, 420, 6.2
"""Pixels in files: from one bar to the next, of the longest bar, of a letter (about)."""

_TITLE_HEIGHT, _LEGEND_LINE = 36, 16

_LONGEST_NAME = 90
"""Letters of a series' name in the legend of a file."""


@attrs.frozen
class BarPart:
    """The part of a stacked bar that one series makes up.

    Attributes:
        series: number of the series.
        percent: length, as a percentage of the longest bar.
        text: series and value.
        start: where it begins, as a percentage of the longest bar.
    """

    series: int
    percent: float
    text: str
    start: float = 0.0


@attrs.frozen
class Bar:
    """One bar: its label, its parts, and the value of all of it as text."""

    label: str
    parts: Sequence[BarPart]
    text: str

    @property
    def percent(self) -> float:
        """Length, as a percentage of the longest bar."""
        return sum(part.percent for part in self.parts)


@attrs.frozen
class Tick:
    """A position on an axis, in pixels, and its label."""

    place: float
    text: str


@attrs.frozen
class ChartMark:
    """A point, or a column of a histogram.

    Attributes:
        series: number of the series.
        x, y: left and upper edge of a column, centre of a point.
        width, height: 0 for points.
        text: shown when hovered over.
    """

    series: int
    x: float
    y: float
    width: float
    height: float
    text: str


@attrs.frozen(kw_only=True)
class Drawing:
    """The layout of a chart.

    Attributes:
        chart: the chart.
        series: names for the legend; empty for a single series.
        bars: of a bar chart.
        hidden: number of bars left out.
        x_ticks, y_ticks: of a chart with axes.
        lines: of each line the number of its series and the ``d`` of an SVG path.
        points, columns: marks.
    """

    chart: Chart
    series: Sequence[str]
    bars: Sequence[Bar] = ()
    hidden: int = 0
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    lines: Sequence[tuple[int, str]] = ()
    points: Sequence[ChartMark] = ()
    columns: Sequence[ChartMark] = ()


def lay_out(chart: Chart) -> Drawing | None:
    """Compute the layout of a chart; None if it has no values."""
    if chart.modules:
        chart = sum_at_one_depth(chart)
    series = numbers_of(chart)
    if not chart.labels or all(v is None for values in series.values() for v in values):
        return None
    names = list(series) if len(series) > 1 else []
    if chart.kind == "bar":
        return _lay_out_bars(chart, series, names)
    return _lay_out_axes(chart, series, names)


def numbers_of(chart: Chart) -> dict[str, list[float | None]]:
    """Return the values of each series; None for what is not a finite number."""
    return {
        str(name): [_number(value) for value in values] for name, values in chart.values.items()
    }


def write_svg(chart: Chart, path: Path, *, notes: Sequence[str] = ()) -> None:
    """Write a chart as an SVG file: the same file for the same chart.

    Args:
        chart: the chart; without values only its title is written.
        path: path of the file.
        notes: texts at the ends of the bars, in place of their values.

    Raises:
        OSError: the file cannot be written.
    """
    drawing = lay_out(chart) or Drawing(chart=chart, series=())
    drawing = attrs.evolve(drawing, series=[_shorten(name) for name in drawing.series])
    longest = max((len(bar.label) for bar in drawing.bars), default=0)
    names_width = 12 + round(_LETTER * longest)
    top = _TITLE_HEIGHT + _LEGEND_LINE * len(drawing.series)
    has_bars = chart.kind == "bar"
    rows = len(drawing.bars) + bool(drawing.hidden)
    with replaced(path) as file:
        text = (
            environment()
            .get_template("chart.svg")
            .render(
                drawing=drawing,
                notes=notes,
                colours=COLOURS,
                axes=AXES,
                top=top,
                names_width=names_width,
                bar_scale=_BARS_WIDTH / 100,
                # Notes need about as much room at the right as a long value.
                width=names_width + _BARS_WIDTH + 120 if has_bars else WIDTH,
                height=top + (_BAR_HEIGHT * rows + 12 if has_bars else HEIGHT),
            )
        )
        file.write(text)


def _shorten(name: str) -> str:
    """Cut the middle out of a long name, such as that of a kernel made from a C++ template."""
    if len(name) <= _LONGEST_NAME:
        return name
    tail = _LONGEST_NAME // 3
    return f"{name[: _LONGEST_NAME - tail]}…{name[-tail:]}"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


# -- bars ---------------------------------------------------------------------


def _lay_out_bars(
    chart: Chart, series: Mapping[str, Sequence[float | None]], names: list[str]
) -> Drawing:
    count = min(len(chart.labels), *(len(values) for values in series.values()))
    stacked = [[max(values[i] or 0.0, 0.0) for values in series.values()] for i in range(count)]
    finite = [[v if math.isfinite(v) else 0.0 for v in values] for values in stacked]
    longest = max(map(sum, finite), default=0.0) or 1.0
    bars = []
    for label, values in list(zip(chart.labels, finite, strict=False))[:MAX_BARS]:
        parts, start = [], 0.0
        for i, value in enumerate(values):
            percent = round(100 * value / longest, 3)
            text = _with_series(names, i, format_short(value, chart.unit))
            parts.append(BarPart(i, percent, text, start))
            start += percent
        bars.append(Bar(str(label), parts, format_short(sum(values), chart.unit)))
    return Drawing(chart=chart, series=names, bars=bars, hidden=max(count - MAX_BARS, 0))


def _with_series(names: Sequence[str], series: int, text: str) -> str:
    return f"{names[series]}: {text}" if names else text


# -- charts with axes ---------------------------------------------------------


@attrs.frozen
class Scale:
    """An axis: maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Map a value to pixels; values beyond the axis are put at its end."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log10(max(v, self.low)) for v in (low, high, value))
        share = min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, unit: str) -> list[Tick]:
        """Return ticks at about five round values."""
        return [Tick(self.place(v), format_short(v, unit)) for v in self._values()]

    def _values(self) -> Iterable[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            some = powers[:: max(len(powers) // _TICKS, 1)]
            return [10.0**power for power in some if self.low <= 10.0**power <= self.high]
        step = _round_up((self.high - self.low) / _TICKS)
        # The ends count as multiples of the step despite rounding.
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_up(step: float) -> float:
    """Round up to 1, 2, 5, 10, 20 ..."""
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _lay_out_axes(
    chart: Chart, series: Mapping[str, Sequence[float | None]], names: list[str]
) -> Drawing:
    is_hist = chart.kind == "hist"
    numbers = [_number(label) for label in chart.labels]
    is_numeric = not is_hist and all(n is not None for n in numbers)
    xs = [n for n in numbers if n is not None] if is_numeric else list(range(len(chart.labels)))
    margin = 0.5 if is_hist or len(xs) == 1 else 0.0
    horizontal = Scale(min(xs) - margin, max(xs) + margin, LEFT, WIDTH - RIGHT)
    vertical = _vertical(chart, [v for vs in series.values() for v in vs if v is not None])
    marks = list(_marks(chart, series, names, xs, horizontal, vertical))
    lines = []
    if chart.kind == "line":
        lines = [(i, _path([m for m in marks if m.series == i])) for i in range(len(series))]
    if is_numeric:
        x_ticks = horizontal.ticks("")
    else:
        step = max(len(xs) // (_TICKS + 1), 1)
        x_ticks = [Tick(horizontal.place(x), str(chart.labels[x])) for x in range(0, len(xs), step)]
    has_points = not is_hist and (chart.kind != "line" or len(xs) <= _MOST_HOVERED)
    return Drawing(
        chart=chart,
        series=names,
        x_ticks=x_ticks,
        y_ticks=vertical.ticks(chart.unit),
        lines=lines,
        points=marks if has_points else [],
        columns=marks if is_hist else [],
    )


def _vertical(chart: Chart, values: Sequence[float]) -> Scale:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if chart.log:
        smallest = min((value for value in finite if value > 0), default=1.0)
        # Values without a logarithm are drawn a power of ten below the smallest that has one.
        low = 10.0 ** (math.floor(math.log10(smallest)) - (min(finite) <= 0))
        high = max(high, low * 10)
    else:
        # Zero is on the axis if it is no farther from the values than they are from each other.
        low = min(low, 0.0) if chart.kind == "hist" or low < high - low else low
        high = high if high > low else low + 1.0
    return Scale(low, high, HEIGHT - BOTTOM, TOP, chart.log)


def _marks(
    chart: Chart,
    series: Mapping[str, Sequence[float | None]],
    names: Sequence[str],
    xs: Sequence[float],
    horizontal: Scale,
    vertical: Scale,
) -> Iterable[ChartMark]:
    width = (WIDTH - LEFT - RIGHT) / max(len(xs), 1) - 1 if chart.kind == "hist" else 0.0
    zero = vertical.place(0.0 if not chart.log else vertical.low)
    for i, values in enumerate(series.values()):
        for label, x, value in zip(chart.names or chart.labels, xs, values, strict=False):
            if value is None:
                continue
            y = vertical.place(value)
            text = f"{label}: {_with_series(names, i, format_short(value, chart.unit))}"
            top, height = (min(y, zero), abs(zero - y)) if chart.kind == "hist" else (y, 0.0)
            left = horizontal.place(x) - width / 2
            yield ChartMark(i, round(left, 2), top, round(width, 2), round(height, 2), text)


def _path(marks: Sequence[ChartMark]) -> str:
    steps = [f"{'L' if i else 'M'}{mark.x:g},{mark.y:g}" for i, mark in enumerate(marks)]
    return " ".join(steps)
