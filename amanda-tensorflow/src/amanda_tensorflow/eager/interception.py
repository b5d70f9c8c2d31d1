"""How the operators of eager execution are noticed.

Every operator that Python runs at once passes one of two places: the fast path
in C, and the slower ``execute`` that the fast path falls back to. The first is
looked at: operators of no interest pass, and the others are made to fall back.
The second place then has their inputs and attributes in one form, whatever the
caller passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.execution import Executor, OpRequest, Vanilla
from amanda_tensorflow.eager.plan_cache import (
    READ,
    READ_AND_UNKNOWN,
    UNKNOWN,
    Cell,
    FallingBack,
    falls_back,
    keep_plan,
    plan_in,
)
from amanda_tensorflow.eager.tape_marks import Sum
from amanda_tensorflow.eager.thread import LOCAL, Tracker
from amanda_tensorflow.eager.tool_errors import (
    PYTHON_FUNCTIONS,
    call_python,
    retried,
)
from amanda_tensorflow.eager.variable_values import READING, VariableValues
from amanda_tensorflow.gradient_map.recording import MARK
from amanda_tensorflow.operators.types import is_op

_BOOKKEEPING = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Operators that a backward pass runs outside of gradient functions."""
_FOREIGN = (
    "backward operators whose forward ran outside of the scope, was itself a backward "
    "operator, or is hidden in a function"
)
_NO_TENSORS = "operators called with inputs that are no tensors"


