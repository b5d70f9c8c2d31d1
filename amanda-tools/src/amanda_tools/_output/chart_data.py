"""Charts that several tools make alike: bars of types and modules, the largest first.

::

    groups = {"conv2d": {"forward": 3, "backward": 6}, "linear": {"forward": 1, "backward": 2}}
    yield from rank_groups("executions by type", groups, BOTH_DIRECTIONS)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda.results import Chart
from amanda_tools._operators.module_paths import depth_of, prefix_of

FEWEST_BARS = 2
"""A chart of fewer bars says no more than its table."""

MOST_MODULES = 24
"""Bars of a chart by module."""

BOTH_DIRECTIONS = {"forward": "forward", "backward": "backward"}
"""The series of groups from :func:`sum_by_direction`."""


def rank_groups(
    title: str, groups: Mapping[str, Mapping[str, Any]], series: Mapping[str, str], unit: str = ""
) -> Iterator[Chart]:
    """Yield a chart of stacked bars, the longest first; none if there is nothing to compare.

    Args:
        title: title of the chart.
        groups: label of each bar to its figures by key.
        series: name of each series to the key of its figure.
        unit: unit of the figures.
    """

    def total(name: str) -> float:
        return sum(float(groups[name].get(key) or 0) for key in series.values())

    labels = sorted((name for name in groups if total(name) > 0), key=total, reverse=True)
    if len(labels) >= FEWEST_BARS:
        values = {
            name: [float(groups[label].get(key) or 0) for label in labels]
            for name, key in series.items()
        }
        yield Chart(title=title, kind="bar", labels=labels, values=values, unit=unit)


def rank_modules(
    title: str, modules: Mapping[str, Mapping[str, Any]], series: Mapping[str, str], unit: str = ""
) -> Iterator[Chart]:
    """:func:`rank_groups` by module path; many modules are summed up by their parents."""
    yield from rank_groups(title, sum_to_parents(modules, list(series.values())), series, unit)


def sum_to_parents(
    modules: Mapping[str, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Sum up figures of modules by prefixes of their paths, as many as fit into a chart.

    The largest group is split into those of the next depth as long as there is room.
    """
    totals = {name: sum(float(of.get(key) or 0) for key in keys) for name, of in modules.items()}
    groups = _by_prefix([name for name, total in totals.items() if total > 0], 1)
    waiting = set(groups)
    # Greedy: splitting the largest group first shows where most of the figure is.
    while waiting:
        largest = max(
            sorted(waiting), key=lambda group: sum(map(totals.__getitem__, groups[group]))
        )
        waiting.remove(largest)
        parts = _by_prefix(groups[largest], depth_of(largest) + 1)
        if len(groups) - 1 + len(parts) <= MOST_MODULES and list(parts) != [largest]:
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


def sum_by_direction(
    rows: Iterable[Mapping[str, Any]], key: str, figure: str
) -> dict[str, dict[str, float]]:
    """Sum up a figure of rows, by the value of `key` and by ``forward`` and ``backward``."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        group = groups.setdefault(str(row[key]), {"forward": 0.0, "backward": 0.0})
        group[str(row["direction"])] += float(row.get(figure) or 0)
    return groups
