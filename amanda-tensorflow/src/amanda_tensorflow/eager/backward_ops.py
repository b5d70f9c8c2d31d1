"""Backward operators of eager execution: the operators that run within a gradient function.

A record on a tape carries a mark of the execution that it belongs to. When the tape calls the
record's gradient function, the operators that run in it are the backward operators of the mark's
operator, one to many; their ids continue its id: ``/MatMul:0/grad/MatMul:1``. Marks refer to scopes
and tensors weakly, so that a tape that outlives its scope keeps nothing alive and runs vanilla.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.backward import BackwardExecution, replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan, compile_plan
from amanda.inline.steps import lowered_all
from amanda.interface.action import ActionKind, InstPoint
from amanda.interface.calls import BackwardCall
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import run_on_gradients
from amanda_tensorflow.eager.gradient_names import gradient_names, learned_names
from amanda_tensorflow.eager.plan_cache import (
    PLAIN,
    UNKNOWN,
    AnyScope,
    Cell,
    Cells,
    OperatorEntry,
    Reason,
    entry_of,
    inlined,
    keep,
)
from amanda_tensorflow.eager.tape_marks import Mark, OpGradients
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker, unwatched
from amanda_tensorflow.operators.description import NamedOperator
from amanda_tensorflow.operators.gradient_shapes import checked
from amanda_tensorflow.operators.types import is_op

Call = Callable[[Sequence[Any]], Any]
"""Calls a gradient function with the gradients of the outputs; gives those of the inputs."""

_NOT_PLANNED = (PLAIN, UNKNOWN)
"""Entries of backward operators without routines, and of those that have yet to be analysed."""

_POINTS = (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP)


class EagerBackwardCall(BackwardCall):
    """A backward operator of eager execution."""

    def parameter_name(self, index: int, names: Sequence[str]) -> str | None:
        # As in graphs.
        tensor = self.inputs[0]() if self.op.type == "AddN" else None
        if tensor is not None and tensor.dtype == tf.resource:
            found: str | None = self.inputs[0].parameter_name()
            return found
        return super().parameter_name(index, names)


class GradientRun:
    """One call of a gradient function, and the backward operators that run in it.

    Attributes:
        mark: the mark of the execution that it differentiates.
        cells: their cells.
        scopes: the same for every name scope.
        produced: the outputs of those that did not run vanilla, by type and number.
        is_running: whether the function runs now.
        has_sums: whether some of its gradients may be sums; then :meth:`summed` has to be called
            once it is entered.
    """

    def __init__(self, dispatcher: Dispatcher, tracker: EagerTracker, mark: Mark) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self.mark = mark
        self.is_running = False
        self.has_sums = False
        self._outer: tuple[Any, Any] | None = None
        known = tracker.gradients.setdefault(mark.op_id, OpGradients())
        self._known = known
        self._generation = tracker.generation
        # Entries are about the scopes that apply now; those of the mark may be others.
        self._keeps = mark.generation == tracker.generation
        self.scopes = known.scopes if self._keeps else AnyScope({})
        self.cells: Cells = self.scopes.cells
        # The gradient functions of the operators of one replacement are numbered together.
        this = None if mark.whole else (weakref.ref(mark), tracker.passes)
        last, known.last = known.last, this
        if this is None or this != last:
            for cell in self.cells.values():
                cell[0] = 0
        self.produced: dict[tuple[str, int], Sequence[Any]] = {}

    # -- one backward operator --------------------------------------------

    def cell(self, kind: str) -> Cell:
        """The cell of a type of backward operators, made if there is none."""
        return self.cells.setdefault(kind, [0])

    def is_vanilla(self, kind: str) -> bool:
        """True if the next operator of a type has neither actions nor analyses to run."""
        if not is_op(kind):
            return True
        cell = self.cell(kind)
        if entry_of(cell) not in _NOT_PLANNED or any(self._execution(kind, cell[0]).needed()):
            return False
        self._keep(cell, cell[0], PLAIN)
        return True

    def execute(
        self, kind: str, inputs: Sequence[Any], compute: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Run the next operator of a type with its analyses and routines.

        Args:
            compute: runs the operator itself on the gradients that it consumes.

        Returns:
            The gradients that it produces.
        """
        cell = self.cell(kind)
        entry, number = entry_of(cell), cell[0]
        cell[0] = number + 1
        values = list(inputs)
        if entry not in _NOT_PLANNED:
            return self._run_planned(entry.plan, (kind, number), values, compute)
        execution = self._execution(kind, number)
        if not execution.call.names:
            mark = self.mark
            alive = [source() for source in mark.inputs]
            execution.call.names = gradient_names(mark.kind, kind, values, alive, mark.names)
        values = execution.before(values)
        outputs = compute(values)
        self.produced[kind, number] = outputs
        outputs = execution.after(outputs, values)
        plan = self._plan(execution.call.op_id)
        if plan is not None:
            self._keep(cell, number, _entry(plan))
        return outputs

    def _run_planned(
        self,
        plan: ActionPlan,
        key: tuple[str, int],
        values: list[Any],
        compute: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Run the operator of this type and number, whose analyses have all run."""
        run_all = self._dispatcher.run_all
        values = run_all(plan.before_backward, values)
        outputs = self.produced[key] = compute(values)
        if plan.replace_backward is not None:
            outputs = replaced_gradients(self._dispatcher, plan.replace_backward, values, outputs)
        return run_all(plan.after_backward, outputs)

    def _execution(self, kind: str, number: int) -> BackwardExecution:
        """An execution of the operator of a type and a number."""
        mark = self.mark
        backward_id = f"{mark.op_id}/grad/{kind}:{number}"
        call = EagerBackwardCall(
            op=NamedOperator(kind, backward_id),
            op_id=backward_id,
            names=self._known.names.get((kind, number), [""] if kind == "AddN" else ()),
            inputs=mark.inputs,
            outputs=mark.outputs,
        )
        return BackwardExecution(self._dispatcher, mark, call)

    def _plan(self, backward_id: str) -> ActionPlan | None:
        """The plan of a backward operator; None if some analysis of it has yet to run."""
        if not STATE.cache:
            return None
        records = self.mark.records()
        children = [record.children.get(backward_id) for _, record in records]
        found = tuple(child for child in children if child is not None)
        if len(found) < len(children) or any(c.pending(p) for c in found for p in _POINTS):
            return None
        actions = [child.state.actions for child in found]
        return compile_plan(backward_id, [scope for scope, _ in records], actions)

    def _keep(self, cell: Cell, number: int, entry: Any) -> None:
        if self._keeps and self._tracker.keeps_plans(self._generation):
            keep(cell, number, entry)

    # -- the whole function -----------------------------------------------

    def sum(self, gradient: Any) -> Any:
        """Return a gradient that the function is given.

        If the tape has added several gradients, their sum is a backward operator, too.
        """
        entry = self._tracker.sums.pop(id(gradient), None)
        if entry is None or entry.result() is not gradient:
            return gradient

        def compute(terms: list[Any]) -> list[Any]:
            if all(new is old for new, old in zip(terms, entry.terms, strict=True)):
                return [gradient]
            with unwatched():
                return [_internals.add_n(terms)]

        terms = [self.sum(term) for term in entry.terms]
        return self.execute("AddN", terms, compute)[0]

    def enter(self) -> None:
        """Count operators as those of the function, which runs until :meth:`leave` is called."""
        tracker = self._tracker
        self._outer = tracker.cells, tracker.run
        self.is_running, self.has_sums = True, bool(tracker.sums)
        tracker.cells, tracker.run, tracker.stale = self.scopes, self, tracker.outdated

    def summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients that the function is given, with sums as backward operators."""
        return [self.sum(gradient) for gradient in gradients]

    def leave(self, results: Any) -> None:
        """Leave the function.

        Args:
            results: what the function returned; None if it has raised.
        """
        if self._outer is not None:
            self._tracker.go_to(*self._outer)
            self._outer = None
        self.is_running = self.has_sums = False
        if self.produced:
            if results is not None:
                self.learn(results)
            self.produced = {}

    def learn(self, results: Any) -> None:
        """Note which of the function's results each of its operators has produced."""
        if len(self._known.names) < len(self.produced):
            listed = results if isinstance(results, (list, tuple)) else [results]
            self._known.names = learned_names(listed, self.produced, self.mark.names)


def _entry(plan: ActionPlan) -> OperatorEntry:
    """Return the entry of a backward operator with this plan."""
    if not plan.around:
        return PLAIN
    found = None
    if plan.replace_backward is None:
        before, after = map(lowered_all, (plan.before_backward, plan.after_backward))
        found = inlined(plan, before, after)
    return found or OperatorEntry(plan, Reason.ROUTINES)


class MarkedGradients:
    """Runs the gradient functions of marked records."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def run(self, mark: Mark, call: Call, out_grads: Sequence[Any]) -> Any:
        """Run a gradient function, with the routines on the whole operator around it.

        Args:
            mark: the mark that the record carries.
            call: calls the function.
            out_grads: the gradients of the operator's outputs.

        Returns:
            One gradient per input, None where there is none; or what `call` gave.
        """
        if self._dispatcher.is_paused():
            return call(out_grads)
        tracker = LOCAL.tracker
        if not mark.records():
            return call(out_grads)
        if tracker is not None:
            return call(out_grads) if tracker.muted else self._run(tracker, mark, call, out_grads)
        # A thread that no scope covers runs the backward pass: the scopes of the forward apply.
        LOCAL.tracker = tracker = EagerTracker(self._dispatcher)
        tracker.outdated = False
        tracker.generation, tracker.depth = -1, 1
        try:
            return self._run(tracker, mark, call, out_grads)
        finally:
            LOCAL.tracker = None

    def begin(self, mark: Mark) -> GradientRun | None:
        """Begin the gradient function of an operator whose executions share a mark.

        Nothing is done to such an operator as a whole.

        Returns:
            The call, which has to be left in any case; None where :meth:`run` has to be called.
        """
        tracker, state = LOCAL.tracker, STATE
        if (
            tracker is None
            or tracker.muted
            or tracker.outdated
            or mark.generation != tracker.generation
            or state.paused
            or not state.enabled
            or ((state.held or not state.scopes) and self._dispatcher.is_paused())
            or not tracker.local.is_eager
        ):
            return None
        run: GradientRun | None = tracker.runs.get(mark)
        if run is None or run.is_running:
            run = tracker.runs[mark] = GradientRun(self._dispatcher, tracker, mark)
        else:
            for cell in run.cells.values():
                cell[0] = 0
        run.enter()
        return run

    def summed(self, tracker: EagerTracker, sources: Sequence[Any], results: Sequence[Any]) -> Any:
        """The results of a backward pass, with the sums for variables as backward operators."""
        found = list(results)
        for index, (source, gradient) in enumerate(zip(sources, found, strict=True)):
            mark = tracker.owner_of(source) if id(gradient) in tracker.sums else None
            if mark is not None and mark.records():
                run = GradientRun(self._dispatcher, tracker, mark)
                run.enter()
                try:
                    found[index] = run.sum(gradient)
                finally:
                    run.leave(None)
        return found

    def _run(self, tracker: EagerTracker, mark: Mark, call: Call, out_grads: Sequence[Any]) -> Any:
        run = GradientRun(self._dispatcher, tracker, mark)
        if not mark.whole or not any(record.has_actions for _, record in mark.records()):
            return _called(run, call, out_grads)
        out_grads = run.summed(out_grads)
        before = mark.actions(ActionKind.BEFORE_BACKWARD_OP)
        out_grads = run_on_gradients(self._dispatcher, before, out_grads)
        replacements = mark.actions(ActionKind.REPLACE_BACKWARD_OP)
        if replacements:
            nothing: list[Any] = [None] * len(mark.inputs)
            results: Any = replaced_gradients(
                self._dispatcher, replacements[0], list(out_grads), nothing
            )
            results = checked(results, replacements[0], mark.shapes or nothing)
        else:
            results = _called(run, call, out_grads)
        after = mark.actions(ActionKind.AFTER_BACKWARD_OP)
        if after:
            listed = results if isinstance(results, (list, tuple)) else [results]
            results = run_on_gradients(self._dispatcher, after, listed)
        return results


def _called(run: GradientRun, call: Call, out_grads: Sequence[Any]) -> Any:
    """Return the results of a gradient function, whose operators are counted as those of `run`."""
    results = None
    run.enter()
    try:
        results = call(run.summed(out_grads) if run.has_sums else out_grads)
        return results
    finally:
        run.leave(results)
