"""The model's operators in tables: those of other phases stand in one line for each phase.

::

    rows = shown(self.op_rows(), self.options)           # with phases=model those of the model
    yield from other_phases(self.name, self.op_rows(), self.options, ("executions",))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from amanda.results import Table
from amanda.tools.reporting import figures_by_phase
from amanda_tools._bases.per_step import has_steps, in_step
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._output.units import format_short

_SECONDS = {"seconds": 1.0, "host_us": 1e-6, "device_us": 1e-6}
"""Figures that are times, and their units in seconds."""

__all__ = ["MODEL", "PhaseOptions", "other_phases", "shown"]


@attrs.frozen(kw_only=True)
class PhaseOptions:
    """The options of tools whose tables list operators.

    Attributes:
        phases: model for the operators of forward and backward passes, with one line for each
            other phase; all for every operator.
    """

    phases: Literal["model", "all"] = "model"


def shown(rows: Iterable[Mapping[str, Any]], options: PhaseOptions) -> list[dict[str, Any]]:
    """Return the rows that tables list."""
    return [dict(row) for row in rows if options.phases == "all" or row["phase"] in MODEL]


def other_phases(
    tool: str, rows: Iterable[Mapping[str, Any]], options: PhaseOptions, figures: Sequence[str] = ()
) -> Iterable[Table]:
    """Yield a table with one line for each phase whose operators other tables leave out.

    Args:
        tool: the name of the tool.
        figures: keys of rows to be summed, the one that a reader looks for last.
    """
    if options.phases == "all":
        return
    rows = list(rows)
    runs = figures_by_phase(rows, figures)
    found = figures_by_phase(in_step(rows), figures)
    # Beside the figures of a step, the last of them for the run.
    whole = figures[-1:] if has_steps(rows) else ()
    lines = [
        (
            phase,
            of["ops"],
            *(_rounded(name, of[name]) for name in figures),
            *(_rounded(name, runs[phase][name]) for name in whole),
        )
        for phase, of in found.items()
        if phase not in MODEL and of["ops"]
    ]
    if lines:
        title = f"{tool}: outside of the model (phases=all lists them)"
        names = ["time" if name in _SECONDS else name for name in figures]
        columns = ("phase", "ops", *names, *("run" for _ in whole))
        yield Table(title, columns, lines, detail=True)


def _rounded(name: str, figure: float) -> str | int:
    if name in _SECONDS:
        return format_short(figure * _SECONDS[name], "s")
    return f"{figure:.3g}" if isinstance(figure, float) else figure
