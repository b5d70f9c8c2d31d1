"""Figures of operators in one step: the last one that has ended, as ``per_step`` of a summary.

Where a program has steps, tables, charts and pages show figures that add up over executions for
that step, and the sum over the run, evaluations and all, beside them. Without steps they show the
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda.results import Chart
from amanda.tools.description import place
from amanda_tools._output.ranked_charts import (
    BOTH_DIRECTIONS,
    forward_types,
    rank_groups,
    sum_by_direction,
)


def per_step_by_id(
    ids: Iterable[str], counts: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Return ``per_step`` of rows by operator id; {} before a step has ended.

    Args:
        ids: operators in the order of `counts`; operators that came after the step are at the end.
        counts: as of :meth:`~amanda.tools.reporting.ReportingTool.op_counts_of_step`.
    """
    if not counts:
        return {}
    return {
        op_id: {name: part[i] if i < len(part) else 0 for name, part in counts.items()}
        for i, op_id in enumerate(ids)
    }


def with_steps(
    rows: list[dict[str, Any]], steps: Mapping[str, Mapping[str, Any]], figure: str
) -> list[dict[str, Any]]:
    """Return rows with their ``per_step``, if steps contain their forward pass.

    In a program without modules a step begins with its backward pass, and no step contains forward
    operators: rows stay as they are.

    Args:
        rows: the rows.
        steps: ``per_step`` of all rows by operator id; {} before a step has ended.
        figure: key of a figure above 0 for operators that ran in the step.
    """
    ran = [bool(steps[row["id"]][figure]) for row in rows if steps and row["phase"] == "forward"]
    if not steps or (ran and not any(ran)):
        return rows
    return [{**row, "per_step": steps[row["id"]]} for row in rows]


def has_steps(rows: Iterable[Mapping[str, Any]]) -> bool:
    """True if rows have the figures of a step."""
    return any("per_step" in row for row in rows)


def in_step(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the figures of the last step if they have them, else those of the run."""
    return [{**row, **row.get("per_step", {})} for row in rows]


def grouped(
    rows: Iterable[Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], Any],
    figures: Sequence[str],
) -> dict[Any, dict[str, Any]]:
    """Return the number of ``ops`` and the sums of figures of rows, by `key` of a row."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(key(row), dict.fromkeys(("ops", *figures), 0))
        group["ops"] += 1
        for figure in figures:
            group[figure] += row.get(figure) or 0
    return groups


def charts_by(
    keys: Sequence[str], rows: Sequence[Mapping[str, Any]], figure: str, name: str, unit: str = ""
) -> Iterator[Chart]:
    """Yield a chart of a figure, forward and backward, by each of `keys`: ``type``, ``module``."""
    types = forward_types(rows)
    placed = [
        {**row, "type": types[row["id"]], "module": place(row["id"], row["module"])} for row in rows
    ]
    for key in keys:
        title, is_module = f"{name} by {key}", key == "module"
        step, run = (sum_by_direction(part, key, figure) for part in (in_step(placed), placed))
        whole = run if has_steps(rows) else {}
        yield from rank_groups(title, step, BOTH_DIRECTIONS, unit, whole, modules=is_module)
