"""Backward operators of eager execution: what runs while a gradient function runs.

A record of the tape carries a mark that says which execution of which operator
it belongs to. When the tape calls the record's gradient function, the operators
that run in it are the backward operators of the mark's operator, one to many.
Marks hold scopes and tensors weakly, so that a tape which outlives its scope
keeps nothing alive and runs vanilla.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from amanda.engine.backward import BackwardExecution, replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import ActionKind
from amanda.interface.calls import BackwardCall
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import run_on_gradients
from amanda_tensorflow.eager.gradient_names import gradient_names, learned_names
from amanda_tensorflow.eager.plan_cache import Cell, Cells, keep_plan
from amanda_tensorflow.eager.tape_marks import Mark, OpGradients, _AnyScope
from amanda_tensorflow.eager.thread import LOCAL, Tracker, muted
from amanda_tensorflow.operators.types import OpView, is_op

Call = Callable[[Sequence[Any]], Any]


class GradientRun:
    """One call of a gradient function."""

    def __init__(self, dispatcher: Dispatcher, tracker: Tracker, mark: Mark) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self._mark = mark
        self._keeps = mark.generation == tracker.generation
        known = tracker.gradients.get(mark.op_id)
        if known is None:
            known = tracker.gradients[mark.op_id] = OpGradients()
        self._known = known
        # Of another generation: its scopes may be others than what is known is about.
        self.scopes = known.scopes if self._keeps else _AnyScope({})
        self.cells: Cells = self.scopes.cells
        self._restart()
        self._generation = tracker.generation
        self._produced: dict[tuple[str, int], Sequence[Any]] = {}

    def _restart(self) -> None:
        """Count from zero, but on and on in the gradient functions of one replacement."""
        known = self._known
        this = None if self._mark.whole else (weakref.ref(self._mark), self._tracker.passes)
        last, known.last = known.last, this
        if this is None or this != last:
            for cell in self.cells.values():
                cell[0] = 0

    # -- one backward operator --------------------------------------------

    def cell(self, kind: str) -> Cell:
        """The cell of a type of backward operators."""
        cell = self.cells.get(kind)
        if cell is None:
            cell = self.cells[kind] = [0]
        return cell

    def is_vanilla(self, kind: str) -> bool:
        """Whether nothing is to be done for the next operator of a type."""
        if not is_op(kind):
            return True
        cell = self.cell(kind)
        if any(self.execution(kind, cell[0]).needed()):
            return False
        if self._keeps and self._tracker.keeps_plans(self._generation):
            keep_plan(cell, cell[0] + 1, None)
        return True

    def execution(self, kind: str, number: int) -> BackwardExecution:
        """An execution of a backward operator."""
        mark = self._mark
        backward_id = f"{mark.op_id}/grad/{kind}:{number}"
        call = BackwardCall(
            op=OpView(kind, backward_id),
            op_id=backward_id,
            names=self._known.names.get((kind, number), ()),
            inputs=mark.inputs,
            outputs=mark.outputs,
        )
        return BackwardExecution(self._dispatcher, mark, call)

    def execute(
        self, kind: str, inputs: Sequence[Any], compute: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Run one backward operator with its analyses and routines."""
        cell = self.cell(kind)
        number = cell[0]
        cell[0] = number + 1
        execution = self.execution(kind, number)
        values = list(inputs)
        if not execution.call.names:
            mark = self._mark
            alive = [source() for source in mark.inputs]
            execution.call.names = gradient_names(mark.kind, kind, values, alive, mark.names)
        values = execution.before(values)
        outputs = compute(values)
        self._produced[kind, number] = outputs
        return execution.after(outputs, values)

    def sum(self, gradient: Any) -> Any:
        """A gradient given to the function; if it is a sum, the sum is a backward operator."""
        entry = self._tracker.sums.pop(id(gradient), None)
        if entry is None or entry.result() is not gradient:
            return gradient

        def compute(terms: list[Any]) -> list[Any]:
            if all(new is old for new, old in zip(terms, entry.terms, strict=True)):
                return [gradient]
            with muted():
                return [_internals.add_n(terms)]

        terms = [self.sum(term) for term in entry.terms]
        return self.execute("AddN", terms, compute)[0]

    def learn(self, results: Any) -> None:
        """Note which of the function's results its operators have produced."""
        if self._produced and len(self._known.names) < len(self._produced):
            listed = results if isinstance(results, (list, tuple)) else [results]
            self._known.names = learned_names(listed, self._produced, self._mark.names)
        self._produced = {}


class MarkedGradients:
    """Runs the gradient functions of marked records."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def run(self, mark: Mark, call: Call, out_grads: Sequence[Any]) -> Any:
        """Run a gradient function, with the routines on the whole operator around it.

        Args:
            mark: what the record carries.
            call: calls the function.
            out_grads: the gradients of the operator's outputs.

        Returns:
            One gradient per input, None where there is none; or what `call` gave.
        """
        if self._dispatcher.is_paused():
            return call(out_grads)
        tracker = LOCAL.tracker
        if mark.shared and tracker is not None and tracker.is_current(mark):
            run = GradientRun(self._dispatcher, tracker, mark)
            if tracker.sums:
                out_grads = [run.sum(gradient) for gradient in out_grads]
            return self._called(tracker, run, call, out_grads)
        if not mark.records():
            return call(out_grads)
        if tracker is not None:
            return call(out_grads) if tracker.muted else self._run(tracker, mark, call, out_grads)
        # A thread that no scope covers: the backward op follows its forward op.
        LOCAL.tracker = tracker = Tracker(self._dispatcher)
        tracker.outdated = False
        tracker.generation = -1
        try:
            return self._run(tracker, mark, call, out_grads)
        finally:
            LOCAL.tracker = None

    def _run(self, tracker: Tracker, mark: Mark, call: Call, out_grads: Sequence[Any]) -> Any:
        run = GradientRun(self._dispatcher, tracker, mark)
        if tracker.sums:
            out_grads = [run.sum(gradient) for gradient in out_grads]
        if not mark.whole or not any(record.has_actions for _, record in mark.records()):
            return self._called(tracker, run, call, out_grads)
        before = mark.actions(ActionKind.BEFORE_BACKWARD_OP)
        out_grads = run_on_gradients(self._dispatcher.run, before, out_grads)
        replacements = mark.actions(ActionKind.REPLACE_BACKWARD_OP)
        if replacements:
            nothing: list[Any] = [None] * len(mark.inputs)
            results: Any = replaced_gradients(
                self._dispatcher, replacements[0], list(out_grads), nothing
            )
        else:
            results = self._called(tracker, run, call, out_grads)
        after = mark.actions(ActionKind.AFTER_BACKWARD_OP)
        if after:
            listed = results if isinstance(results, (list, tuple)) else [results]
            results = run_on_gradients(self._dispatcher.run, after, listed)
        return results

    def _called(
        self, tracker: Tracker, run: GradientRun, call: Call, out_grads: Sequence[Any]
    ) -> Any:
        outer = tracker.cells, tracker.run
        tracker.go_to(run.scopes, run)
        try:
            results = call(out_grads)
        finally:
            tracker.go_to(*outer)
        run.learn(results)
        return results
