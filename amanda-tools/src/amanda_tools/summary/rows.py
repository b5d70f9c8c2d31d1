"""The rows of a model's modules: figures with those of their parts, and the printed tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_tools._output.units import format_quantity
from amanda_tools.summary.graph_ops import GraphOps
from amanda_tools.summary.recorder import Figures, ModelRecord, ModuleFact, Pass, unique


def model_rows(
    model: ModelRecord, last: Pass, graph_ops: GraphOps, times: bool
) -> list[dict[str, Any]]:
    """The rows of a model's modules, in the order of its tree.

    Args:
        last: the pass whose figures are shown.
        graph_ops: has the figures of a model that ran in a graph.
        times: with the seconds of each module.
    """
    figures, separator = dict(last.figures), model.source.separator
    if not any(found.macs or found.bytes for found in figures.values()):
        root = next((path for path in figures if separator not in path), "")
        for path, (macs, size) in graph_ops.figures_of(root).items():
            place = path
            while place not in figures and separator in place:
                place = place.rpartition(separator)[0]
            found = figures.setdefault(place, Figures())
            found.macs, found.bytes = found.macs + macs, found.bytes + size
    rows = []
    for fact in model.facts():
        prefix = f"{fact.path}{separator}" if fact.path else ""
        parts = [f for path, f in figures.items() if path == fact.path or path.startswith(prefix)]
        rows.append(_row(model, fact, figures.get(fact.path) or Figures(), parts))
        if times:
            rows[-1]["seconds"] = figures.get(fact.path, Figures()).seconds
    return rows


def _row(
    model: ModelRecord, fact: ModuleFact, own: Figures, parts: Sequence[Figures]
) -> dict[str, Any]:
    parameters = unique(fact.parameters)
    declared = None if fact.output is None else list(fact.output)
    macs = sum(part.macs for part in parts)
    return {
        "model": model.name,
        "path": fact.path,
        "type": fact.kind,
        "depth": fact.depth,
        "output": own.outputs[0]["shape"] if own.outputs else declared,
        "outputs": own.outputs or [],
        "parameters": sum(parameter.size for parameter in parameters),
        "trainable": sum(p.size for p in parameters if p.is_trainable),
        "parameter_bytes": sum(parameter.bytes for parameter in parameters),
        "macs": macs,
        "flops": 2 * macs,
        "activation_bytes": sum(part.bytes for part in parts),
        "calls": own.calls,
    }


def tree_rows(
    rows: Sequence[dict[str, Any]], depth: int, times: bool
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and cells of the printed tree.

    Args:
        rows: of one model.
        depth: levels below the model that are shown; 0 for all.
    """
    columns = ("module", "type", "output", "parameters", "forward", "activations", "calls")
    cells = []
    for row in rows:
        if depth and row["depth"] > depth:
            continue
        name = row["path"].replace("/", ".").rpartition(".")[2] if row["depth"] else row["model"]
        cell = (
            "  " * row["depth"] + name,
            row["type"],
            _shape(row["output"]),
            f"{row['parameters']:,}",
            format_quantity(row["flops"], "FLOP"),
            format_quantity(row["activation_bytes"], "B"),
            row["calls"],
        )
        cells.append((*cell, f"{1000 * row['seconds']:.3f} ms") if times else cell)
    return ((*columns, "time") if times else columns), cells


def _shape(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return "-"
    return " x ".join("?" if size is None else str(size) for size in shape) or "scalar"
