"""The tool ``path``: records passes of a model, and extracts their effective paths.

::

    with amanda.apply(tool := PathTool(theta=0.5)):
        model(x)
    [path] = tool.paths         # of each operator the critical elements of its output
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path as File
from typing import Any

import attrs
import numpy as np

from amanda.errors import AmandaError
from amanda.results import Chart, Table
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools.path import effective_paths
from amanda_tools.path.effective_paths import KINDS, Path, count_critical
from amanda_tools.path.extraction import Extraction, Start
from amanda_tools.path.recording import (
    PassRecorder,
    RecordedExecution,
    RecordedOp,
    RecordedPass,
    find_bodies,
    find_scores,
)


def _share(_: Any, attribute: Any, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"theta must be above 0 and at most 1, got {value!r}")


@attrs.frozen(kw_only=True)
class PathOptions(PhaseOptions):
    """The options of ``path``.

    Attributes:
        theta: fraction of a critical neuron's value that its critical inputs make up.
        output: where paths begin: id of an operator, or pattern of module paths (the last operator
            there); by default the last operator of the longest path with rows of numbers as output.
        axis: axis of the classes in that output.
        synapses: keep the critical products, not only their number.
        limit: inputs whose own paths are kept; those of the classes have all of them.
        csv: write the densities as a table.
    """

    theta: float = attrs.field(default=0.5, validator=_share)
    output: str = ""
    axis: int = -1
    synapses: bool = False
    limit: int = attrs.field(default=1000, validator=attrs.validators.ge(0))
    csv: bool = True


@attrs.define
class _Figures:
    """Sums over the inputs of one operator: of each kind critical ones and all."""

    op: RecordedOp
    inputs: int = 0
    critical: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(KINDS, 0))
    total: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(KINDS, 0))


class PathTool(PrintingTool[PathOptions]):
    """Effective paths: critical neurons, weights. Slow: 20 times a run.

    Source: Qiu et al., "Adversarial Defense through Network Profiling Based Path Extraction", CVPR
    2019.

    Example: ``amanda run -t path:theta=0.5 -o out -- train.py``

    Attributes:
        class_paths: class to the union of the paths of its inputs.
        counts: class to the number of these inputs.
    """

    name = "path"
    group = "find"
    Options = PathOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.class_paths: dict[int, Path] = {}
        self.counts: dict[int, int] = {}
        self._recorder = PassRecorder(self._extract)
        self._paths: list[Path] = []
        self._dropped = 0
        self._tokens = self._sequences = 0
        self._without_output = 0
        self._bodies: set[str] = set()
        self._start = ""
        self._figures: dict[str, _Figures] = {}
        self._skipped: dict[str, tuple[RecordedOp, str]] = {}
        self.depends_on(self._recorder, self._recorder.tracing)

    @property
    def labels(self) -> Any:
        """Classes to explain in the passes that begin from now on, one per input of the batch;
        None for the predicted ones."""
        return self._recorder.labels

    @labels.setter
    def labels(self, labels: Any) -> None:
        self._recorder.finish()
        self._recorder.labels = None if labels is None else np.asarray(labels)

    def exit_scope(self) -> None:
        """Extract the last pass."""
        self._recorder.finish()

    # -- paths --------------------------------------------------------------------

    @property
    def paths(self) -> list[Path]:
        """Paths of the inputs in order, up to the option ``limit``.

        Raises:
            AmandaError: the model ran without the output that was asked for.
        """
        self._recorder.finish()
        if not self._paths and not self._dropped and self._without_output:
            raise AmandaError(f"path: {self._problem()}")
        return list(self._paths)

    def _extract(self, run: RecordedPass) -> None:
        """Extract the paths of a pass that has ended."""
        output = self._output(run)
        if output is None:
            self._without_output += 1
            return
        self._start = output.op.about.id
        bodies = find_bodies(list(run.executions.values()))
        self._bodies |= _outermost(bodies)
        start = Start.of(output, self.options.axis, run.labels)
        if not start.index:
            return
        options = self.options
        found = Extraction(run, start, options.theta, keep_synapses=options.synapses)
        # What a loop has collected has steps first.
        if found.sequences is not None and not bodies:
            self._tokens += len(found.paths)
            self._sequences += found.sequences
        ops = {execution.op.about.id: execution.op for execution in found.executions}
        self._skipped |= {op_id: (ops[op_id], why) for op_id, why in found.skipped.items()}
        for path in found.paths:
            self._take(path, ops)

    def _take(self, path: Path, ops: dict[str, RecordedOp]) -> None:
        for op_id, part in path.ops.items():
            figures = self._figures.setdefault(op_id, _Figures(ops[op_id]))
            figures.inputs += 1
            for kind in KINDS:
                critical, total = count_critical(part, kind)
                figures.critical[kind] += critical
                figures.total[kind] += total
        if len(self._paths) < self.options.limit:
            self._paths.append(path)
        else:
            self._dropped += 1
        if path.label is not None:
            known = self.class_paths.get(path.label)
            self.class_paths[path.label] = path if known is None else known | path
            self.counts[path.label] = self.counts.get(path.label, 0) + 1

    def _output(self, run: RecordedPass) -> RecordedExecution | None:
        """Return the execution where the paths of a pass begin."""
        wanted = self.options.output or self._start
        if wanted in run.executions:
            found = run.executions[wanted]
            if not self.options.output and not found.gives_more_than(0):
                return None  # a later pass may run the operator on a number
            return found if found.real_outputs() else None
        if self._start and not self.options.output:
            return None
        in_order = list(run.executions.values())
        if self.options.output:
            named = [e for e in in_order if fnmatch.fnmatchcase(e.op.about.module, wanted)]
            return next((e for e in reversed(named) if any(e.is_data) and e.real_outputs()), None)
        return find_scores(in_order)

    # -- result -------------------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator between input and output.

        ``neurons``, ``synapses`` and ``weights``: critical ones, means over the inputs;
        ``..._total`` and ``..._density`` of each; ``reason`` why no rule was applied.
        """
        self._recorder.finish()
        rows = []
        for op_id, figures in reversed(self._figures.items()):
            row: dict[str, Any] = dict(figures.op.about.row())
            for kind in KINDS:
                critical, total = figures.critical[kind], figures.total[kind]
                row[kind] = critical / figures.inputs
                row[f"{kind}_total"] = total / figures.inputs
                row[f"{kind[:-1]}_density"] = critical / total if total else None
            row["reason"] = self._skipped[op_id][1] if op_id in self._skipped else ""
            rows.append(row)
        return rows

    def summary(self) -> dict[str, Any]:
        """Densities over all operators and of each class; operators without a rule.

        Where the output has a row for each token, each token has a path and counts among the
        ``inputs``; ``sequences`` is the number of the model's own inputs.
        """
        self._recorder.finish()
        unknown: dict[str, int] = {}
        for op, _ in self._skipped.values():
            unknown[op.about.type] = unknown.get(op.about.type, 0) + 1
        figures = self._figures.values()
        totals = {kind: sum(f.total[kind] for f in figures) for kind in KINDS}
        density = {
            f"{kind[:-1]}_density": sum(f.critical[kind] for f in figures) / totals[kind]
            if totals[kind]
            else None
            for kind in KINDS
        }
        return {
            "theta": self.options.theta,
            "output": self._start,
            "inputs": len(self._paths) + self._dropped,
            **({"sequences": self._sequences} if self._are_tokens() else {}),
            "paths_not_kept": self._dropped,
            "passes_without_output": self._without_output,
            **density,
            "classes": {
                str(label): {
                    "inputs": self.counts[label],
                    "neuron_density": path.density("neurons"),
                    "weight_density": path.density("weights"),
                }
                for label, path in sorted(self.class_paths.items())
            },
            "unknown_ops": dict(sorted(unknown.items())),
            "loops_and_branches": sorted(self._bodies),
        }

    def _are_tokens(self) -> bool:
        """True if every path is one of a token, not of an input of the model."""
        return bool(self._tokens) and self._tokens == len(self._paths) + self._dropped

    def _problem(self) -> str:
        wanted = self.options.output
        if wanted:
            return f"no operator or module {wanted!r} gave numbers while the tool was applied"
        return "no operator of the model gave rows of numbers; name one: output=<op id or module>"

    def tables(self) -> Iterable[Table]:
        """Densities by operator; classes; operators without a rule."""
        found, rows = self.summary(), self.op_rows()
        if not rows:
            problem = self._problem() if self._without_output else "no model ran"
            yield Table(f"path: {problem}", (), ())
            return
        unit, which = "inputs", f"{found['inputs']} inputs"
        if self._are_tokens():
            unit, which = "tokens", f"{found['inputs']} tokens of {self._sequences} sequences"
        title = (
            f"path: {which} from {found['output']}, theta {found['theta']}: "
            f"{_percent(found['neuron_density'])} of the neurons, "
            f"{_percent(found['synapse_density'])} of the synapses, "
            f"{_percent(found['weight_density'])} of the weights"
        )
        columns = ("op", "neurons", "synapses", "weights")
        names = [f"{kind[:-1]}_density" for kind in ("neurons", "synapses", "weights")]
        listed = shown(rows, self.options)
        yield Table(title, columns, [(r["id"], *(_percent(r[n]) for n in names)) for r in listed])
        if found["classes"]:
            classes = [
                (label, c["inputs"], _percent(c["neuron_density"]), _percent(c["weight_density"]))
                for label, c in found["classes"].items()
            ]
            yield Table("path: classes", ("class", unit, "neurons", "weights"), classes)
        yield from self._exceptions()
        yield from other_phases("path", rows, self.options)

    def _exceptions(self) -> Iterable[Table]:
        """Yield tables of operators without a rule, and of loops and branches."""
        if self._skipped:
            skipped = [
                (k, op.about.type, why)
                for k, (op, why) in self._skipped.items()
                if self.options.phases == "all" or op.about.phase in MODEL
            ]
            title = f"path: {len(skipped)} ops that no rule fits, most of them taken in full"
            yield Table(title, ("op", "type", "reason"), skipped)
        if self._bodies:
            title = "path: loops and branches of graphs; their results count as inputs"
            yield Table(title, ("id",), [(name,) for name in sorted(self._bodies)])

    def charts(self) -> Iterable[Chart]:
        """Critical fractions of the operators, in the order in which they ran."""
        if rows := shown(self.op_rows(), self.options):
            yield Chart(
                title="critical share by operator",
                kind="points",
                labels=range(len(rows)),
                values={
                    f"{kind}s": [row[f"{kind}_density"] for row in rows]
                    for kind in ("neuron", "synapse", "weight")
                },
                names=[row["id"] for row in rows],
                axis="operator",
            )

    def write_files(self, folder: File, stem: str) -> Sequence[File]:
        """Write ``<stem>.safetensors``, the masks, and ``<stem>.csv``, the rows."""
        if not self.op_rows():
            return []
        named = {f"input {i}": path for i, path in enumerate(self._paths)}
        named |= {f"class {label}": path for label, path in self.class_paths.items()}
        path = folder / f"{stem}.safetensors"
        effective_paths.write(path, named)
        return [path, *super().write_files(folder, stem)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _outermost(names: Iterable[str]) -> set[str]:
    """Return ids without those that lie within another one."""
    known = set(names)
    return {n for n in known if not any(n.startswith(f"{other}/") for other in known)}
