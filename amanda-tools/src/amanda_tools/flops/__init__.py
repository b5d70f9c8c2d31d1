"""``flops``: floating-point operations, parameters and bytes, by operator, module and type.

Formulas are in a registry, to which :func:`register` adds::

    from amanda_tools import flops

    flops.register("my_op", lambda call: 2 * math.prod(call.inputs[0]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import attrs

from amanda import OpContext
from amanda.inline import Counter
from amanda.interface.points import Point, PointContext
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.one_run import ModelFigures, run_once
from amanda_tools._bases.per_step import has_steps, in_step, per_step_by_id, with_steps
from amanda_tools._bases.phases import PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.call_shapes import is_nested, item_shapes_of
from amanda_tools._operators.flop_registry import backward_formula_of, formula_in, register
from amanda_tools._operators.op_table import (
    FlopFormula,
    elementwise_formula,
    has_activation,
    is_free,
    is_free_backward,
    updates_a_value,
)
from amanda_tools._operators.parameters import Parameters, UsedParameter
from amanda_tools._operators.peaks import peak_of_device
from amanda_tools._operators.signature import CallShapes, OpSignature
from amanda_tools._operators.written_bytes import WrittenBytes
from amanda_tools._output.folding import folded_rows
from amanda_tools._output.ranked_charts import (
    forward_types,
    lines_over_steps,
    rank_groups,
    rank_modules,
)
from amanda_tools._output.units import format_short, share_text
from amanda_tools.flops.counting import OpFlops, known_shapes
from amanda_tools.flops.model_samples import ModelSamples

__all__ = ["CallShapes", "FlopsOptions", "FlopsTool", "ModelFlops", "register"]

Op = OpFlops | OpDescription
"""An operator that counts zero by convention, as most do, is represented by its description alone:
one object more for each would cost the garbage collector a visit."""

_DIRECTIONS = ("forward", "backward")

_INPUTS, _SHAPES = object(), object()
"""Keys of a forward operator's context: shapes of its inputs, and of inputs and outputs, if the
graph has them."""


@attrs.frozen(kw_only=True)
class FlopsOptions(PhaseOptions):
    """The options of ``flops``.

    Attributes:
        by: what the largest table of the summary lists: module, type or op.
        csv: also write the rows of all operators as a table.
        elementwise: also count elementwise work, reductions, losses, normalizations and softmax, as
            a figure of its own.
        peak: the most that the device can do, in TFLOP/s; 0 for what is known of a CUDA device.
        samples: samples that one step processes; 0 to count them by the inputs of the outermost
            modules.
    """

    by: Literal["module", "type", "op"] = "module"
    csv: bool = False
    elementwise: bool = False
    peak: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    samples: int = attrs.field(default=0, validator=attrs.validators.ge(0))


class FlopsTool(PrintingTool[FlopsOptions]):
    """Counts floating-point operations, parameters and bytes.

    Two operations per multiply-accumulate of matrix products, convolutions and attention, at every
    execution, with the shapes that it has. Types that count zero by convention and types without a
    formula are listed.

    Example: ``amanda run -t flops:by=type,csv=true -o out -- train.py``
    """

    name = "flops"
    figures = ("executions", "macs", "flops")
    shows_training = True
    Options = FlopsOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ops: dict[str, Op] = {}
        # Of forward operators; not in one object for each, which the garbage collector would visit.
        self._used: dict[str, Sequence[UsedParameter]] = {}
        self._written = WrittenBytes()
        self._samples = ModelSamples()
        # What an optimizer multiplies is no work of the model.
        self._totals = {part: Counter() for part in (*_DIRECTIONS, "elementwise", "other")}
        self._batch = self._batch_of_step = 0
        self._is_batch_of_training = False
        self._begins: list[int] = []
        self._recomputed = 0
        self._counted: list[OpFlops] = []
        self._op_counts: dict[str, list[int]] = {}
        self._parameters = Parameters()
        self.depends_on(MappingTool.standard())
        self.add_inst_for_pass(self._note_pass)
        self.add_inst_for_pass(self._note_pass, end=True)
        self.add_inst_for_pass(self._begin_backward, backward=True)
        self.add_inst_for_pass(self._end_backward, backward=True, end=True)
        self.add_inst_for_iteration(self._written.begin_step)
        self.add_inst_for_iteration(self._written.end_step, end=True)
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_outputs, require_outputs=True)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    @classmethod
    def of(cls, model: Any, input: Any, **options: Any) -> ModelFlops:
        """Count the FLOPs of one run of a model: the function ``amanda.flops``."""
        tool = cls(**options)
        if not run_once(tool, model, input):
            raise TypeError("amanda.flops() needs an input, or the shape of one: (4, 64)")
        return ModelFlops(tool.result(), [table for table in tool.tables() if not table.detail])

    def _note_pass(self, point: PointContext) -> None:
        # Where a pass in a graph begins its inputs are not known yet.
        is_known = point.runs_at_once == (point.point is Point.FORWARD_BEGIN)
        (self._samples.note if is_known else self._samples.check)(point)

    def _begin_backward(self, point: PointContext) -> None:
        self._begins.append(self._totals["forward"].count)

    def _end_backward(self, point: PointContext) -> None:
        """Add up what a backward pass has run of the operators of forward passes: checkpoints."""
        begin = self._begins.pop() if self._begins else self._totals["forward"].count
        if not self._begins:
            self._recomputed += self._totals["forward"].count - begin

    # -- analyses ---------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        known = self._ops.get(op.id) or self._forward_op(op, context)
        is_shown = self.shows(context)
        self._used[op.id] = self._parameters.used_by(context)
        if isinstance(known, OpDescription):
            self._ops[op.id] = op if is_shown else known
            return
        if is_shown:
            known.op = op
        if context.runs_at_once:
            _count_at_once(known, context)
        else:
            self._count_in_graph(known, context)

    def _count_in_graph(self, known: OpFlops, context: OpContext) -> None:
        """Count the executions of a forward operator of a graph.

        A failure ends the run, so that one routine before the operator is enough.
        """
        formula = known.formula
        if formula is None:
            context.insert_before_op(known.counter(((), ())), inputs=[])
            return
        specs = context.get_tensor_specs().inputs
        inputs = known_shapes(specs)
        if formula.reads_outputs:
            # Those are known after it, where another tool may have replaced it.
            context[_INPUTS] = inputs
            if known_shapes(specs, known.suffices) is None:
                context.insert_before_op(known.begin)
        elif inputs is None:
            context.insert_before_op(known.run)
        else:
            context[_SHAPES] = known.sum.last = inputs, ()
            context.insert_before_op(known.counter(known.sum.last), inputs=[])

    def _count_outputs_in_graph(self, known: OpFlops, context: OpContext) -> None:
        """Count the executions of a forward operator whose formula reads its outputs."""
        inputs, specs = context[_INPUTS], context.get_tensor_specs()
        outputs = known_shapes(specs.outputs)
        if inputs is None or outputs is None:
            context.insert_after_op(known.end, inputs=known_shapes(specs.inputs, known.suffices))
            return
        context[_SHAPES] = known.sum.last = inputs, outputs
        context.insert_after_op(known.counter(known.sum.last), outputs=[])

    def _analyse_outputs(self, context: OpContext) -> None:
        known = self._ops[context.get_op_id()]
        op, in_graph = _described(known), not context.runs_at_once
        if in_graph and isinstance(known, OpFlops) and known.reads_outputs:
            self._count_outputs_in_graph(known, context)
        # Most names end otherwise, and the function is not called.
        updates = op.name.endswith("_") and updates_a_value(context, op.name)
        if has_activation(op.type) and not updates:
            self._written.note(op.id, context)

    def _analyse_backward(self, context: OpContext) -> None:
        op = describe(context)
        self.shows(context)
        known = self._ops.get(op.id) or self._backward_op(op)
        if isinstance(known, OpDescription):
            return
        if not context.runs_at_once:
            self._count_gradient_in_graph(known, context)
            return
        is_known = known.formula is not None
        context.insert_before_backward_op(known.sum.before, grad_outputs=None if is_known else [])
        context.insert_after_backward_op(known.sum.after, grad_inputs=None if is_known else [])

    def _count_gradient_in_graph(self, known: OpFlops, context: OpContext) -> None:
        """Count the executions of a backward operator of a graph, by one routine if it can be."""
        if known.formula is None:
            counter = known.counter(((), ()))
            context.insert_before_backward_op(counter, grad_outputs=[])
            return
        specs, forward = context.get_tensor_specs(), context[_SHAPES]
        received = known_shapes(specs.inputs)
        produced = known_shapes(specs.outputs) if known.reads_outputs else ()
        if received is not None and produced is not None and forward is not None:
            counter = known.counter((received, produced), forward)
            context.insert_before_backward_op(counter, grad_outputs=[])
        elif produced is not None:
            context.insert_before_backward_op(known.run, outputs=produced, forward=forward)
        else:
            received = known_shapes(specs.inputs, known.suffices)
            if received is None:
                context.insert_before_backward_op(known.begin)
            context.insert_after_backward_op(known.end, inputs=received, forward=forward)

    def _forward_op(self, op: OpDescription, context: OpContext) -> Op:
        """Classify a forward operator: with a formula, free, or unknown."""
        formula = formula_in(context, op.type, op.name)
        is_extra = formula is None and is_free(op.type)
        if is_extra and (formula := self._extra_formula(op, op.type)) is None:
            return self._met(op, op)
        signature = OpSignature.of(context, op.type, op.attributes)
        if formula is None:
            # Without what the program gave, such as a module, which would be kept alive.
            signature = attrs.evolve(signature, attributes=op.attributes)
        total = self._totals["elementwise" if is_extra else _part_of(op)]
        return self._met(op, OpFlops.of(op, formula, signature, total, is_elementwise=is_extra))

    def _extra_formula(self, op: OpDescription, kind: str) -> FlopFormula | None:
        """Return the formula of elementwise work, if it is asked for and of the model."""
        is_asked = self.options.elementwise and _part_of(op) != "other"
        return elementwise_formula(kind) if is_asked else None

    def _backward_op(self, op: OpDescription) -> Op:
        """Classify a backward operator: with a formula, free, or unknown."""
        forward, formula = self._ops.get(op.forward), None
        if isinstance(forward, OpDescription):
            return self._met(op, op)
        if forward is not None and forward.formula is not None:
            formula = backward_formula_of(op, forward.op)
        kind, is_extra = op.type, formula is None and is_free_backward(op.type, op.name)
        if not is_extra and forward is not None and forward.is_elementwise:
            kind, is_extra = forward.op.type, True
        if is_extra and (formula := self._extra_formula(op, kind)) is None:
            return self._met(op, op)
        signature = OpSignature(op.type) if forward is None else forward.signature
        total = self._totals["elementwise" if is_extra else _part_of(op)]
        return self._met(op, OpFlops.of(op, formula, signature, total, forward, is_extra))

    def _met(self, op: OpDescription, known: Op) -> Op:
        self._ops[op.id] = known
        if isinstance(known, OpFlops):
            self._counted.append(known)
        return known

    # -- result -----------------------------------------------------------

    def running_figures(self) -> dict[str, float]:
        """Operations of the model so far, forward and backward, and the samples that it was given,
        and tokens, as far as these are known."""
        self._batch = self._samples.take()
        # Other threads may add operators, and counters of an operator.
        counted = tuple(self._counted)
        executions = [known.sum.executions for known in counted]
        flops = [known.sum.amount for known in counted]
        model = {name: total.count for name, total in self._totals.items()}
        for number in [n for n, known in enumerate(counted) if known.static]:
            for counter, amount in tuple(counted[number].static.values()):
                count, of_these = counter.count, counter.count * (amount or 0)
                executions[number] += count
                flops[number] += of_these
                part = "elementwise" if counted[number].is_elementwise else None
                model[part or _part_of(counted[number].op)] += of_these
        self._op_counts = {"executions": executions, "flops": flops}
        forward = model["forward"]
        return {
            "flops": forward,
            "flops_backward": model["backward"],
            **({"flops_recomputed": self._recomputed} if self._recomputed else {}),
            "macs": forward // 2,
            **({"elementwise": model["elementwise"]} if self.options.elementwise else {}),
            **self._samples.figures(),
        }

    def momentary_figures(self) -> dict[str, float]:
        """None; notes the batch of the step that ends, if none was larger since training began."""
        begins = self.trains_late and not self._is_batch_of_training
        self._batch_of_step = max(self._batch, 0 if begins else self._batch_of_step)
        self._is_batch_of_training = self.trains_late
        return {}

    def op_counts(self) -> dict[str, list[int]]:
        """Executions and FLOPs of the operators that do not count zero by convention, as
        :meth:`running_figures` has read them."""
        return self._op_counts

    def _per_step(self) -> dict[str, dict[str, Any]]:
        """Return the figures of the last step by operator id; {} before one has ended."""
        counted = tuple(self._counted)
        ids = [known.op.id for known in counted]
        found = per_step_by_id(ids, self.op_counts_of_step())
        return {
            known.op.id: _figures(
                known, found[known.op.id]["executions"], found[known.op.id]["flops"]
            )
            for known in counted
            if found
        }

    def summary_of_steps(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the summary of steps; the option ``samples`` replaces the counted samples, which
        are not known of a step in which only modules without parameters have run."""
        found = super().summary_of_steps(rows)
        step = found.get("per_step", {})
        for figures in step, step.get("min", {}), step.get("max", {}):
            for name in [name for name in ("samples", "tokens") if not figures.get(name, 1)]:
                del figures[name]
        if self.options.samples and found.get("per_step"):
            found["per_step"] = {**found["per_step"], "samples": self.options.samples}
        return found

    def utilization(self) -> dict[str, float | None]:
        """``step_seconds``, the median of the last steps; ``mfu`` and ``hfu``, the utilization.

        It is the operations of a step over those that the device could have done in its time
        (Chowdhery et al., "PaLM", 2022, appendix B): of the model without recomputation, of the
        hardware with it. A step lasts from the beginning of its forward pass to the end of the
        optimizer's step: loading data is not part of it. None without a step or a peak.
        """
        timed = [step["seconds"] for step in self.figures_of_steps().values() if "seconds" in step]
        seconds = median(timed) if timed else None
        peak = self.options.peak or peak_of_device()
        if not seconds or not peak:
            return {"step_seconds": seconds, "mfu": None, "hfu": None}
        step = self.summary_of_steps(())["per_step"]
        flops, most = step.get("flops", 0) + step.get("flops_backward", 0), seconds * peak * 1e12
        model = flops - step.get("flops_recomputed", 0)
        return {"step_seconds": seconds, "mfu": model / most, "hfu": flops / most}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator.

        ``executions``, null where operators that count zero are not counted; ``macs`` and ``flops``
        over all executions, and in ``per_step`` those of the last step; ``counted``: formula, zero
        or unknown, or ``torch.utils.flop_counter`` for a formula of PyTorch's counter. Forward
        operators have ``params``, ``weight_bytes`` and ``activation_bytes``; a parameter counts at
        one operator, the first that computes with it if any does, also one that modules share.
        """
        steps, owned = self._per_step(), self._owned()
        rows = [self._row(op, owned) for op in self._ops.values()]
        free = {row["id"]: {"executions": None, "macs": 0, "flops": 0} for row in rows}
        return with_steps(rows, {**free, **steps} if steps else {}, "flops")

    def _owned(self) -> dict[str, list[UsedParameter]]:
        """The parameters that count at each forward operator."""
        owners: dict[UsedParameter, str] = {}
        ops = [_described(self._ops[op_id]) for op_id in self._used]
        # Those that compute first: in Keras a reshape reads the weight before the product does.
        ops.sort(key=lambda op: (op.phase != "forward", not has_activation(op.type)))
        for op in ops:
            for parameter in self._used[op.id]:
                owners.setdefault(parameter, op.id)
        owned: dict[str, list[UsedParameter]] = {}
        for parameter, op_id in owners.items():
            owned.setdefault(op_id, []).append(parameter)
        return owned

    def _row(self, op: Op, owned: Mapping[str, Sequence[UsedParameter]]) -> dict[str, Any]:
        described = _described(op)
        row = described.row()
        if isinstance(op, OpDescription):
            row.update(executions=None, macs=0, flops=0, counted="zero")
        else:
            executions, flops, unknown = op.totals()
            row.update(_figures(op, executions, flops))
            source = None if op.formula is None or unknown else op.formula.source
            row["counted"] = "zero" if op.is_elementwise else source or "unknown"
        if described.id in self._used:
            parameters = owned.get(described.id, ())
            row["params"] = sum(parameter.size for parameter in parameters)
            row["weight_bytes"] = sum(parameter.bytes for parameter in parameters)
            # Views write nothing; None where the sizes are not known.
            row["activation_bytes"] = self._written.of(described.id)
        return row

    def summary(self) -> dict[str, Any]:
        """Sums over all operators, by type and by module; types that count zero, and unknown
        ones; ``bound``: ``lower`` where executions were not seen, or are of no known FLOPs.
        ``activation_bytes`` is what the operators of modules write in one forward pass, or in a
        program without modules all operators: a lower bound if there are
        ``activations_of_unknown_size``."""
        rows = self.op_rows()
        of_model = shown(rows, self.options)
        unknown = [row for row in rows if row["counted"] == "unknown"]
        flops = _flops_of(of_model, "forward")
        elementwise = sum(int(row.get("elementwise", 0)) for row in rows)
        return {
            "batch": (self._samples.figures() and self._batch_of_step) or None,
            **{f"per_{part}": self._share_of(f"{part}s") for part in ("sample", "token")},
            **self.utilization(),
            "flops": flops,
            "flops_backward": _flops_of(of_model, "backward"),
            # Of several threads one computes forward while a backward pass of another one runs.
            "flops_recomputed": None if self.steps_overlap else self._recomputed,
            "elementwise": elementwise if self.options.elementwise else None,
            "macs": flops // 2,
            **self._memory_of(rows),
            "zero_ops": sorted({row["type"] for row in rows if row["counted"] == "zero"}),
            "bound": "lower" if unknown or self.not_seen() else None,
            "unknown_ops": _calls(unknown),
            "unknown_share": len(unknown) / len(rows) if rows else 0.0,
            "by_type": self._grouped(rows, lambda row: str(row["type"])),
            "by_module": self._grouped(rows, lambda row: str(row["module"])),
        }

    def _memory_of(self, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return the parameters of the model's operators, and the bytes of these and of their
        outputs. An optimizer of Keras keeps its state in parameters of PyTorch, too."""
        rows = [row for row in rows if row["direction"] == row["phase"] == "forward"]
        params, weight_bytes = self._params(row["id"] for row in rows)
        rows = [row for row in rows if self._written.is_in_pass(row["id"])]
        # Without those of a loss, as `summary` has them; in a program without modules all.
        rows = [row for row in rows if _is_in_module(row)] or rows
        written = [row["activation_bytes"] for row in rows]
        return {
            "params": params,
            "weight_bytes": weight_bytes,
            "activation_bytes": sum(size or 0 for size in written),
            "activations_of_unknown_size": written.count(None),
        }

    def _share_of(self, figure: str) -> dict[str, float] | None:
        """Return the operations of the last step for each of its samples or tokens, if known."""
        step = self.summary_of_steps(())["per_step"]
        if not step.get(figure):
            return None
        return {name: step[name] / step[figure] for name in ("flops", "flops_backward")}

    def _params(self, op_ids: Iterable[str]) -> tuple[int, int]:
        """Return elements and bytes of the parameters that operators use, each counted once."""
        found = {parameter for op_id in op_ids for parameter in self._used.get(op_id, ())}
        return sum(parameter.size for parameter in found), sum(p.bytes for p in found)

    def _grouped(
        self, rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]
    ) -> dict[str, dict[str, Any]]:
        """Sum figures of rows by `key`; parameters that several rows share count once in a
        group."""
        members: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            members.setdefault(key(row), []).append(row)
        groups = {}
        for group, part in members.items():
            flops = {"forward": 0, "backward": 0}
            activations = forward = 0
            for row in part:
                flops[_way_of(row["direction"], row["phase"])] += row["flops"]
                forward += row["direction"] == "forward"
                activations += row.get("activation_bytes") or 0
            groups[group] = {
                # A type of backward operators has no others.
                "ops": forward or len(part),
                "flops": flops["forward"],
                "flops_backward": flops["backward"],
                "params": self._params([row["id"] for row in part])[0],
                "activation_bytes": activations,
            }
        return groups

    # -- for people -------------------------------------------------------

    def tables(self) -> Iterable[Table]:
        """Totals; shares of modules, types or operators; types without a formula."""
        every = self.op_rows()
        rows = folded_rows(shown(every, self.options), lambda row: row["flops"])
        title = "flops: 2 per multiply-accumulate"
        yield Table(title, ("what", "amount"), self._totals_of(every), limit=None)
        if self.options.by != "type":
            yield self._table(self.options.by, rows, self._place)
        types = self._table("type", rows, lambda row: str(row["type"]))
        yield attrs.evolve(types, detail=self.options.by != "type")
        yield from other_phases("flops", every, self.options, ("flops",))
        if unknown := [row for row in rows if row["counted"] == "unknown"]:
            share = share_text(len(unknown), len(rows))
            title = f"flops: types without a formula, {share} of the operators"
            yield Table(title, ("type", "calls"), list(_calls(unknown).items()))
        yield from self.unseen_tables("figures are lower bounds")

    def _totals_of(self, every: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        """Return lines of the first table: of the last step if there is one, and of the run."""
        found, rows = self.summary(), shown(every, self.options)
        flops = [_flops_of(rows, way) for way in _DIRECTIONS]
        runs = [_amount(n, found["bound"]) for n in flops]
        steps = self.summary_of_steps(every)
        # In eager mode the bytes are not read in each step.
        is_eager = any(row["namespace"].endswith("/eager") for row in rows)
        is_of_first = is_eager and "min" in (steps["per_step"] or {})
        totals = [
            ("parameters", format_short(found["params"], "")),
            ("weights", format_short(found["weight_bytes"], "B")),
            (
                f"activations of a forward pass{', the first step' if is_of_first else ''}",
                ("at least " if found["activations_of_unknown_size"] else "")
                + format_short(found["activation_bytes"], "B"),
            ),
        ]
        if self.options.elementwise:
            extra = sum(row.get("elementwise", 0) for row in in_step(rows))
            what = "elementwise work, in none of these figures"
            totals.append((what, format_short(extra, "FLOP")))
        if not (step := steps["per_step"]):
            return [*zip(_DIRECTIONS, runs, strict=True), *totals]
        if found["mfu"] is not None:
            totals.append(("of the device's peak (MFU)", share_text(found["mfu"], 1)))
        if found["mfu"] != found["hfu"]:
            totals.append(("with recomputed work (HFU)", share_text(found["hfu"], 1)))
        whole = [(f"{way}, whole run", n) for way, n in zip(_DIRECTIONS, runs, strict=True)]
        return [*_step_rows(step, steps["steps"], found["bound"]), *totals, *whole]

    def _place(self, row: dict[str, Any]) -> str:
        """Return the group of a row in the largest table."""
        if self.options.by == "op":
            return str(row.get("forward") or row["id"])
        return str(row["module"])

    def _table(
        self, by: str, rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]
    ) -> Table:
        """Make the table of groups of rows: figures of the last step, and those of the run."""
        groups, runs = self._grouped(in_step(rows), key), self._grouped(rows, key)
        total = sum(map(_operations, groups.values()))
        # Groups without operations are in the files only.
        busy = [(name, of) for name, of in groups.items() if _operations(runs[name])]
        lines = [
            (
                name,
                of["ops"],
                format_short(of["flops"], "FLOP"),
                format_short(of["flops_backward"], "FLOP"),
                share_text(_operations(of), total),
                format_short(of["params"], ""),
                format_short(of["activation_bytes"], "B"),
                *([format_short(_operations(runs[name]), "FLOP")] if has_steps(rows) else []),
            )
            for name, of in sorted(busy, key=lambda item: -_operations(item[1]))
        ]
        columns = (by, "ops", "forward", "backward", "share", "params", "activations")
        return Table(f"flops by {by}", (*columns, "run") if has_steps(rows) else columns, lines)

    def charts(self) -> Iterable[Chart]:
        """Operations by module and by type, and those of each step."""
        both = {"forward": "flops", "backward": "flops_backward"}
        rows = shown(self.op_rows(), self.options)
        of_forward = forward_types(rows)

        def grouped(key: Callable[[dict[str, Any]], str]) -> tuple[dict[str, Any], dict[str, Any]]:
            run = self._grouped(rows, key)
            return (self._grouped(in_step(rows), key), run) if has_steps(rows) else (run, {})

        modules, run = grouped(lambda row: _described(self._ops[row["id"]]).place)
        yield from rank_modules("operations by module", modules, both, "FLOP", run)
        types, run = grouped(lambda row: of_forward[row["id"]])
        yield from rank_groups("operations by type", types, both, "FLOP", run)
        yield from lines_over_steps("operations per step", self.figures_of_steps(), both, "FLOP")


