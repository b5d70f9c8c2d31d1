"""Charts that several tools make alike: bars of types and modules, the largest first.

::

    groups = {"conv2d": {"forward": 3, "backward": 6}, "linear": {"forward": 1, "backward": 2}}
    yield from rank_groups("executions by type", groups, BOTH_DIRECTIONS)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda.results import Chart

FEWEST_PARTS = 2
"""A chart of fewer parts of bars compares nothing."""

BOTH_DIRECTIONS = {"forward": "forward", "backward": "backward"}
"""The series of groups from :func:`sum_by_direction`."""


Groups = Mapping[str, Mapping[str, Any]]
"""Label of each bar to its figures by key."""


def rank_groups(
    title: str,
    groups: Groups,
    series: Mapping[str, str],
    unit: str = "",
    run: Groups | None = None,
    *,
    modules: bool = False,
) -> Iterator[Chart]:
    """Yield a chart of stacked bars, the longest first; none if there is nothing to compare.

    Args:
        groups: label of each bar to its figures by key.
        series: name of each series to the key of its figure.
        run: groups with the sums over the whole run, where `groups` are of one step.
        modules: True if labels are paths of modules, which the page sums up at one depth.
    """

    def total(groups: Groups, name: str) -> float:
        of = groups.get(name, {})
        return sum(float(of.get(key) or 0) for key in series.values())

    def order(name: str) -> tuple[float, float]:
        return -total(groups, name), -total(run or {}, name)

    labels = sorted((name for name in groups if any(order(name))), key=order)
    if run and not any(total(groups, name) for name in labels):
        # Nothing of it ran in the step, as in a program that evaluates after it.
        groups, run = run, {}
    shown = [{**(run or {}).get(label, {}), **groups[label]} for label in labels]
    if sum(bool(of.get(key)) for of in shown for key in series.values()) >= FEWEST_PARTS:
        yield Chart(
            title=title,
            kind="bar",
            labels=labels,
            values=_values(groups, labels, series),
            unit=unit,
            modules=modules,
            run=_values(run, labels, series) if run else {},
        )


rank_modules = functools.partial(rank_groups, modules=True)
"""The chart of :func:`rank_groups` by path of a module."""


def _values(
    groups: Groups, labels: Sequence[str], series: Mapping[str, str]
) -> dict[str, list[float | None]]:
    return {
        name: [float(groups.get(label, {}).get(key) or 0) for label in labels]
        for name, key in series.items()
    }


def lines_over_steps(
    title: str, steps: Mapping[int, Mapping[str, float]], series: Mapping[str, str], unit: str = ""
) -> Iterator[Chart]:
    """Yield a chart of figures of single steps over the run; none of fewer than two steps.

    Args:
        title: title of the chart.
        steps: number of each step to its figures by key.
        series: name of each line to the key of its figure.
        unit: unit of the figures.
    """
    values = {
        name: [figures.get(key) for figures in steps.values()] for name, key in series.items()
    }
    values = {name: line for name, line in values.items() if any(line)}
    if len(steps) > 1 and values:
        yield Chart(
            title=title, kind="line", labels=list(steps), values=values, unit=unit, axis="step"
        )


def forward_types(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the types of operators by id; for backward ones that of the forward operator.

    PyTorch's ``ConvolutionBackward0`` and ``AccumulateGrad`` of a convolution get ``conv2d``, so
    that a chart has one bar for all of them.
    """
    types = {str(row["id"]): str(row["type"]) for row in rows}
    return {str(row["id"]): types.get(row.get("forward") or row["id"], row["type"]) for row in rows}


def sum_by_direction(
    rows: Iterable[Mapping[str, Any]], key: str, figure: str
) -> dict[str, dict[str, float]]:
    """Sum up a figure of rows, by the value of `key` and by ``forward`` and ``backward``."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        group = groups.setdefault(str(row[key]), {"forward": 0.0, "backward": 0.0})
        group[str(row["direction"])] += float(row.get(figure) or 0)
    return groups
