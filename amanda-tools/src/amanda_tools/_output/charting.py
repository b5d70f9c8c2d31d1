"""Charts that several tools have alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda.results import Chart
from amanda_tools._operators.module_paths import depth_of, prefix_of

FEWEST = 2
"""Bars of the smallest chart that says more than its table."""

MOST = 24
"""Modules of a chart."""


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


def ranked_modules(
    title: str, modules: Mapping[str, Mapping[str, Any]], series: Mapping[str, str], unit: str = ""
) -> Iterator[Chart]:
    """The same of modules by their paths; where there are many, the largest are taken apart."""
    yield from ranked(title, taken_apart(modules, list(series.values())), series, unit)


def taken_apart(
    modules: Mapping[str, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The sums of modules' figures to depths at which a chart can show them all.

    The largest one is taken apart into those of the next depth as long as there is room.
    """
    totals = {name: sum(float(of.get(key) or 0) for key in keys) for name, of in modules.items()}
    groups = _by_prefix([name for name, total in totals.items() if total > 0], 1)
    waiting = set(groups)
    while waiting:
        largest = max(
            sorted(waiting), key=lambda group: sum(map(totals.__getitem__, groups[group]))
        )
        waiting.remove(largest)
        parts = _by_prefix(groups[largest], depth_of(largest) + 1)
        if len(groups) - 1 + len(parts) <= MOST and list(parts) != [largest]:
            del groups[largest]
            groups.update(parts)
            waiting.update(parts)
    return {
        group: {key: sum(float(modules[name].get(key) or 0) for name in names) for key in keys}
        for group, names in groups.items()
    }


def _by_prefix(names: Iterable[str], depth: int) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(prefix_of(name, depth), []).append(name)
    return groups


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