class ModelFlops(ModelFigures):
    """The figures of one forward pass of a model: prints as tables, in notebooks too.

    Attributes:
        result: plain data, as ``flops.json`` of ``amanda run`` has it.
        flops, macs: floating-point operations, and multiply-accumulates.
        params: elements of the parameters that the operators use.
        bound: ``"lower"`` if operators ran that have no formula, or unseen; else None.
    """

    def __init__(self, result: dict[str, Any], tables: Sequence[Table]) -> None:
        super().__init__(result, tables)
        figures = ("flops", "macs", "params", "bound")
        self.flops, self.macs, self.params, self.bound = map(result["summary"].get, figures)


def _step_rows(step: dict[str, Any], steps: int, bound: str | None) -> Iterator[tuple[str, str]]:
    """Yield lines with the operations of the last step, and of each of its samples and tokens if
    they are known."""
    per_step = {"forward": step["flops"], "backward": step["flops_backward"]}
    for direction, flops in per_step.items():
        last = f"the last of {steps} steps" if steps > 1 else "one step"
        yield f"{direction}, {last}", _amount(flops, bound)
    if again := step.get("flops_recomputed"):
        yield "of forward, recomputed for backward", format_short(again, "FLOP")
    for part in ("sample", "token"):
        if number := step.get(f"{part}s"):
            for direction, flops in per_step.items():
                amount = _amount(flops / number, bound)
                one = f"one of {number:,} {part}s" if number > 1 else f"the one {part}"
                yield f"{direction}, {one}", amount


