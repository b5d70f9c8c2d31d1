"""Time of each type of operator by kernel, as stacked bars (paper, Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_TYPES, _KERNELS = 12, 9
_OTHERS = "others"


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the types that take most of the time, each made of its kernels, as SVG.

    Kernels on devices where there are any, else the activities of the CPU.

    Args:
        summary: as :meth:`KernelsTool.summary` gives it.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    place = "device" if summary["launches"] else "host"
    types = _largest(summary, place)
    names = [*_kernels(types, place), _OTHERS]
    # Not pyplot, which the program may use: it has a state.
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(types) + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10"]
    left = dict.fromkeys(types, 0.0)
    for number, name in enumerate(names):
        widths = [_part(types[kind], name, names, place) / 1000 for kind in types]
        if not any(widths):
            continue
        axes.barh(
            list(types), widths, 0.7, list(left.values()), label=_cut(name), color=colours(number)
        )
        left = {kind: left[kind] + width for kind, width in zip(types, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds on the {place}")
    axes.spines[["top", "right"]].set_visible(False)
    if types:
        figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    # The same picture for the same figures; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "amanda", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _largest(summary: Mapping[str, Any], place: str) -> dict[str, Mapping[str, Any]]:
    groups = summary["by_type"]
    order = sorted(groups, key=lambda kind: -groups[kind][f"{place}_us"])
    return {kind: groups[kind] for kind in order[:_TYPES] if groups[kind][f"{place}_us"]}


def _is_at(name: str, place: str) -> bool:
    return name.endswith("(cpu)") is (place == "host")


def _kernels(types: Mapping[str, Mapping[str, Any]], place: str) -> list[str]:
    """The kernels that get a colour of their own."""
    times: dict[str, float] = {}
    for group in types.values():
        for name, duration in group["kernels"].items():
            if _is_at(name, place):
                times[name] = times.get(name, 0.0) + duration
    return sorted(times, key=lambda name: -times[name])[:_KERNELS]


def _part(group: Mapping[str, Any], name: str, names: list[str], place: str) -> float:
    kernels = {k: t for k, t in group["kernels"].items() if _is_at(k, place)}
    if name == _OTHERS:
        return float(sum(t for k, t in kernels.items() if k not in names))
    return float(kernels.get(name, 0.0))


def _cut(name: str) -> str:
    # Names of templates are long; a leading underscore would hide it from the legend.
    text = name if len(name) <= 90 else f"{name[:60]}…{name[-29:]}"
    return text.lstrip("_")
