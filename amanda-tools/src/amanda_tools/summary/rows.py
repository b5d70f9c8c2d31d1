"""The rows of a model's modules: figures with those of their parts, and the printed tree.

``model_rows(model, last, times=False)`` makes the rows of a result, ``tree_rows`` their table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda_tools._output.units import format_quantity, whole_text
from amanda_tools.summary.recorder import Figures, ForwardPass, ModelRecord, ModuleFact, unique


def model_rows(model: ModelRecord, last: ForwardPass, times: bool) -> list[dict[str, Any]]:
    """Return the rows of a model's modules, in the order of its tree.

    Args:
        last: the pass whose figures are shown.
        times: True to add the seconds of each module.
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
        if times:
            rows[-1]["seconds"] = figures.get(fact.path, Figures()).seconds
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
    rows: Sequence[dict[str, Any]], depth: int, times: bool, repeated: bool
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return columns and cells of the printed tree.

    Args:
        rows: the rows of one model.
        depth: number of levels below the model; 0 for all.
        times: True to add the seconds of each module; no modules are alike then.
        repeated: True to give each of several modules that are alike a line.
    """
    columns = ("module", "type", "output", "parameters", "forward", "activations", "calls")
    cells = []
    listed = [row for row in rows if not depth or row["depth"] <= depth]
    for row, last in [(row, None) for row in listed] if repeated or times else _folded(listed):
        name = _name(row) if row["depth"] else row["model"]
        if last is not None:
            name += f" to {_name(last)}, each"
        cell = (
            "  " * row["depth"] + name,
            row["type"],
            whole_text(_shape(row["output"]), next(iter(row["outputs"]), {}), _shape),
            f"{row['parameters']:,}",
            amount(row, "flops", "FLOP"),
            amount(row, "activation_bytes", "B"),
            row["calls"],
        )
        seconds = row.get("seconds")
        shown = "-" if seconds is None else f"{1000 * seconds:.3f} ms"
        cells.append((*cell, shown) if times else cell)
    return ((*columns, "time") if times else columns), cells


def amount(row: Mapping[str, Any], figure: str, unit: str) -> str:
    """Format a figure of a row: ``≥ 2 kFLOP`` for a lower bound, "?" where it is not known."""
    if row[figure] is None:
        return "?"
    return ("≥ " if row["bound"] else "") + format_quantity(row[figure], unit)


_NUMBERED = re.compile(r"(.*?)(\d+)")

_FIGURES = ("type", "output", "parameters", "macs", "activation_bytes", "calls")


def _folded(
    rows: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield one row for each group of consecutive modules that are alike.

    Modules are alike if their numbers are consecutive, and their parts and figures equal.

    Args:
        rows: one tree or several, each module before its parts.

    Yields:
        The row of the first module of a group, and the row of its last module; None for a group of
        one.
    """
    position = 0
    while position < len(rows):
        row, end = rows[position], _end(rows, position)
        parts, last, after = rows[position:end], None, end
        while after < len(rows) and _follows(last or row, rows[after]):
            next_end = _end(rows, after)
            if _likeness(rows[after:next_end]) != _likeness(parts):
                break
            last, after = rows[after], next_end
        yield row, last
        yield from _folded(parts[1:])
        position = after


def _end(rows: Sequence[dict[str, Any]], position: int) -> int:
    """Return the index of the row after the parts of a module."""
    depth, end = rows[position]["depth"], position + 1
    while end < len(rows) and rows[end]["depth"] > depth:
        end += 1
    return end


def _follows(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if the names of two modules have consecutive numbers."""
    if row["depth"] != other["depth"]:
        return False
    first, second = _NUMBERED.fullmatch(_name(row)), _NUMBERED.fullmatch(_name(other))
    if first is None or second is None or first[1] != second[1]:
        return False
    return int(second[2]) == int(first[2]) + 1


def _likeness(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return a key that is equal for modules that are alike: figures of a module and its parts."""
    names = ["", *map(_name, rows[1:])]
    return [
        (name, row["depth"], *(row[figure] for figure in _FIGURES))
        for name, row in zip(names, rows, strict=True)
    ]


def _name(row: dict[str, Any]) -> str:
    name: str = row["path"].replace("/", ".").rpartition(".")[2]
    return name


def _shape(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return "-"
    return " x ".join("?" if size is None else str(size) for size in shape) or "scalar"