def _amount(flops: float, bound: str | None) -> str:
    """Format operations: ``≥ 2 kFLOP`` for a lower bound."""
    return ("≥ " if bound else "") + format_short(flops, "FLOP")


def _count_at_once(known: OpFlops, context: OpContext) -> None:
    """Count the executions of a forward operator that runs when the program calls it.

    After the operator: one that raises has not executed.
    """
    reads_inputs = known.formula is not None
    if reads_inputs and any(map(is_nested, context.get_inputs())):
        known.sum.shapes_of = item_shapes_of
    context.insert_before_op(known.sum.before, inputs=None if reads_inputs else [])
    context.insert_after_op(known.sum.after, outputs=None if known.reads_outputs else [])


def _is_in_module(row: Mapping[str, Any]) -> bool:
    """Return True for an operator of a module, or of a session, whose models have none."""
    if not row["namespace"].startswith("tensorflow/"):
        return not row["id"].startswith("/")
    # Keras computes the loss of a compiled model in a scope of this name.
    is_in_layer = row["module"] and not f"{row['module']}/".startswith("loss/")
    return bool(is_in_layer) or row["namespace"].endswith("/graph")


def _described(op: Op) -> OpDescription:
    return op if isinstance(op, OpDescription) else op.op


def _figures(known: OpFlops, executions: int, flops: int) -> dict[str, int]:
    """Return the figures of a row; elementwise work is none of the model's FLOPs."""
    if known.is_elementwise:
        return {"executions": executions, "macs": 0, "flops": 0, "elementwise": flops}
    return {"executions": executions, "macs": flops // 2, "flops": flops}


def _part_of(op: OpDescription) -> str:
    """Return the total that an operator belongs to: a direction of the model, or ``other``."""
    return _way_of(op.direction, op.phase) if op.phase in _DIRECTIONS else "other"


def _way_of(direction: str, phase: str) -> str:
    """Return the direction that an operator works for: what only a backward pass calls is a part of
    it."""
    return "backward" if phase == "backward" else direction


def _flops_of(rows: Iterable[Mapping[str, Any]], way: str) -> int:
    """Sum the operations of the rows that work for a direction."""
    return sum(row["flops"] for row in rows if _way_of(row["direction"], row["phase"]) == way)


def _calls(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Sum executions by type, the largest first."""
    calls: dict[str, int] = {}
    for row in rows:
        calls[row["type"]] = calls.get(row["type"], 0) + row["executions"]
    return dict(sorted(calls.items(), key=lambda item: -item[1]))


def _operations(group: dict[str, Any]) -> int:
    return int(group["flops"] + group["flops_backward"])
