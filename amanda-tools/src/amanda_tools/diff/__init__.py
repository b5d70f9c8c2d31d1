"""``diff``: compares two runs operator by operator and names the first divergence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda.results import Chart, Table
from amanda.tools.reporting import applies_if
from amanda_tools._bases.phases import other_phases, shown
from amanda_tools._values.recordings import Recording
from amanda_tools.diff.alignment import align_ops
from amanda_tools.diff.comparison import Pair, compare, to_row
from amanda_tools.dump import DumpOptions, DumpTool

__all__ = ["DiffOptions", "DiffTool", "Recording"]

_OF_COMPARISON = applies_if("a comparison: reference=", lambda o: bool(o.reference))


@attrs.frozen(kw_only=True)
class DiffOptions(DumpOptions):
    """The options of ``diff``. Without a reference the run is recorded, to be the reference of a
    later one.

    Attributes:
        reference: the folder that an earlier run has written; a recording or a tool from Python.
        tolerance: largest relative error of a tensor that counts as equal.
        align: how operators are paired: by id, value or auto.
    """

    reference: Any = ""
    tolerance: float = attrs.field(
        default=1e-5, validator=attrs.validators.ge(0), metadata=_OF_COMPARISON
    )
    align: Literal["auto", "id", "value"] = attrs.field(default="auto", metadata=_OF_COMPARISON)


class DiffTool(DumpTool):
    """Compares a run with an earlier one; names the first divergence.

    Example: ``amanda run -t diff:reference=earlier -o out -- train.py``

    Attributes:
        options: the options of this instance.
    """

    name = "diff"
    Options = DiffOptions
    only_watches = True
    options: DiffOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._reference = _recording(self.options.reference)
        self.needs_folder = self._reference is None
        self._pairs: tuple[int, list[Pair]] | None = None

    def pairs(self) -> list[Pair]:
        """Return the corresponding tensors of both runs, in the order of this run."""
        if self._reference is None:
            return []
        # The comparison reads every tensor: it is kept until further operators have run.
        if self._pairs is None or self._pairs[0] != len(self.entries):
            align, tolerance = self.options.align, self.options.tolerance
            aligned = align_ops(self.recording(), self._reference, align, tolerance)
            self._pairs = len(self.entries), list(compare(*aligned, tolerance))
        return self._pairs[1]

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per compared tensor; of a recording the index.

        ``tensor`` and ``step``; ``reference``, the other operator's id, and ``paired_by``, the
        criterion that pairs them; ``relative_error``, ``largest_difference``, ``agrees``,
        ``note``.
        """
        if self._reference is None:
            return super().op_rows()
        # The row of the operator, as in the results of all tools, with the comparison added.
        rows = {op_id: op.row() for op_id, op in self.described.items()}
        return [{**rows[pair.record.op_id], **to_row(pair)} for pair in self.pairs()]

    def summary(self) -> dict[str, Any]:
        """``first``, the first divergent tensor or null; counts; operators without a counterpart.

        Of a recording, what it holds.
        """
        if self._reference is None:
            return {"recorded": True, **super().summary()}
        pairs = self.pairs()
        first = next((pair for pair in pairs if not pair.agrees), None)
        here = {entry.kind for entry in self.entries}
        theirs = {record.kind for record in self._reference.records}
        own = dict.fromkeys(entry.row["id"] for entry in self.entries if entry.kind in theirs)
        others = dict.fromkeys(r.id for r in self._reference.records if r.kind in here)
        both = [pair.record for pair in pairs], [pair.reference for pair in pairs]
        ops, paired = ({one.op_id for one in side} for side in both)
        return {
            "recorded": False,
            "first": None if first is None else _about(first),
            "compared": len(pairs),
            "agreeing": sum(pair.agrees for pair in pairs),
            "tolerance": self.options.tolerance,
            "only_here": [op_id for op_id in own if op_id not in ops],
            "only_in_reference": [op_id for op_id in others if op_id not in paired],
            "kinds_only_here": sorted(here - theirs),
            "kinds_only_in_reference": sorted(theirs - here),
            "not_taken": self.dropped,
            "not_looked_at": self.not_looked_at.by_kind(),
        }

    def tables(self) -> Iterable[Table]:
        """Yield tables of the first divergence, all others, and operators without a counterpart."""
        if self._reference is None:
            yield from super().tables()
            return
        pairs = [pair for pair in self.pairs() if self.is_shown(pair.record.phase)]
        beyond = [pair for pair in pairs if not pair.agrees]
        counts = f"{len(pairs) - len(beyond)} of {len(pairs)} tensors agree"
        if not beyond:
            where = "" if len(pairs) == len(self.pairs()) else " in the model"
            yield Table(f"diff: no divergence{where}, {counts}", (), ())
        else:
            record = beyond[0].record
            where = f"{record.type}, op {record.id}, {record.tensor} of step {record.step}"
            yield Table(f"diff: first divergence: {where}; {counts}", (), ())
            columns = ("op", "tensor", "step", "relative error", "largest difference", "note")
            rows = [_shown(pair) for pair in beyond]
            yield Table(f"diff: beyond {self.options.tolerance:g}", columns, rows)
        yield from self._without_counterpart()
        rows_of_all = [{**row, "beyond": int(not row["agrees"])} for row in self.op_rows()]
        yield from other_phases("diff", rows_of_all, self.options, ("beyond",))
        yield from self.not_looked_at.tables(self.name)

    def _without_counterpart(self) -> Iterable[Table]:
        """Yield for each run a table of the operators that the other run lacks."""
        assert self._reference is not None
        found = self.summary()
        phases = {op_id: op.phase for op_id, op in self.described.items()}
        theirs = {op_id: record.phase for op_id, record in self._reference.ops().items()}
        for key, of, title in (
            ("only_here", phases, "this run"),
            ("only_in_reference", theirs, "the reference"),
        ):
            ids = [op_id for op_id in found[key] if self.is_shown(of[op_id])]
            if ids:
                yield Table(f"diff: only in {title}", ("op",), [(op,) for op in ids])
            if kinds := found[f"kinds_{key}"]:
                other = "the reference" if key == "only_here" else "this run"
                yield Table(f"diff: {other} has no {' and no '.join(kinds)}", (), ())

    def charts(self) -> Iterable[Chart]:
        """Relative errors along the run, those beyond the tolerance as a series of their own."""
        rows = [] if self._reference is None else shown(self.op_rows(), self.options)
        if not rows:
            return
        kinds = {"within the tolerance": True, "beyond": False}
        yield Chart(
            title=f"relative error along the run; the tolerance is {self.options.tolerance:g}",
            kind="points",
            labels=range(len(rows)),
            values={
                name: [row["relative_error"] if row["agrees"] is agrees else None for row in rows]
                for name, agrees in kinds.items()
            },
            names=[f"{row['id']} {row['tensor']}, step {row['step']}" for row in rows],
            axis="tensors in the order of the run",
            log=True,
        )

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write the recording; nothing of a comparison."""
        return super().write_files(folder, stem) if self._reference is None else []


def _recording(reference: Any) -> Recording | None:
    """Return the recording that the option ``reference`` names, None without one.

    Raises:
        ValueError: there is no recording.
    """
    if isinstance(reference, DumpTool):
        return reference.recording()
    if isinstance(reference, Recording):
        return reference
    return Recording.read(Path(reference)) if reference else None


def _about(pair: Pair) -> dict[str, Any]:
    record = pair.record
    names = ("id", "type", "module", "direction")
    return {**{name: getattr(record, name) for name in names}, **to_row(pair)}


def _shown(pair: Pair) -> tuple[Any, ...]:
    largest = "-" if pair.largest is None else f"{pair.largest:.4g}"
    record = pair.record
    return (
        record.id, record.tensor, record.step, f"{pair.relative:.4g}", largest, pair.note
    )  # fmt: skip
