"""The rows of a model's modules: figures with those of their parts, and the printed tree.

``model_rows(model, last)`` makes the rows of a result, ``tree_rows`` their table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from amanda_tools._output.folding import folded
from amanda_tools._output.units import format_short, whole_text
from amanda_tools.summary.options import SummaryOptions
from amanda_tools.summary.recorder import Figures, ForwardPass, ModelRecord, ModuleFact, unique


def model_rows(model: ModelRecord, last: ForwardPass) -> list[dict[str, Any]]:
    """Return the rows of a model's modules, in the order of its tree.

    Args:
        last: the pass whose figures are shown.
    """
    figures, separator = last.figures, model.source.separator
    rows, facts = [], model.facts()
    unseen = {fact.path for fact in facts if not fact.is_seen}

    def inside(path: str, paths: Iterable[str]) -> list[str]:
        prefix = f"{path}{separator}" if path else ""
        return [other for other in paths if other == path or other.startswith(prefix)]

    for fact in facts:
        parts = [figures[path] for path in inside(fact.path, figures)]
        row = module_row(model.name, fact, figures.get(fact.path) or Figures(), parts)
        if inside(fact.path, unseen):
            row["bound"] = "lower"
        # Without a call its operators, if any, are those of the module that runs its code.
        if not fact.is_seen or not (fact.output or any(part.calls for part in parts)):
            row.update(dict.fromkeys(("macs", "flops", "activation_bytes")))
        rows.append(row)
    return rows


def module_row(
    model: str, fact: ModuleFact, own: Figures, parts: Sequence[Figures]
) -> dict[str, Any]:
    """Return the row of a module: its own calls and outputs, and the sums of its parts."""
    parameters = unique(fact.parameters)
    declared = None if fact.output is None else list(fact.output)
    flops = sum(part.flops for part in parts)
    return {
        "model": model,
        "path": fact.path,
        "type": fact.kind,
        "depth": fact.depth,
        "output": own.outputs[0]["shape"] if own.outputs else declared,
        "outputs": own.outputs or [],
        "inputs": list(own.inputs),
        "kernel": fact.kernel,
        "parameters": sum(parameter.size for parameter in parameters),
        "trainable": sum(p.size for p in parameters if p.is_trainable),
        "parameter_bytes": sum(parameter.bytes for parameter in parameters),
        "macs": flops // 2,
        "flops": flops,
        "activation_bytes": sum(part.bytes for part in parts),
        "bound": "lower" if any(part.is_partial for part in parts) else None,
        "calls": own.calls,
    }


def tree_rows(
    rows: Sequence[dict[str, Any]], options: SummaryOptions
) -> tuple[list[str], list[tuple[Any, ...]], list[int]]:
    """Return columns and cells of the printed tree, and the level of each row.

    Args:
        rows: the rows of one model.
        options: those of the tool.
    """
    names = folded_names(rows, options)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "type": lambda row: str(row["type"]),
        **({"weights": _weights} if any("weights" in row for row in rows) else {}),
        **(_SHAPES if options.shapes else {}),
        "params": lambda row: amount(row, "parameters"),
        "FLOP": lambda row: amount(row, "flops"),
        "activations": lambda row: amount(row, "activation_bytes", "B"),
        **({"calls": _calls} if any(row["calls"] > 1 for row in rows) else {}),
    }
    cells, levels, seen = [], [], set[str]()
    for row in rows:
        name = names[row["path"]]
        if name in seen or (options.depth and row["depth"] > options.depth):
            continue
        seen.add(name)
        levels.append(row["depth"])
        label = _label(row, name) if row["depth"] else row["model"]
        cells.append(("  " * row["depth"] + label, *(cell(row) for cell in columns.values())))
    return ["module", *columns], cells, levels


def _calls(row: Mapping[str, Any]) -> str:
    return f"{row['calls']}" if row["calls"] > 1 else ""


def _weights(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shape(shape)}" for name, shape in row["weights"].items())


def _tensor(tensors: Sequence[Mapping[str, Any]], declared: Any = None) -> str:
    """Return the shape and element type of the first tensor."""
    first = next(iter(tensors), {})
    shape = _shape(first.get("shape", declared))
    return f"{whole_text(shape, first, _shape)} {first.get('dtype', '')}".rstrip()


_SHAPES: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "kernel": lambda row: " x ".join(re.findall(r"\d+", str(row["kernel"]))),
    "input": lambda row: _tensor(row["inputs"]),
    "output": lambda row: _tensor(row["outputs"], row["output"]),
}
"""The columns of the option ``shapes``."""


def folded_names(rows: Sequence[dict[str, Any]], options: SummaryOptions) -> dict[str, str]:
    """Return by path the name of each module, which modules that are alike share."""
    paths = {row["path"]: row["path"] for row in rows}
    if options.repeated:
        return paths
    return paths | folded({r["path"]: tuple(map(str, map(r.get, _FIGURES))) for r in rows})


def _label(row: Mapping[str, Any], name: str) -> str:
    """Return the last part of the name of a module, ``0-11, each`` of several that are alike."""
    own, label = (re.split("[./]", path)[-1] for path in (row["path"], name))
    return label if label == own else f"{label}, each"


def amount(row: Mapping[str, Any], figure: str, unit: str = "") -> str:
    """Format a figure of a row: ``≥ 2 kFLOP`` for a lower bound, "?" where it is not known,
    "-" where the model has not run."""
    if row[figure] is None:
        return "-" if "weights" in row else "?"
    bound = "≥ " if row["bound"] and figure != "parameters" else ""
    return bound + format_short(row[figure], unit)


_FIGURES = ("type", "weights", "output", "parameters", "macs", "activation_bytes", "calls")


def _shape(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return "-"
    return " x ".join("?" if size is None else str(size) for size in shape) or "scalar"
