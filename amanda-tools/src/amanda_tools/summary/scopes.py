"""The tree of name scopes of graphs in which no module is called: sessions of TensorFlow 1.

Scopes are read from names of operators: ``layer1`` of ``layer1/MatMul``; variable scopes are among
them. Operators that read variables, make constants, initialise or train belong to no scope::

    scopes = Scopes()
    scopes.note(context)                    # in an analysis
    rows = scopes.rows()                    # after the run
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.parameters import Parameters, UsedParameter
from amanda_tools.summary.recorder import Figures, ModuleFact, ParameterFact, tensor_rows
from amanda_tools.summary.rows import module_row


@attrs.define(eq=False)
class ScopedOp:
    """An operator of a graph, in its name scope.

    Attributes:
        module: path of the name scope.
        graph: the name of the graph.
        parameters: parameters that it reads.
        outputs: outputs of its last execution, or before one as far as the graph declares them.
        executions: number of executions.
        flops, bytes: figures of its last execution; None for FLOPs that are not known.
    """

    module: str
    graph: str
    parameters: Sequence[UsedParameter]
    outputs: list[dict[str, Any]]
    executions: int = 0
    flops: int | None = 0
    bytes: int = 0

    def add(self, flops: int | None, size: int) -> None:
        """Count one execution."""
        self.executions += 1
        self.flops, self.bytes = flops, size

    def figures_in(self, runs: int) -> Figures:
        """Return FLOPs and bytes in one of `runs` runs of the graph.

        An operator in a loop has several executions in a run.
        """
        times = max(1, round(self.executions / runs)) if self.executions else 0
        is_partial = self.flops is None
        return Figures(
            flops=times * (self.flops or 0), bytes=times * self.bytes, is_partial=is_partial
        )

    def see(self, outputs: Sequence[Any]) -> None:
        """Record the outputs of one execution."""
        self.outputs = tensor_rows(outputs) or self.outputs


def runs_of(ops: Iterable[ScopedOp]) -> int:
    """Return the runs of a graph: the most frequent number of executions; 0 without any."""
    counts = collections.Counter(op.executions for op in ops if op.executions)
    return counts.most_common(1)[0][0] if counts else 0


class Scopes:
    """The operators of graphs, by their name scopes."""

    def __init__(self) -> None:
        self._ops: dict[str, ScopedOp] = {}
        self._parameters = Parameters()

    def note(self, context: OpContext) -> ScopedOp | None:
        """Register a forward operator; return None if it belongs to no scope."""
        kind = str(context["op_type"] or "")
        traits = row_of(kind).traits
        is_of_variable = "reads_variable" in traits and context.get_variable(0) is not None
        if context.get_phase() != "forward" or "no_activation" in traits or is_of_variable:
            return None
        op_id = context.get_op_id()
        specs = context.get_tensor_specs().outputs or ()
        outputs = [spec.row() for spec in specs if spec is not None and spec.shape is not None]
        found = ScopedOp(
            context.get_module(),
            op_id.partition("/")[0],
            self._parameters.used_by(context),
            outputs,
        )
        known = self._ops.setdefault(op_id, found)
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
            if any(op.executions for op in ops)
            for row in self._rows(name, ops)
        ]

    def passes(self) -> dict[str, int]:
        """Return the number of runs by name of a graph."""
        graphs = dict.fromkeys(op.graph for op in self._ops.values() if op.executions)
        return {
            name: runs_of(op for op in self._ops.values() if op.graph == name) for name in graphs
        }

    def _rows(self, name: str, ops: Sequence[ScopedOp]) -> list[dict[str, Any]]:
        """Return the row of a graph and those of its scopes, each after the scope around it."""
        runs, tree = runs_of(ops), {"": list(ops)}
        for op in ops:
            parts = op.module.split("/") if op.module else []
            for end in range(1, len(parts) + 1):
                tree.setdefault("/".join(parts[:end]), []).append(op)
        return [
            self._row(name, path, inside, runs)
            for path, inside in sorted(tree.items(), key=lambda item: _place(item[0], list(tree)))
            if any(op.executions for op in inside)
        ]

    def _row(self, name: str, path: str, inside: Sequence[ScopedOp], runs: int) -> dict[str, Any]:
        figures = [op.figures_in(runs) for op in inside]
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
