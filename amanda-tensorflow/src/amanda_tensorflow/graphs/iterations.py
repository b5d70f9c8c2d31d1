"""Which runs of graphs are iterations: those in which an optimizer steps, or a model is called.

A function by which Keras trains several batches (``steps_per_execution``) has the step in the body
of a loop, and code may unroll its steps. Then no run of the function is an iteration, but each
run of the body, or each part that ends with a step::

    found = GraphIterations.of(graph)
    found.is_inside                 # iterations are runs of bodies and branches, not of the graph
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import log_of
from amanda_tensorflow.keras_layers.optimizers import optimizer_steps
from amanda_tensorflow.keras_layers.recording import layer_calls, made_by_keras
from amanda_tensorflow.operators.phases import changes_variables, phase_of_node
from amanda_tensorflow.operators.types import CALLS, CONTROL_FLOW, DATASET_LOOPS, STRUCTURAL

_SETTING = STRUCTURAL | {"AssignVariableOp", "Identity", "LogicalAnd", "LogicalNot"}
_LOOPS = DATASET_LOOPS | {"While", "StatelessWhile"}


@attrs.define(eq=False)
class GraphIterations:
    """The iterations in the runs of one graph.

    Attributes:
        trains: whether an optimizer steps in each run.
        may_step: whether one steps in a branch, which tells of it.
        is_inside: whether bodies or branches have the iterations, and the graph itself is none.
        ends: after so many operators of the graph one iteration of several has ended; the last of
            them ends with the graph.
        calls_model: whether layers are called.
        differentiates: whether gradients are computed.
        accumulating: names of operators whose second branch adds up gradients, which is no step.
    """

    trains: bool = False
    may_step: bool = False
    is_inside: bool = False
    ends: Sequence[int] = ()
    calls_model: bool = False
    differentiates: bool = False
    accumulating: set[str] = attrs.field(factory=set)

    @property
    def is_plain(self) -> bool:
        """True if each run of the graph is one iteration, which needs no nodes."""
        return not (self.may_step or self.is_inside or self.ends)

    @classmethod
    def of(cls, graph: Any) -> GraphIterations:
        """The iterations of a graph."""
        return cls.among(graph, graph.get_operations())

    @classmethod
    def among(cls, graph: Any, operations: Iterable[Any]) -> GraphIterations:
        """The iterations of some operators of a graph."""
        in_layers = layer_calls(graph)
        found = cls(calls_model=bool(in_layers), differentiates=bool(log_of(graph).calls))
        found.accumulating = _accumulating(graph)
        inside: list[tuple[Any, GraphIterations]] = []
        for op in operations:
            if op.type in CALLS:
                found._add_called([cls.of(body) for body in bodies(op)])
            elif op.name in in_layers and in_layers[op.name].is_of_keras:
                continue
            elif op.type in CONTROL_FLOW:
                inside += [(op, cls.of(body)) for body in found.stepping_bodies(op)]
            elif not found.trains:
                found.trains = changes_variables((op,))
        if found.trains:
            found.is_inside = found.may_step = False
            found.ends = _boundaries(_stepped(graph))
        else:
            found._add_inner(inside)
        return found

    def stepping_bodies(self, op: Any) -> Sequence[Any]:
        """The bodies or branches of an operator in which an optimizer may step."""
        found = []
        if op.name in self.accumulating:
            found = [of.graph for name, of in _internals.known_callees(op) if name == "then_branch"]
        return found or bodies(op)

    def within(
        self, op: Any, body: Any
    ) -> tuple[GraphIterations | None, Literal["", "pass", "step"]]:
        """The iterations of a body or branch, and what a run of it is.

        Args:
            op: has the body.
            body: its graph.

        Returns:
            ``pass`` for one that is an iteration, ``step`` for one that only has an optimizer step.
        """
        is_told = body in self.stepping_bodies(op)
        if self.is_plain or not is_told or made_by_keras(op):
            return None, ""
        found = GraphIterations.of(body)
        if not (op.type in _LOOPS or found.differentiates):
            if found.trains:
                return found, "step"
            if self.may_step and found.may_step:
                return found, ""
        return self._as_pass(found) if self.is_inside else (None, "")

    @staticmethod
    def _as_pass(found: GraphIterations) -> tuple[GraphIterations | None, Literal["", "pass"]]:
        """Return the iterations of a body that is an iteration, or has some; None for others."""
        if found.is_inside and not found.trains:
            return found, ""
        is_pass = found.trains or found.may_step or found.calls_model
        return (found, "pass") if is_pass else (None, "")

    def _add_called(self, called: Iterable[GraphIterations]) -> None:
        """Note the functions that are called: they run as a part of the graph."""
        for body in called:
            self.trains |= body.trains
            self.may_step |= body.may_step
            self.is_inside |= body.is_inside
            self.calls_model |= body.calls_model
            self.differentiates |= body.differentiates

    def _add_inner(self, inside: Iterable[tuple[Any, GraphIterations]]) -> None:
        """Note bodies and branches: some of them are iterations."""
        calls_model = self.calls_model
        for op, body in inside:
            is_loop = op.type in _LOOPS
            if body.trains and not (is_loop or body.differentiates):
                self.may_step = True
            elif (
                body.trains
                or body.is_inside
                or (is_loop and body.may_step)
                or (body.calls_model and not calls_model)
            ):
                self.is_inside = True
            self.may_step |= body.may_step and not is_loop


def sets_variables_only(graph: Any) -> bool:
    """True if a function initialises variables: ``tf.function`` runs one before its first call."""
    if graph.outputs:
        return False
    return all(map(_sets, graph.get_operations()))


def _sets(op: Any) -> bool:
    if op.type in CONTROL_FLOW or op.type in CALLS:
        return all(_sets(inner) for body in bodies(op) for inner in body.get_operations())
    return op.type in _SETTING or phase_of_node(op, False) == "setup"


def bodies(op: Any) -> Sequence[Any]:
    """The graphs of the functions that an operator runs, without the conditions of loops."""
    return [of.graph for attribute, of in _internals.known_callees(op) if attribute != "cond"]


def _accumulating(graph: Any) -> set[str]:
    """The first branch that each optimizer has added which steps once in several calls."""
    operations, found = graph.get_operations(), set[str]()
    for step in optimizer_steps(graph):
        if step.accumulates:
            branches = [op for op in operations[step.begin : step.end] if op.type in CONTROL_FLOW]
            found.update(op.name for op in branches)
    return found


def _stepped(graph: Any) -> dict[int, list[int]]:
    """By optimizer, after how many operators of the graph it has stepped, calls included."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for step in optimizer_steps(graph):
        found[step.optimizer].append(step.end)
    for index, op in enumerate(graph.get_operations()):
        if op.type in CALLS:
            for body in bodies(op):
                for optimizer in _stepped(body):
                    found[optimizer].append(index + 1)
    return {optimizer: sorted(set(ends)) for optimizer, ends in found.items()}


def _boundaries(steps: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Where iterations end before the end of the graph: at the steps of the busiest optimizer."""
    busiest = max(steps.values(), key=len, default=())
    return list(busiest[:-1])
