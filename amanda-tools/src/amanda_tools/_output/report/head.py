"""The head of a page: what ran, the main figures, and what was not seen."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

from amanda.results import RunReport, ToolReport
from amanda_tools._output.report.columns import amount_of
from amanda_tools._output.report.model_ops import Figure, mapping_of, summary_of
from amanda_tools._output.report.model_tree import ModelView, model_of
from amanda_tools._output.units import format_short

_WELL = "normally"
"""The note of a run whose program ended without an error."""

_LEAD = {
    "command": "command", "rank": "rank", "program ended": "ended", "not seen": "not seen",
}  # fmt: skip
"""Facts about a run that the head of a page shows unless they are empty, and their names."""

_NOTHING_SAVED = "saved_bytes"
"""A figure that is left out if it is 0: an evaluation saves nothing for a backward pass."""


def describe_run(report: RunReport, model: ModelView | None) -> dict[str, str]:
    """Return what ran, by name; {} for a page that is not about a run."""
    facts = {_LEAD[name]: str(report.facts[name]) for name in _LEAD if report.facts.get(name)}
    if facts.get("ended") == _WELL:
        del facts["ended"]
    if model is None:
        return facts
    found = {
        "steps": f"{model.steps:,}" if model.steps else "",
        "input": model.inputs,
        "largest batch": _batch_of(report.tools),
        "device": model.device,
        "framework": str(report.facts.get("namespaces", "")),
    }
    command = facts.pop("command", "")
    return {"command": command, **{name: text for name, text in found.items() if text}, **facts}


def _batch_of(tools: Sequence[ToolReport]) -> str:
    """Return the samples that the model was given at a time; "" where no tool knows them."""
    for tool in tools:
        batch = summary_of(tool).get("batch")
        if isinstance(batch, numbers.Integral) and not isinstance(batch, bool):
            return f"{int(batch):,}"
    return ""


def program_of(report: RunReport) -> str:
    """Return the name of the program of a run; "" if it is not among the facts."""
    words = str(report.facts.get("command", "")).partition(" -- ")[2].split()
    names = [word for word in words if word.endswith(".py")] or words
    return names[0].rpartition("/")[2] if names else ""


def main_figures(tools: Sequence[ToolReport], model: ModelView | None) -> dict[str, str]:
    """Return the main figures of all tools, by name."""
    found: dict[str, str] = {}
    bounds = {"flops": "bound", "saved_bytes": "saved_unknown"}
    is_unseen = any(summary_of(tool).get("not_seen") for tool in tools)
    if model is not None:
        for figure in model.figures:
            if figure.over or figure.key == "not_finite":
                continue
            parts = [model.total(figure.key, direction) for direction in ("forward", "backward")]
            bound = bounds.get(figure.key, "")
            least = is_unseen or any(_is_told(tool, bound) for tool in tools)
            spread = _range(tools, figure.key)
            found.update(_figure(figure, parts, model.steps, spread, "≥ " if least else ""))
    for tool in tools:
        found.update(_special(tool, model))
    return found


def _is_told(tool: ToolReport, key: str) -> bool:
    """True if the summary of a tool, or of one of its models, has something by a key."""
    summary = summary_of(tool)
    of_models = map(mapping_of, mapping_of(summary.get("models")).values())
    return any(found.get(key) for found in (summary, *of_models))


def _figure(
    figure: Figure, parts: Sequence[float | None], steps: int, spread: Sequence[float], bound: str
) -> dict[str, str]:
    there = [part for part in parts if part is not None]
    if not there or (figure.key == _NOTHING_SAVED and not any(there)):
        return {}
    name = _NAMES.get(figure.key, figure.name)
    if figure.per_step:
        name = f"{name} per step" if steps else f"{name}, whole run"
    text = bound + format_short(sum(there), figure.unit)
    notes = []
    if len(there) == len(parts) and all(there):
        directions = zip(there, ("forward", "backward"), strict=True)
        notes += [f"{format_short(n, figure.unit)} {direction}" for n, direction in directions]
    if steps and len(spread) > 1:
        low, high = (format_short(end, figure.unit) for end in spread)
        notes.append(f"steps from {low} to {high}")
    return {name: f"{text} ({', '.join(notes)})" if notes else text}


_NAMES = {"seconds": "time in operators"}
"""Names of figures where they stand alone."""

_RUNNING = {"flops": ("flops", "flops_backward")}
"""Keys of operators' figures, and the keys of a step whose sum corresponds to them."""


def _range(tools: Sequence[ToolReport], key: str) -> Sequence[float]:
    """Return the least and the most of a figure in a step where steps differ, else ()."""
    for tool in tools:
        step = mapping_of(summary_of(tool).get("per_step"))
        ends = [step.get(end) for end in ("min", "max")]
        if set(_RUNNING.get(key, ("",))) <= set(step) and None not in ends:
            return [
                sum(float(mapping_of(end).get(name, step[name])) for name in _RUNNING[key])
                for end in ends
            ]
    return ()


def _special(tool: ToolReport, model: ModelView | None) -> dict[str, str]:
    kind, summary = mapping_of(tool.result).get("tool"), summary_of(tool)
    if kind == "nan" and "first" in summary:
        first = summary["first"]
        if isinstance(first, Mapping):
            found = f"first from {first.get('type')} ({first.get('id')})"
            fate = first.get("fate")
            return {"NaN or infinity": f"{fate}, {found}" if fate else found}
        return {"NaN or infinity": f"none in {summary.get('watched', '?')} operators watched"}
    # The shares of the tool's summary are of all phases.
    zeros = None if model is None else model.total("zeros", "forward")
    elements = None if model is None else model.total("elements", "forward")
    if kind == "sparsity" and zeros is not None and elements:
        return {"zeros of the activations": format_short(100 * zeros / elements, "%")}
    if kind == "flops" and isinstance(summary.get("params"), numbers.Real):
        # Operators that read the same parameter count it once for each of them.
        return {"parameters": format_short(float(summary["params"]), "")}
    return {}


def compare_figures(*runs: Sequence[ToolReport]) -> dict[str, str]:
    """Return the main figures of two runs side by side, with the ratio where both are known."""
    found: dict[str, str] = {}
    ours, theirs = (main_figures(tools, model_of(tools)) for tools in runs)
    for name in {**ours, **theirs}:
        texts = [side.get(name, "-").partition(" (")[0] for side in (ours, theirs)]
        one, other = map(amount_of, texts)
        ratio = ""
        if one and other is not None:
            # The texts have three digits.
            ratio = f" (B is about {format_short(float(f'{other / one:.2g}'), '')} times A)"
        is_equal = texts[0] == texts[1]
        found[name] = f"{texts[0]} (A and B)" if is_equal else " → ".join(texts) + ratio
    return found