class Operators:
    """The two places, patched.

    Args:
        vanilla: TensorFlow's own functions.
        values: is told of the tensors that are read from variables.
    """

    def __init__(self, dispatcher: Dispatcher, vanilla: Vanilla, values: VariableValues) -> None:
        self._dispatcher = dispatcher
        self._vanilla = vanilla
        self._values = values
        self._executor = Executor(dispatcher, values)
        self._hook: Any = None

    def leave(self, undo: Callable[[], None]) -> None:
        """Undo the patches, and leave the slow path as others have set it since."""
        current, found = _internals.EXECUTE.execute, self._vanilla.execute
        undo()
        if self._hook is not None:
            _internals.EXECUTE.execute = found if current is self._hook else current

    def _fallback(self, op_name: str) -> BaseException:
        """What makes an operator take the slow path, on which we are."""
        if _internals.EXECUTE.execute is not self._hook:
            # TensorFlow sets it anew for callbacks on operators.
            self._vanilla.execute = _internals.EXECUTE.execute
            _internals.EXECUTE.execute = self._hook
        error: BaseException = _internals.FallbackException(op_name)
        return error

    # -- the fast path ----------------------------------------------------

    def fast_path(self, vanilla: Any) -> Any:
        """The fast path, in which operators of interest fall back."""
        look, note, no_tape_records = self._look, self._values.note, _internals.no_tape_records
        local, state, fallback = LOCAL, STATE, self._fallback

        def TFE_Py_FastPathExecute(ctx: Any, op_name: str, name: Any, *args: Any) -> Any:  # noqa: N802
            tracker = local.tracker
            if tracker is None:
                return vanilla(ctx, op_name, name, *args)
            # Whichever driver calls a tool: what that does is vanilla in all of them.
            if state.paused or (tracker.stale and not tracker.refresh()):
                if tracker.marking is not None and not no_tape_records():
                    raise fallback(op_name)
                return vanilla(ctx, op_name, name, *args)
            try:
                cell = tracker.cells[ctx.scope_name][op_name]
                plan = cell[cell[0] + 1]
            except LookupError:
                return look(tracker, ctx, op_name, name, args)
            if plan is None:
                result = vanilla(ctx, op_name, name, *args)
                cell[0] += 1
                return result
            mark = None
            if plan is READ or (plan.is_claim and no_tape_records()):
                result = vanilla(ctx, op_name, name, *args)
            elif plan.is_claim and tracker.has_passed(plan.driver_data) and not ctx.op_callbacks:
                # The runtime passes over attributes that the operator does not have.
                mark = plan.driver_data.mark
                result = vanilla(ctx, op_name, name, *args, MARK, mark)
            else:
                return look(tracker, ctx, op_name, name, args)
            cell[0] += 1
            if op_name in READING:
                note(op_name, args, result)
                if mark is not None and op_name == "Identity":
                    tracker.note_owner(result, mark)
            return result

        return TFE_Py_FastPathExecute

    def _look(
        self, tracker: Tracker, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]
    ) -> Any:
        """An operator on the fast path that is not known to be of no interest.

        Raises:
            FallbackException: it is of interest, and comes back to `_execute`.
        """
        if tracker.run is not None:
            if not tracker.run.is_vanilla(op_name):
                raise self._fallback(op_name)
            cell = tracker.run.cell(op_name)
            return self._counted(cell, ctx, op_name, name, args)
        if tracker.depth:
            return self._outside(tracker, ctx, op_name, name, args)
        if op_name in PYTHON_FUNCTIONS:
            return call_python(tracker, lambda: self._vanilla.fast_path(ctx, op_name, name, *args))
        if not is_op(op_name):
            return self._vanilla.fast_path(ctx, op_name, name, *args)
        scope = ctx.scope_name or ""
        cell = tracker.cell(scope, op_name)
        if plan_in(cell) is UNKNOWN and any(map(_internals.is_read_by_runtime, args)):
            keep_plan(cell, cell[0] + 1, READ_AND_UNKNOWN)
        plan = self._plan(tracker, cell, scope, op_name)
        if (
            plan is None
            or (plan.has_actions and not plan.is_blind)
            or (plan.claims and not _internals.no_tape_records())
            or falls_back(cell)
        ):
            raise self._fallback(op_name)
        self._start(tracker, plan, cell)
        result = self._counted(cell, ctx, op_name, name, args)
        tracker.started.discard((id(cell), cell[0] - 1))
        if op_name in READING:
            self._values.note(op_name, args, result)
        for action in plan.after:
            self._dispatcher.run(action, [])
        return result

    def _counted(self, cell: Cell, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]) -> Any:
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        cell[0] += 1
        return result

    def _outside(
        self, tracker: Tracker, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]
    ) -> Any:
        """An operator of a backward pass that is in no known operator's gradient function."""
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        if op_name == "AddN":
            tracker.sums[id(result)] = Sum(weakref.ref(result), list(args[0]))
        elif op_name not in _BOOKKEEPING:
            self._dispatcher.not_seen(_FOREIGN)
        return result

    def _plan(self, tracker: Tracker, cell: Cell, scope: str, kind: str) -> ActionPlan | None:
        """The plan of the next operator of a type; None if it is yet to be analysed."""
        plan: ActionPlan | None = plan_in(cell)
        if plan is not UNKNOWN:
            return plan
        number, generation = cell[0], tracker.generation
        plan = self._dispatcher.plan(tracker.op_id(scope, kind, number))
        if plan is not None:
            self._keep(tracker, cell, number, kind, plan, generation)
        return plan

    def _keep(
        self,
        tracker: Tracker,
        cell: Cell,
        number: int,
        kind: str,
        plan: ActionPlan,
        generation: int,
    ) -> None:
        """Keep a plan: as None, for the shortest way, where nothing is to be done."""
        if not tracker.keeps_plans(generation):
            return
        before = cell[number + 1] if number + 1 < len(cell) else UNKNOWN
        kept: Any = plan or (READ if kind in READING else None)
        if before is READ_AND_UNKNOWN:
            kept = FallingBack(plan)
        keep_plan(cell, number + 1, kept)

    def _start(self, tracker: Tracker, plan: ActionPlan, cell: Cell) -> None:
        """Run the routines before an operator that look at no tensor, once."""
        failed = retried() if plan else None
        if failed is not None:
            raise failed
        this = id(cell), cell[0]
        if this not in tracker.started:
            for action in plan.before:
                self._dispatcher.run(action, [])
            tracker.started.add(this)

    # -- the slow path ----------------------------------------------------

    def execute(self, _: Any) -> Any:
        """The slow path, which runs operators with their plans."""
        originals = self._vanilla

        def execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None
        ) -> Any:
            tracker = LOCAL.tracker
            if tracker is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            tracker.recorded = None
            kind = op_name.decode() if isinstance(op_name, bytes) else op_name
            listening = not STATE.paused and (not tracker.stale or tracker.refresh())
            cell = tracker.empty_cell(ctx.scope_name, kind) if listening else None
            if cell is not None:
                outputs = originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
                cell[0] += 1
                return outputs
            if not listening and tracker.marking is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            if not is_op(kind) or _internals.op_def_of(kind) is None:
                tracker.enter_function(kind)
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            if not all(isinstance(value, _internals.EagerTensor) for value in inputs):
                self._dispatcher.not_seen(_NO_TENSORS)
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            request = OpRequest(kind, num_outputs, attrs, ctx, name, self._vanilla)
            if not listening:
                return self._in_replacement(tracker, request, list(inputs))
            if tracker.run is not None:
                return self._backward(tracker, request, list(inputs))
            if tracker.depth:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            return self._forward(tracker, request, list(inputs))

        self._hook = execute
        return execute

    def _in_replacement(self, tracker: Tracker, request: OpRequest, inputs: list[Any]) -> Any:
        """An operator of the function that replaces one: its gradient is the replaced one's."""
        outputs = request.execute(inputs)
        if not _internals.no_tape_records():
            request.record(inputs, outputs, tracker.marking)
            tracker.note_recorded(outputs)
        return outputs

    def _backward(self, tracker: Tracker, request: OpRequest, inputs: list[Any]) -> Any:
        run = tracker.run
        assert run is not None
        if run.is_vanilla(request.kind):
            outputs = request.execute(inputs)
            run.cell(request.kind)[0] += 1
            return outputs

        def compute(values: list[Any]) -> list[Any]:
            outputs = request.execute(values)
            if not _internals.no_tape_records():
                request.record(values, outputs, None)
            return outputs

        outputs = list(run.execute(request.kind, inputs, compute))
        tracker.note_recorded(outputs)
        return outputs

    def _forward(self, tracker: Tracker, request: OpRequest, inputs: list[Any]) -> Any:
        failed = retried()
        if failed is not None:
            raise failed
        kind = request.kind
        scope = request.context.scope_name or ""
        cell = tracker.cell(scope, kind)
        plan = self._plan(tracker, cell, scope, kind)
        number, generation = cell[0], tracker.generation
        tape = not _internals.no_tape_records()
        if plan is not None and plan.is_blind:
            self._start(tracker, plan, cell)
        cell[0] = number + 1
        tracker.started.discard((id(cell), number))
        recorded = False
        if plan is None or (plan.has_actions and not plan.is_blind):
            op_id = tracker.op_id(scope, kind, number)
            outputs, new = self._executor.run(tracker, plan, op_id, request, inputs, scope)
            recorded = True
            if plan is None:
                self._keep(tracker, cell, number, kind, new, generation)
        elif plan.claims and tape:
            outputs = self._executor.run_claimed(tracker, plan, request, inputs)
            recorded = True
        else:
            outputs = request.execute(inputs)
        if plan is not None and plan.is_blind:
            for action in plan.after:
                self._dispatcher.run(action, [])
        if kind in READING and outputs:
            self._values.note(kind, inputs, outputs[0])
        if recorded:
            tracker.note_recorded(outputs)
        return outputs
