"""The views that ``amanda query`` has ready, as macros of SQL of a table and a figure."""

from __future__ import annotations

_MEAN = """coalesce(sum("sum") FILTER ("count" > 0) / sum("count"), sum("sum")) AS value,
    bool_or("min" IS NOT NULL) AS is_sampled"""
"""The mean of samples, the amount of a step, or the amount of the run where no step has ended."""

_OF_OPS = "CASE WHEN bool_or(is_sampled) THEN avg(value) ELSE sum(value) END AS value"
"""Of several operators the sum of amounts, or the mean of what does not add up."""

_SPREAD = """quantile_cont(value, 0.5) AS p50, quantile_cont(value, 0.99) AS p99, mad(value) AS mad,
    max(value) AS most, arg_max(rank, value) AS worst_rank, count(value) AS ranks"""

_FROM = "FROM query_table(of_table) WHERE figure = of_figure"

VIEWS = {
    "by_op": (
        "each operator over the ranks: median, p99, MAD, the worst rank",
        f"""
SELECT op_id, any_value(type) AS type, any_value(module) AS module, {_SPREAD}
FROM (
    SELECT op_id, rank, any_value(type) AS type, any_value(module) AS module, {_MEAN}
    {_FROM} GROUP BY op_id, rank
) GROUP BY op_id ORDER BY p50 DESC""",
    ),
    "by_rank": (
        "each rank: all operators, the worst one, the host, the place in meshes",
        f"""
SELECT o.*, r.host, r.mesh
FROM (
    SELECT rank, {_OF_OPS}, max(value) AS most, arg_max(op_id, value) AS worst_op, count(*) AS ops
    FROM (SELECT op_id, rank, {_MEAN} {_FROM} GROUP BY op_id, rank)
    GROUP BY rank
) AS o LEFT JOIN (SELECT * FROM ranks WHERE tool = of_table) AS r USING (rank)
ORDER BY value DESC""",
    ),
    "by_stage": (
        "each pipeline stage over its ranks: median, p99, MAD, the worst rank",
        f"""
SELECT r.mesh['pp'] AS stage, {_SPREAD}
FROM (
    SELECT rank, {_OF_OPS}
    FROM (SELECT op_id, rank, {_MEAN} {_FROM} GROUP BY op_id, rank)
    GROUP BY rank
) LEFT JOIN (SELECT rank, mesh FROM ranks WHERE tool = of_table) AS r USING (rank)
GROUP BY stage ORDER BY stage""",
    ),
    "by_step": (
        "each window of steps over the ranks: median, p99, MAD, the worst rank",
        f"""
SELECT step, {_SPREAD}
FROM (
    SELECT step, rank, {_OF_OPS}
    FROM (SELECT step, rank, op_id, {_MEAN} {_FROM} GROUP BY step, rank, op_id)
    GROUP BY step, rank
) GROUP BY step ORDER BY step""",
    ),
}
"""By the name of a view what it says, and its query of a table and a figure."""
