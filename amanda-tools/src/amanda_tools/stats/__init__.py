"""``stats``: moments, extremes, zeros, saturation, dead units and histograms over a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.results import Chart, Table, plural
from amanda.tools.description import OUTSIDE
from amanda_tools._bases.watching import KINDS, Sample, WatchedTensor, WatchingOptions, WatchingTool
from amanda_tools._output.csv_files import write_table
from amanda_tools._output.folding import in_model
from amanda_tools._output.units import share_text
from amanda_tools.stats.tensorboard import require_tensorboard, write_tensorboard

__all__ = ["StatsOptions", "StatsTool"]


@attrs.frozen(kw_only=True)
class StatsOptions(WatchingOptions):
    """The options of ``stats``.

    Attributes:
        csv: write the series, a line per sample.
        tensorboard: write the series and the histograms for TensorBoard.
    """

    csv: bool = True
    tensorboard: bool = False

    def __attrs_post_init__(self) -> None:
        if self.tensorboard:
            require_tensorboard()


class StatsTool(WatchingTool[StatsOptions]):
    """Statistics of activations, weights and gradients over a run.

    Example: ``amanda run -t stats:every=10,csv=true -o out -- train.py``
    """

    name = "stats"
    Options = StatsOptions
    only_watches = True

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per tensor: its operator, ``kind``, ``tensor``, and the figures of
        :class:`Moments`."""
        return self.tensor_rows()

    def summary(self) -> dict[str, Any]:
        """Number of tensors and samples; tensors with NaN or infinities, dead units, saturated
        elements."""
        watched = self.watched.values()
        rows = [(w, w.moments.row()) for w in watched]
        return {
            "tensors": {kind: sum(w.kind == kind for w in watched) for kind in KINDS},
            "looks": sum(w.moments.executions for w in watched),
            "looks_not_in_series": sum(w.moments.executions for w in watched) - len(self.series),
            "not_finite": [w.key for w, row in rows if row["nan"] or row["inf"]],
            "dead_units": {w.key: row["dead_units"] for w, row in rows if row["dead_units"]},
            "saturated": {
                w.key: row["saturated"] / row["elements"] for w, row in rows if row["saturated"]
            },
            "not_looked_at": self.not_looked_at.by_kind(),
        }

    def tables(self) -> Iterable[Table]:
        """Activations, parameters with their gradients, other gradients; dead units, saturated
        elements.

        Tensors of modules come first, and those with the widest range.
        """
        for noun, pairs in self.groups():
            columns = ["tensor", "mean", "std", "min", "max", "zeros", "nan", "inf"]
            has_gradients = any(gradient for _, gradient in pairs)
            columns += ["gradient std", "gradient max"] if has_gradients else []
            pairs.sort(key=lambda pair: _rank(pair[0]), reverse=True)
            rows = [(*_shown(w), *(_of_gradient(of) if has_gradients else ())) for w, of in pairs]
            if rows:
                title = f"stats: {plural(len(rows), noun)}"
                yield Table(title, columns, rows, detail=noun == "other gradient")
        yield from self._peculiar()
        yield from self.outside_of_model()
        yield from self.not_looked_at.tables(self.name)

    def _peculiar(self) -> Iterable[Table]:
        """Yield a table of dead units, and one of saturated elements."""
        shown = [w for w in self.watched.values() if self.is_shown(w.op.phase)]
        rows = [(_name(watched), watched.moments.row()) for watched in shown]
        if dead := [(name, of["dead_units"], of["units"]) for name, of in rows if of["dead_units"]]:
            title = "stats: units that were always zero"
            yield Table(title, ("tensor", "dead", "units"), dead, limit=5)
        if full := [(n, of["saturated"], of["elements"]) for n, of in rows if of["saturated"]]:
            shares = [(name, share_text(*of)) for name, *of in full]
            yield Table("stats: saturated elements", ("tensor", "share"), shares, detail=True)

    def charts(self) -> Iterable[Chart]:
        """For each kind of tensor the standard deviations in the order of the run."""
        for kind in KINDS:
            part = self.listed(kind)
            moments = [watched.moments for watched in part]
            # A deviation of zero has no place on a logarithmic axis.
            deviations = [m.deviation if m.deviation > 0 else None for m in moments]
            if len(moments) > 1:
                yield Chart(
                    title=f"standard deviation of the {kind}",
                    kind="points",
                    labels=range(len(moments)),
                    values={kind: deviations},
                    names=[watched.label for watched in part],
                    axis="tensors in the order of the run",
                    log=True,
                )

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.csv``, a line per sample, and an event file in ``<stem>.tensorboard``."""
        written = []
        if self.options.csv:
            written.append(folder / f"{stem}.csv")
            names = [field.name for field in attrs.fields(Sample)]
            write_table(written[-1], names, map(attrs.astuple, self.series))
        if self.options.tensorboard:
            place = folder / f"{stem}.tensorboard"
            written.append(write_tensorboard(place, self.series, self.watched.values()))
        return written


def _rank(watched: WatchedTensor) -> tuple[bool, float]:
    """Sort key: tensors of modules first, then the largest magnitude.

    Operators outside of modules initialize weights, with ranges that say nothing about the model.
    """
    moments = watched.moments
    largest = max(abs(moments.minimum), abs(moments.maximum)) if moments.elements else 0.0
    return watched.op.place != OUTSIDE, largest


def _of_gradient(watched: WatchedTensor | None) -> tuple[str, ...]:
    """Return the deviation of a gradient, and its largest magnitude."""
    if watched is None:
        return "-", "-"
    row = watched.moments.row()
    figures = row["std"], max(abs(row["min"] or 0), abs(row["max"] or 0))
    return tuple("-" if row["std"] is None else f"{figure:.3g}" for figure in figures)


def _name(watched: WatchedTensor) -> str:
    return in_model(watched.label, watched.op.module)


def _shown(watched: WatchedTensor) -> tuple[Any, ...]:
    row = watched.moments.row()
    figures = tuple(
        "-" if row[name] is None else f"{row[name]:.3g}" for name in ("mean", "std", "min", "max")
    )
    return (_name(watched), *figures, f"{100 * row['sparsity']:.1f} %", row["nan"], row["inf"])
