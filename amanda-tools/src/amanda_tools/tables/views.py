"""The views that ``amanda query`` has ready, as macros of SQL of a table and a figure."""

from __future__ import annotations

_SPREAD = """quantile_cont(value, 0.5) AS p50, quantile_cont(value, 0.99) AS p99, mad(value) AS mad,
    max(value) AS most, arg_max(rank, value) AS worst_rank, count(value) AS ranks"""

_FROM = "FROM query_table(of_table) WHERE figure = of_figure"

# Of samples, which have a minimum, the count is theirs. Of an amount it is that of the steps, which
# all operators of a window share, but those that are first known in it, as the times of a graph are
# at its end: theirs are of all steps so far. Without steps: null.
_WINDOWS = f"""
    SELECT rank, attempt, step, sum("sum") AS whole, sum("sum") FILTER ("count" > 0) AS amount,
        CASE WHEN count("min") > 0 THEN sum("count") ELSE min("count") END AS number,
        CASE WHEN count("min") > 0 THEN amount / number ELSE sum("sum" / "count") END AS mean
    {_FROM} GROUP BY rank, attempt, step"""

_OF_RANK = f"""
    SELECT rank, coalesce(sum(amount) / sum(number), sum(whole)) AS value,
        count(DISTINCT attempt) AS attempts
    FROM ({_WINDOWS}) GROUP BY rank"""

_RANKS = "LEFT JOIN (SELECT rank, host, mesh FROM ranks WHERE tool = of_table) USING (rank)"

VIEWS = {
    "by_op": (
        "each operator over the ranks: median, p99, MAD, the worst rank",
        f"""
SELECT op_id, {_SPREAD}
FROM (
    SELECT op_id, rank,
        coalesce(sum("sum") FILTER ("count" > 0) / sum("count"), sum("sum")) AS value
    {_FROM} GROUP BY op_id, rank
) GROUP BY op_id ORDER BY p50 DESC""",
    ),
    "by_rank": (
        "each rank: all operators, the host, the place in meshes",
        f"SELECT * FROM ({_OF_RANK}) {_RANKS} ORDER BY value DESC",
    ),
    "by_stage": (
        "each pipeline stage over its ranks: median, p99, MAD, the worst rank",
        f"SELECT mesh['pp'] AS stage, {_SPREAD} FROM ({_OF_RANK}) {_RANKS} GROUP BY 1 ORDER BY 1",
    ),
    "by_step": (
        "each window of steps over the ranks: median, p99, MAD, the worst rank",
        f"""
SELECT attempt, step, {_SPREAD}
FROM (SELECT *, coalesce(mean, whole) AS value FROM ({_WINDOWS}))
GROUP BY attempt, step ORDER BY attempt, step""",
    ),
}
"""By the name of a view what it says, and its query of a table and a figure.

The value of a rank is the amount of a step, the mean of samples, or the amount of the run where no
step has ended.
"""
