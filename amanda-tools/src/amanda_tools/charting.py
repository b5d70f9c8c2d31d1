"""Charts that several tools have alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from amanda.tools.reporting import Chart
from amanda_tools.module_paths import depth_of, prefix_of

FEWEST = 2
"""Bars of the smallest chart that says more than its table."""

MOST = 24
"""Modules of a chart; where there are more, those of a smaller depth are shown."""


def ranked(
    title: str, groups: Mapping[str, Mapping[str, Any]], series: Mapping[str, str], unit: str = ""
) -> Iterator[Chart]:
    """Bars of the groups, the longest first; no chart where there is nothing to compare.

    Args:
        title: of the chart.
        groups: name of each bar to its figures.
        series: name of each series to the key of its figure; they are stacked.
        unit: of the figures.
    """

    def total(name: str) -> float:
        return sum(float(groups[name].get(key) or 0) for key in series.values())

    labels = sorted((name for name in groups if total(name) > 0), key=total, reverse=True)
    if len(labels) >= FEWEST:
        values = {
            name: [float(groups[label].get(key) or 0) for label in labels]
            for name, key in series.items()
        }
        yield Chart(title=title, kind="bar", labels=labels, values=values, unit=unit)


def coarse(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The sums of modules' numbers to the greatest depth at which a chart can show them all."""
    deepest = max(map(depth_of, groups), default=1)
    for depth in range(deepest, 0, -1):
        found: dict[str, dict[str, float]] = {}
        for name, figures in groups.items():
            group = found.setdefault(prefix_of(name, depth), {})
            for key, value in figures.items():
                group[key] = group.get(key, 0) + (value or 0)
        if len(found) <= MOST:
            break
    return found


def by_direction(
    rows: Iterable[Mapping[str, Any]], key: str, figure: str
) -> dict[str, dict[str, float]]:
    """The sums of a figure by `key`, ``forward`` and ``backward``."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        group = groups.setdefault(str(row[key]), {"forward": 0.0, "backward": 0.0})
        group[str(row["direction"])] += float(row.get(figure) or 0)
    return groups


BOTH = {"forward": "forward", "backward": "backward"}
"""The series of :func:`by_direction`."""
