"""The head of a page: what ran, the main figures, and what was not seen."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from amanda.results import RunReport, ToolReport
from amanda_tools._output.report.model_tree import ModelView
from amanda_tools._output.units import format_short

_WELL = "normally"
"""What a run says of a program that has ended without an error."""

_LEAST_SHARE = 0.01
"""Percentages below it are told as such."""

_LEAD = ("command", "rank", "program ended", "not seen")
"""Facts about a run that stand at its head, if they have something to tell."""


def describe_run(report: RunReport, model: ModelView | None) -> dict[str, str]:
    """Return what ran, by name; {} for a page that is not about a run."""
    facts = {name: str(report.facts[name]) for name in _LEAD if report.facts.get(name)}
    if facts.get("program ended") == _WELL:
        del facts["program ended"]
    if model is None:
        return facts
    found = {
        "steps": f"{model.steps:,}" if model.steps else "",
        "input": model.inputs,
        "device": model.device,
        "framework": str(report.facts.get("namespaces", "")),
    }
    command = facts.pop("command", "")
    return {"command": command, **{name: text for name, text in found.items() if text}, **facts}


def main_figures(tools: Sequence[ToolReport], model: ModelView | None) -> dict[str, str]:
    """Return the main figures of all tools, by name."""
    found: dict[str, str] = {}
    if model is not None:
        for figure in model.figures:
            if figure.over or figure.key == "not_finite":
                continue
            parts = [model.total(figure.key, way) for way in ("forward", "backward")]
            found.update(_figure(figure.name, figure.unit, parts, figure.per_step, model.steps))
    for tool in tools:
        summary = tool.result.get("summary") if isinstance(tool.result, Mapping) else None
        if isinstance(summary, Mapping):
            found.update(_special(tool, summary, model))
    return found


def _figure(
    name: str, unit: str, parts: Sequence[float | None], per_step: bool, steps: int
) -> dict[str, str]:
    there = [part for part in parts if part is not None]
    if not there:
        return {}
    over = steps if per_step and steps else 1
    if per_step:
        name = f"{name} per step" if steps else f"{name}, whole run"
    text = format_short(sum(there) / over, unit)
    if len(there) == len(parts) and all(there):
        ways = zip(there, ("forward", "backward"), strict=True)
        text += f" ({', '.join(f'{format_short(n / over, unit)} {way}' for n, way in ways)})"
    return {name: text}


def _special(
    tool: ToolReport, summary: Mapping[str, Any], model: ModelView | None
) -> dict[str, str]:
    kind = tool.result.get("tool") if isinstance(tool.result, Mapping) else ""
    if kind == "nan" and "first" in summary:
        first = summary["first"]
        if isinstance(first, Mapping):
            return {"NaN or infinity": f"first from {first.get('type')} ({first.get('id')})"}
        return {"NaN or infinity": "none"}
    # The shares of the tool's summary are of all phases.
    zeros = None if model is None else model.total("zeros", "forward")
    elements = None if model is None else model.total("elements", "forward")
    if kind == "sparsity" and zeros is not None and elements:
        share = 100 * zeros / elements
        is_tiny = 0 < share < _LEAST_SHARE
        text = f"below {_LEAST_SHARE} %" if is_tiny else format_short(share, "%")
        return {"zeros of the activations": text}
    if kind == "flops" and isinstance(summary.get("params"), numbers.Real):
        # Operators that read the same parameter count it once for each of them.
        return {"parameters": format_short(float(summary["params"]), "")}
    return {}
