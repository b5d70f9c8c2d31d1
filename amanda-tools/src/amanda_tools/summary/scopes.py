"""The tree of name scopes of graphs in which no module is called: sessions of TensorFlow 1, and
models of frameworks that this package does not know.

Scopes are read from names of operators: ``layer1`` of ``layer1/MatMul``; variable scopes are among
them. Operators that read variables, make constants, initialise or train belong to no scope::

    scopes = Scopes()
    scopes.note(context)                    # in an analysis
    rows = scopes.rows()                    # after the run
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.interface.points import PointContext
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.parameters import Parameters, UsedParameter
from amanda_tools.summary.recorder import Figures, ModuleFact, ParameterFact, tensor_rows
from amanda_tools.summary.rows import module_row


@attrs.define(eq=False)
class OfRun:
    """The figures of all executions of an operator in one run, as a loop makes several.

    Attributes:
        run: number of the run, among those of all graphs.
        flops, bytes: the figures; None for FLOPs that are not known.
    """

    run: int = -1
    flops: int | None = 0
    bytes: int = 0


@attrs.define(eq=False)
class ScopedOp:
    """An operator of a graph, in its name scope.

    Attributes:
        module: path of the name scope.
        graph: the name of the graph.
        parameters: parameters that it reads.
        outputs: outputs of its last execution, or before one as far as the graph declares them.
        runs: number of runs of a graph that have executed it.
        now: its figures in the last of them.
        ended: those in the last one that has ended an iteration, before `now`.
    """

    module: str
    graph: str
    parameters: Sequence[UsedParameter]
    outputs: list[dict[str, Any]]
    _scopes: Scopes
    runs: int = 0
    now: OfRun = attrs.field(factory=OfRun)
    ended: OfRun = attrs.field(factory=OfRun)

    def add(self, flops: int | None, size: int) -> None:
        """Count one execution."""
        if self.now.run != self._scopes.runs:
            self.ended, self.now, self.runs = self.last(), OfRun(self._scopes.runs), self.runs + 1
        now = self.now
        now.flops = None if flops is None or now.flops is None else now.flops + flops
        now.bytes += size

    def last(self) -> OfRun:
        """Return its figures in the last run that has ended an iteration; in the last one if none
        has."""
        is_ended = self.now.run <= self._scopes.ended or self.ended.run < 0
        return self.now if is_ended else self.ended

    def figures_in(self, run: int) -> Figures:
        """Return FLOPs and bytes in a run of the graph: 0 in a branch not taken."""
        of = self.last()
        if of.run != run:
            return Figures()
        return Figures(flops=of.flops or 0, bytes=of.bytes, is_partial=of.flops is None)

    def see(self, outputs: Sequence[Any]) -> None:
        """Record the outputs of one execution."""
        self.outputs = tensor_rows(outputs) or self.outputs


class Scopes:
    """The operators of graphs, by their name scopes.

    Attributes:
        runs: number of runs of graphs so far.
        ended: how many there were when the last iteration ended.
    """

    def __init__(self) -> None:
        self.runs = self.ended = 0
        self._ops: dict[str, ScopedOp] = {}
        self._parameters = Parameters()

    def begin_run(self, _: PointContext) -> None:
        """Routine at the begin of a forward pass: a graph runs."""
        self.runs += 1

    def end_step(self, _: PointContext) -> None:
        """Routine at the end of an iteration, which evaluations beside training are not."""
        self.ended = self.runs

    def note(self, context: OpContext) -> ScopedOp | None:
        """Register a forward operator; return None if it belongs to no scope."""
        kind = str(context["op_type"] or "")
        traits = row_of(kind).traits
        is_left_out = "reads_variable" in traits and context.get_variable(0) is not None
        graph, module = context.get_op_id().partition("/")[0], context.get_module()
        if context.runs_at_once:
            # A framework whose modules are known by their paths alone; "" is outside of them.
            graph, module = graph.partition(".")[0], module.replace(".", "/")
            is_left_out = not graph
        if is_left_out or "no_activation" in traits or context.get_phase() != "forward":
            return None
        specs = context.get_tensor_specs().outputs or ()
        outputs = [spec.row() for spec in specs if spec is not None and spec.shape is not None]
        used = self._parameters.used_by(context)
        found = ScopedOp(module, graph, used, outputs, self)
        known = self._ops.setdefault(context.get_op_id(), found)
        known.parameters, known.outputs = found.parameters, known.outputs or outputs
        return known

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per scope, in the order of the graphs."""
        graphs: dict[str, list[ScopedOp]] = {}
        for op in self._ops.values():
            graphs.setdefault(op.graph, []).append(op)
        return [
            row
            for name, ops in graphs.items()
            if any(op.runs for op in ops)
            for row in self._rows(name, ops)
        ]

    def passes(self) -> dict[str, int]:
        """Return the number of runs by name of a graph."""
        found: dict[str, int] = {}
        for op in self._ops.values():
            if op.runs:
                found[op.graph] = max(op.runs, found.get(op.graph, 0))
        return found

    def _rows(self, name: str, ops: Sequence[ScopedOp]) -> list[dict[str, Any]]:
        """Return the row of a graph and those of its scopes, each after the scope around it."""
        run, tree = max(op.last().run for op in ops), {"": list(ops)}
        for op in ops:
            parts = op.module.split("/") if op.module else []
            for end in range(1, len(parts) + 1):
                tree.setdefault("/".join(parts[:end]), []).append(op)
        return [
            self._row(name, path, inside, run)
            for path, inside in sorted(tree.items(), key=lambda item: _place(item[0], list(tree)))
            if any(op.runs for op in inside)
        ]

    def _row(self, name: str, path: str, inside: Sequence[ScopedOp], run: int) -> dict[str, Any]:
        figures = [op.figures_in(run) for op in inside]
        parameters = [
            ParameterFact(number, parameter.size, parameter.bytes, True)
            for number, parameter in enumerate({p for op in inside for p in op.parameters})
        ]
        outputs = next((op.outputs for op in reversed(inside) if op.outputs), [])
        kind, depth = ("scope", path.count("/") + 1) if path else ("graph", 0)
        fact = ModuleFact(f"{name}/{path}" if path else name, kind, depth, parameters)
        return module_row(name, fact, Figures(1, outputs), figures)


def _place(path: str, order: Sequence[str]) -> list[int]:
    """Return the sort key of a scope: after the scope around it, by its first operator."""
    parts = path.split("/") if path else []
    return [order.index("/".join(parts[:end])) for end in range(1, len(parts) + 1)]
