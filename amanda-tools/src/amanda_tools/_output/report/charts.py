"""Charts of a page: where everything goes. The template writes it as HTML and SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda.results import Chart

MAX_BARS = 24
"""Bars of a chart; those after are in the tables."""

WIDTH, HEIGHT = 640.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 10.0, 34.0
"""Of a drawing with axes: its size, and the room that the axes take."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


@attrs.frozen
class Part:
    """What one series adds to a bar: its number, share of the longest bar, and value as text."""

    series: int
    percent: float
    text: str


@attrs.frozen
class Bar:
    """One bar."""

    label: str
    parts: Sequence[Part]
    text: str


@attrs.frozen
class Tick:
    """A place on an axis and what stands there."""

    place: float
    text: str


@attrs.frozen
class Mark:
    """A point or an upright bar: its series, place, size and what hovering tells."""

    series: int
    x: float
    y: float
    width: float
    height: float
    text: str


@attrs.frozen(kw_only=True)
class Drawing:
    """A chart, ready to be written.

    Attributes:
        chart: what it shows.
        series: names of the series, if there are several.
        bars: of a bar chart.
        hidden: how many bars are left out.
        x_ticks, y_ticks: of a chart with axes.
        lines: path of each line: its series and what stands in ``d``.
        points, columns: marks.
    """

    chart: Chart
    series: Sequence[str]
    bars: Sequence[Bar] = ()
    hidden: int = 0
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    lines: Sequence[tuple[int, str]] = ()
    points: Sequence[Mark] = ()
    columns: Sequence[Mark] = ()


def drawing_of(chart: Chart) -> Drawing | None:
    """Where everything goes; None if there is nothing to draw."""
    series = {
        str(name): [_number(value) for value in values] for name, values in chart.values.items()
    }
    if not chart.labels or all(v is None for values in series.values() for v in values):
        return None
    names = list(series) if len(series) > 1 else []
    if chart.kind == "bar":
        return _bars(chart, series, names)
    return _axes(chart, series, names)


def amount(value: float, unit: str) -> str:
    """A number for people, of three digits: ``1.23 GFLOP``, ``4.5 µs``, ``12 %``."""
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    if unit == "%" or not value:
        return f"{value:.3g} {unit}".rstrip()
    prefixes = _PREFIXES + (_SMALL if unit == "s" else ())
    for factor, prefix in prefixes:
        if abs(value) >= factor * 0.9995:
            return f"{_short(value / factor)} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def _bars(chart: Chart, series: Mapping[str, Sequence[float | None]], names: list[str]) -> Drawing:
    count = min(len(chart.labels), *(len(values) for values in series.values()))
    stacked = [[max(values[i] or 0.0, 0.0) for values in series.values()] for i in range(count)]
    finite = [[v if math.isfinite(v) else 0.0 for v in values] for values in stacked]
    longest = max(map(sum, finite), default=0.0) or 1.0
    bars = []
    for label, values in list(zip(chart.labels, finite, strict=False))[:MAX_BARS]:
        parts = [
            Part(i, round(100 * value / longest, 3), _told(names, i, amount(value, chart.unit)))
            for i, value in enumerate(values)
        ]
        bars.append(Bar(str(label), parts, amount(sum(values), chart.unit)))
    return Drawing(chart=chart, series=names, bars=bars, hidden=max(count - MAX_BARS, 0))


def _told(names: Sequence[str], series: int, text: str) -> str:
    return f"{names[series]}: {text}" if names else text


@attrs.frozen
class Scale:
    """An axis: from a value to a place, in pixels, and its ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is; what is beyond the axis is at its end."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log10(max(v, self.low)) for v in (low, high, value))
        share = min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, unit: str) -> list[Tick]:
        """About five round values of the axis."""
        return [Tick(self.place(v), amount(v, unit)) for v in self._values()]

    def _values(self) -> Iterable[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            some = powers[:: max(len(powers) // 5, 1)]
            return [10.0**power for power in some if self.low <= 10.0**power <= self.high]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20 ..."""
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _axes(chart: Chart, series: Mapping[str, Sequence[float | None]], names: list[str]) -> Drawing:
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
        step = max(len(xs) // 6, 1)
        x_ticks = [Tick(horizontal.place(x), str(chart.labels[x])) for x in range(0, len(xs), step)]
    # Hovering over a long line tells nothing that the line does not.
    points = [] if is_hist or (chart.kind == "line" and len(xs) > 200) else marks
    return Drawing(
        chart=chart,
        series=names,
        x_ticks=x_ticks,
        y_ticks=vertical.ticks(chart.unit),
        lines=lines,
        points=points,
        columns=marks if is_hist else [],
    )


def _vertical(chart: Chart, values: Sequence[float]) -> Scale:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if chart.log:
        smallest = min((value for value in finite if value > 0), default=1.0)
        # What has no logarithm stands a power below all that has.
        low = 10.0 ** (math.floor(math.log10(smallest)) - (min(finite) <= 0))
        high = max(high, low * 10)
    else:
        # Zero is there if it is not farther away than the values are apart.
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
) -> Iterable[Mark]:
    width = (WIDTH - LEFT - RIGHT) / max(len(xs), 1) - 1 if chart.kind == "hist" else 0.0
    ground = vertical.place(0.0 if not chart.log else vertical.low)
    for i, values in enumerate(series.values()):
        for label, x, value in zip(chart.names or chart.labels, xs, values, strict=False):
            if value is None:
                continue
            y = vertical.place(value)
            text = f"{label}: {_told(names, i, amount(value, chart.unit))}"
            top, height = (min(y, ground), abs(ground - y)) if chart.kind == "hist" else (y, 0.0)
            place = horizontal.place(x) - width / 2
            yield Mark(i, round(place, 2), top, round(width, 2), round(height, 2), text)


def _path(marks: Sequence[Mark]) -> str:
    steps = [f"{'L' if i else 'M'}{mark.x:g},{mark.y:g}" for i, mark in enumerate(marks)]
    return " ".join(steps)
