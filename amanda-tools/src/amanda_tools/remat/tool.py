"""The tool ``remat``: measures an iteration, and recomputes activations in later ones.

The first iteration is measured (``pytorch_measurement``), a plan is chosen from it (``plan``), and
in the backward passes of later ones the chosen operators run again (``pytorch_recomputation``).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

import amanda
from amanda import OpContext
from amanda.errors import CapabilityError
from amanda.results import Chart, Table
from amanda.tools.description import describe, place
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.phases import other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.saved_tensors import node_of
from amanda_tools._operators.targets import Targets
from amanda_tools._output.ranked_charts import rank_modules
from amanda_tools._output.units import format_short
from amanda_tools.remat.options import RematOptions
from amanda_tools.remat.plan import MeasuredOp, MemoryModel, Plan, make_plan

if TYPE_CHECKING:
    from amanda_tools.remat.pytorch_measurement import TorchMeasurement


class RematTool(PrintingTool[RematOptions]):
    """Trades computation for memory: runs operators again in backward.

    The first iteration is measured, up to its backward pass. From then on autograd does not keep
    the results that the plan names; they are computed again when the backward pass asks for them.

    Example: ``amanda run -t remat:budget=0.5 -o out -- train.py``
    """

    name = "remat"
    group = "change"
    Options = RematOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._targets = Targets(self.options.ops, self.options.exclude)
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_outputs, require_outputs=True)
        self._forget()

    def _forget(self) -> None:
        self._ops: list[MeasuredOp] = []
        self._sizes: dict[int, int] = {}
        self._measurement: TorchMeasurement | None = None
        self._make: Any = None
        self._recomputer: Callable[[], Any] = lambda: None
        self._plan: Plan | None = None
        self._acting: set[str] = set()
        self._is_late = False

    def measure_again(self) -> None:
        """Forget measurement and plan: the next iteration is measured anew.

        For a program whose iterations change for good, as between two phases of training.
        """
        self._forget()
        self.reanalyse()

    # -- instrumentation --------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        if self._plan is not None:
            self._insert(context)
        elif self._is_known(context):
            self._measuring().before(context)
            with amanda.ad_enabled():
                context.insert_before_op(self._look_again, inputs=[], runs=[])

    def _analyse_outputs(self, context: OpContext) -> None:
        if self._plan is not None or not self._is_known(context):
            return
        op = describe(context)
        may_run = self._targets.takes(op)
        reason = "" if may_run else "its type is not in ops"
        if op.id in self._targets.skipped:
            reason = "it is excluded"
        elif not self.options.ops and not self._measuring().is_own(context):
            reason = "it is not one of the framework's own operators; name its type in ops"
        if self._measuring().after(context, reason):
            self._call_before_backward(context)

    def _is_known(self, context: OpContext) -> bool:
        """True for operators of PyTorch.

        Raises:
            CapabilityError: another framework's, in a program without PyTorch.
        """
        if context.namespace.tags[0] == "pytorch":
            return True
        reason = f"remat recomputes operators of PyTorch, and none of {context.namespace}"
        if "torch" not in sys.modules:
            raise CapabilityError(f"{reason}; TensorFlow has tf.recompute_grad")
        self._targets.skip(describe(context), reason)
        return False

    def _look_again(self, runs: list[bool]) -> None:
        """Instrumentation routine, in the program's gradient mode.

        An operator that first ran without gradients has to be measured when it runs with them.
        """
        if runs and not self._is_late and self._plan is None:
            self._is_late = self._measuring().starts_with_gradients()
            if self._is_late:
                self.reanalyse()
        runs[:] = [True]

    def _measuring(self) -> TorchMeasurement:
        if self._measurement is None:
            # Imported with the first operator of PyTorch: it imports PyTorch.
            from amanda_tools.remat.pytorch_measurement import TorchMeasurement

            self._measurement = TorchMeasurement(self._ops, self._sizes)
        return self._measurement

    def _call_before_backward(self, context: OpContext) -> None:
        for output in context.get_outputs() or ():
            node = node_of(output)
            if node is not None:
                node.register_prehook(self._begin)
                return

    def _begin(self, _: Any) -> None:
        """Called when the first backward pass begins: all that it keeps is known."""
        if self._plan is not None or not self._ops:
            return
        if self._is_late:
            # Part of this iteration was measured without gradients: measure the next one.
            self.measure_again()
            return
        self._plan = self._planned()
        if not self.options.apply:
            return
        from amanda_tools.remat.pytorch_recomputation import Recomputer

        steps = self._ops
        chosen = [steps[i] for i in self._plan.recomputed]
        recomputed = frozenset(step.op.id for step in chosen)
        if recomputed:
            drawing = frozenset(step.op.id for step in chosen if step.is_random)
            changing = frozenset(op_id for step in chosen for op_id in step.changes)
            saving = {step.op.id for step in steps if step.saved}
            self._acting = saving | recomputed | changing
            self._make = functools.partial(Recomputer, recomputed, drawing, changing)
        self.reanalyse()

    def _insert(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        if op_id in self._acting:
            # Only the actions of a scope keep the recomputer alive, and with it what it knows of
            # tensors.
            recomputer = self._recomputer()
            if recomputer is None:
                recomputer = self._make()
                self._recomputer = weakref.ref(recomputer)
            context.replace_op(
                recomputer.run,
                function=context.get_function(),
                op_id=op_id,
                names=context.get_input_names(),
            )

    # -- results ----------------------------------------------------------

    def _planned(self) -> Plan:
        if self._plan is not None:
            return self._plan
        steps = self._ops
        memory = MemoryModel(steps, self._sizes)
        allowed = [i for i, step in enumerate(steps) if not step.obstacle]
        budget = self.options.to_bytes(memory.size(memory.kept(())))
        return make_plan(memory, budget, allowed)

    def not_seen(self) -> dict[str, int]:
        """The executions that were not seen, and the tensors that are kept unseen."""
        unknown = sum(step.unknown for step in self._ops)
        kept = {"tensors that hooks of the program keep in another form": unknown}
        return {**super().not_seen(), **(kept if unknown else {})}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that allocates or keeps memory.

        ``saved_bytes``: kept memory that it made; ``cost_us``, the time of one execution;
        ``recompute``; ``reason`` why it cannot be recomputed.
        """
        found = self._planned()
        steps, sizes = self._ops, self._sizes
        kept = {piece for step in steps for piece in step.saved}
        return [
            {
                **step.op.row(),
                "saved_bytes": sum(sizes[piece] for piece in kept.intersection(step.made)),
                "cost_us": step.cost,
                "recompute": i in found.recomputed,
                "reason": step.obstacle,
            }
            for i, step in enumerate(steps)
            if step.made or step.saved
        ]

    def summary(self) -> dict[str, Any]:
        """Memory kept for the backward pass without and with the plan, and the plan's cost.

        ``held_bytes`` is kept at the end of the forward pass; ``peak_bytes`` is the most at any
        time of the backward pass, recomputed results included; ``minimum_bytes`` is the lowest peak
        found for any limit. ``extra_cost`` is a fraction of the forward pass.
        """
        found = self._planned()
        steps = self._ops
        total = sum(step.cost for step in steps)
        extra = sum(steps[i].cost for i in found.recomputed)
        return {
            "options": attrs.asdict(self.options),
            **attrs.asdict(found, filter=lambda field, _: field.name != "recomputed"),
            "is_met": found.is_met,
            "is_applied": self._plan is not None and self.options.apply,
            "recomputed": len(found.recomputed),
            "extra_cost": extra / total if total else 0.0,
            **self._targets.summary(),
        }

    def charts(self) -> Iterable[Chart]:
        """Yield a chart of the memory kept by module, with and without the plan."""
        modules: dict[str, dict[str, int]] = {}
        for row in shown(self.op_rows(), self.options):
            found = modules.setdefault(place(row["id"], row["module"]), {"kept": 0, "again": 0})
            found["again" if row["recompute"] else "kept"] += row["saved_bytes"]
        series = {"kept": "kept", "computed again": "again"}
        yield from rank_modules("needed for the backward pass, by module", modules, series, "B")

    def tables(self) -> Iterable[Table]:
        """Yield tables of the figures, and of operators by the memory kept of them."""
        found = self.summary()
        is_met = "is met" if found["is_met"] else "cannot be met"
        is_met += ", as far as is known" if self.not_seen() else ""
        state = "applied" if found["is_applied"] else "planned only"
        size = functools.partial(format_short, unit="B")
        title = f"remat: {found['recomputed']} ops are run again ({state}); the budget {is_met}"
        figures = [
            (label, size(found[key]))
            for label, key in (
                ("kept for the backward pass without it", "saved_bytes"),
                ("budget", "budget_bytes"),
                ("kept with it, after the forward pass", "held_bytes"),
                ("at most during the backward pass", "peak_bytes"),
                ("least that is possible", "minimum_bytes"),
            )
        ]
        figures.append(("extra cost, of the forward pass", f"{100 * found['extra_cost']:.1f} %"))
        yield Table(title, ("figure", "value"), figures)
        every = self.op_rows()
        rows = sorted(shown(every, self.options), key=lambda row: -row["saved_bytes"])
        lines = [
            (
                row["id"],
                row["type"],
                size(row["saved_bytes"]),
                f"{row['cost_us']:.0f}",
                "again" if row["recompute"] else row["reason"] or "kept",
            )
            for row in rows
            if row["saved_bytes"]
        ]
        yield Table("remat: what is kept", ("op", "type", "bytes", "µs", "plan"), lines)
        yield from other_phases("remat", every, self.options, ("saved_bytes",))
        yield from self.unseen_tables("figures and budget are without what more they keep")
        yield from self._targets.unmet("remat")
