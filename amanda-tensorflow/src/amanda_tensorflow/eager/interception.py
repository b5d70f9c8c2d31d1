"""Interception of eager operators, at the two places that all of them pass.

TensorFlow's generated functions first try the fast path, ``TFE_Py_FastPathExecute``, in C. It takes
arguments of any kind. If it raises ``_FallbackException``, the function converts its arguments to
tensors and calls the slow path, ``execute.execute``::

    gen_math_ops.mat_mul
        fast path        operators of no interest run here
        slow path        operators of interest run here

The patched fast path lets operators of no interest pass, and raises that exception for the others.
The patched slow path then has their inputs and attributes in one form, whatever the caller passed.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.patching import named_as
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.execution import Executor
from amanda_tensorflow.eager.op_request import OpRequest, Vanilla
from amanda_tensorflow.eager.plan_cache import (
    READ,
    READ_AND_UNKNOWN,
    UNKNOWN,
    AnyScope,
    Cell,
    Cells,
    Inlined,
    SlowPath,
    entry_of,
    inlined,
    keep,
    plan_of,
)
from amanda_tensorflow.eager.tape_marks import Sum
from amanda_tensorflow.eager.thread import LOCAL, Tracker
from amanda_tensorflow.eager.tool_errors import call_python, retried
from amanda_tensorflow.eager.variable_values import READING, VariableValues
from amanda_tensorflow.operators.types import NOT_OPS, PYTHON_FUNCTIONS

_BOOKKEEPING = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Operators that a backward pass itself runs, outside of gradient functions."""
_FOREIGN = (
    "backward operators whose forward ran outside of the scope, was itself a backward "
    "operator, or is hidden in a function"
)
_NOT_CONVERTED = "operators whose inputs only TensorFlow's runtime can convert"
_RESOURCE = tf.resource.as_datatype_enum
_now = time.perf_counter_ns

Way = Callable[[Any, str, Any, tuple[Any, ...]], Any]
"""Runs an operator: it is given the arguments of the fast path."""
_NO_TENSORS = "operators called with inputs that are not tensors"


class Interception:
    """The patches of the fast path and of the slow path.

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
        self._numbers: dict[tuple[type, ...], int] = {}

    def leave(self, undo: Callable[[], None]) -> None:
        """Undo the patches by `undo`, but keep a slow path that TensorFlow has set meanwhile."""
        current, found = _internals.EXECUTE.execute, self._vanilla.execute
        undo()
        if self._hook is not None:
            _internals.EXECUTE.execute = found if current is self._hook else current

    def _fallback(self, op_name: str, args: Sequence[Any]) -> Way:
        """The way of an operator that has to take the slow path.

        Raises:
            FallbackException: makes it take the slow path, with our patch in place.
        """
        if _internals.EXECUTE.execute is not self._hook:
            self._patch_again()
        tracker = LOCAL.tracker
        if tracker is not None and _internals.takes_fast_path(op_name, args):
            tracker.fallen.add(op_name)
            if not _internals.needs_no_conversion(op_name, args):
                return self._converted
        raise _internals.FallbackException(op_name)

    def _converted(self, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Run an operator on the slow path, which may not convert arguments as the fast path does.

        It refuses some that the fast path takes, as an integer beside a variable, and what neither
        takes it refuses by another error.
        """
        tracker, frame = LOCAL.tracker, inspect.currentframe()
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back
        call = None if frame is None else _internals.slow_path_of(frame)
        if tracker is None or call is None:
            raise _internals.FallbackException(op_name)
        function, arguments = call
        self._read_variables(op_name, args, arguments)
        failed: list[Exception] = []
        try:
            return function(**arguments)
        except Exception as error:
            if op_name not in tracker.fallen:
                if not _is_of_stateless(error, op_name):
                    raise
                failed.append(error)
        tracker.fallen.discard(op_name)
        # An operator without state may run twice: the error is that of the fast path, if it is one.
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        if failed:
            raise failed.pop()
        self._dispatcher.not_seen(_NOT_CONVERTED)
        return result

    def _read_variables(self, op_name: str, args: Sequence[Any], arguments: dict[str, Any]) -> None:
        """Read the variables among the arguments of the slow path, in the order of the fast path.

        With tensors in their place the slow path finds the types that the fast path finds.
        """
        declared, names = _internals.DECLARED[op_name], list(arguments)
        for position, value in enumerate(args[: _internals.INPUT_COUNTS[op_name]]):
            name = next((name for name in names if arguments[name] is value), None)
            if name is None or declared.fixed.get(position) == _RESOURCE:
                continue
            names.remove(name)
            if position not in declared.lists:
                arguments[name] = _internals.value_of(value)
            elif isinstance(value, (list, tuple)) or _internals.is_sequence(value):
                arguments[name] = [_internals.value_of(item) for item in value]

    def _patch_again(self) -> None:
        """Patch the slow path that TensorFlow has set: ``op_callbacks`` switches between two."""
        self._vanilla.execute = _internals.EXECUTE.execute
        _internals.EXECUTE.execute = self._hook

    # -- the fast path ----------------------------------------------------

    def fast_path(self, vanilla: Any) -> Any:
        """The patch of ``TFE_Py_FastPathExecute``."""
        way_of, ended, note = self._decider(), self._ended, self._values.note
        now, planned = _now, list

        def TFE_Py_FastPathExecute(ctx: Any, op_name: str, name: Any, *args: Any) -> Any:  # noqa: N802
            # For each operator the runtime finds the lines at which all running functions are (2.16
            # to 2.21), which takes the longer the more code lies before: what is asked beforehand
            # is asked by a function that has ended, and the usual ways come first.
            way = way_of(ctx, op_name, args)
            if type(way) is planned:
                result = vanilla(ctx, op_name, name, *args)
                way[0] += 1
                return result
            if type(way) is not tuple:
                return way(ctx, op_name, name, args)
            tracker, cell, marked, entry, read, args = way
            # The runtime ignores attributes that the operator does not declare.
            if entry is None:
                result = vanilla(ctx, op_name, name, *args, *marked)
                cell[0] += 1
            else:
                start = now()
                result = vanilla(ctx, op_name, name, *args, *marked)
                end = now()
                cell[0] += 1
                ended(tracker, entry, start, end)
            if read is True:
                note(op_name, args, result)
                if marked and op_name == "Identity":
                    tracker.note_owner(result, marked[1])
            elif read is not None:
                read[0][0] += read[1]
            return result

        return TFE_Py_FastPathExecute

    def _decider(self) -> Callable[[Any, str, tuple[Any, ...]], Any]:
        """A function that decides how an operator on the fast path is run.

        It returns one of:

        * a cell: the operator runs vanilla and is counted there;
        * a tuple: the tracker; the cell; the attribute by which it is marked, if it is; the entry,
          if counters and timers are to be told, else None; True, if the output may be the value of
          a variable, or the cell that counts readings and how many the operator does, else None;
          the arguments, in which variables may have been read;
        * a function that runs it.

        It raises FallbackException if the operator has to take the slow path.
        """
        no_tape_records, local, state = _internals.no_tape_records, LOCAL, STATE
        look, with_variables, slow = self._look, self._with_variables, self._slow
        plain, without_variables = _internals.NO_VARIABLES, _internals.NO_VARIABLES.issuperset
        is_read, inputs_of = _internals.is_read_by_runtime, _internals.INPUT_COUNTS
        passed, reading, uncounted, exception = self._passed, self._numbers, [0], sys.exception

        def way_of(ctx: Any, op_name: str, args: tuple[Any, ...]) -> Any:
            tracker = local.tracker
            if tracker is None:
                return uncounted
            # A tool's code runs vanilla, whichever driver has called it.
            if state.paused or (tracker.stale and not tracker.refresh()):
                if tracker.marking is not None and not no_tape_records():
                    return self._fallback(op_name, args)
                return uncounted
            try:
                cells = tracker.cells
                # The name scope is asked for only where it makes a difference.
                cells = cells.cells if type(cells) is AnyScope else cells[tracker.local.scope_name]
                cell = cells[op_name]
                entry = cell[cell[0] + 1]
            except LookupError:
                return look
            if type(entry) is SlowPath:
                if entry.may_pass:
                    return passed(tracker, cells, entry.plan, op_name, args)
                return slow(tracker, op_name, args)
            # Attributes follow the inputs; most operators have one or two of these.
            inputs = inputs_of[op_name]
            if inputs == 1:
                is_plain = type(args[0]) in plain
            elif inputs == 2:
                is_plain = type(args[0]) in plain and type(args[1]) in plain
            else:
                is_plain = without_variables(map(type, args[:inputs]))
            if not is_plain and (tuple(map(type, args)) in reading or any(map(is_read, args))):
                return with_variables(tracker, cells, entry, ctx, op_name, args)
            if entry is None:
                return cell
            plan, timed, marked = entry, None, ()
            if type(entry) is Inlined:
                failed = retried() if exception() is not None else None
                if failed is not None:
                    raise failed
                plan, timed = entry.plan, entry
            elif entry is not READ and not entry.is_claim:
                return look
            if plan.claims and not no_tape_records():
                claim = plan.driver_data
                if claim is None or tracker.passes <= claim.passes or tracker.local.op_callbacks:
                    if timed is None:
                        return look
                    return self._fallback(op_name, args)
                marked = claim.marked
            reads = True if op_name in READING and not tracker.depth else None
            if marked or timed or reads:
                return tracker, cell, marked, timed, reads, args
            return cell

        return way_of

    def _slow(self, tracker: Tracker, op_name: str, args: tuple[Any, ...]) -> Way:
        """The way of an operator whose entry says that it takes the slow path.

        Raises:
            FallbackException: makes it take the slow path.
        """
        # As _fallback() does it, without its calls, where tensors are all that is given.
        given = map(type, args[: _internals.INPUT_COUNTS[op_name]])
        if _internals.DECLARED[op_name].is_any or not _internals.TENSORS_ONLY.issuperset(given):
            return self._fallback(op_name, args)
        if _internals.EXECUTE.execute is not self._hook:
            self._patch_again()
        tracker.fallen.add(op_name)
        raise _internals.FallbackException(op_name)

    def _with_variables(
        self,
        tracker: Tracker,
        cells: Cells,
        entry: Any,
        ctx: Any,
        op_name: str,
        args: tuple[Any, ...],
    ) -> Any:
        """The way of an operator that gets variables that its entry does not mention.

        Raises:
            FallbackException: it has to take the slow path.
        """
        cell = cells[op_name]
        if type(entry) is Inlined:
            # Nothing is read twice: it is known beforehand whether an operator has to take the slow
            # path.
            readings = self._readings(cells, args, may_be_inlined=True)
            marked = self._marked(tracker, entry.plan)
            if readings is None or marked is None:
                return self._fallback(op_name, args)
            plain, values = _internals.NO_VARIABLES, list(args)
            for position, value in enumerate(args):
                if type(value) not in plain:
                    # Each reading is an operator that is counted, and in this order.
                    values[position] = self._value_of(tracker, readings[0], ctx, value)
            reads = True if op_name in READING and not tracker.depth else None
            return tracker, cell, marked, entry, reads, values
        # Its entry was kept when its plan was asked for on the slow path, or for arguments without
        # variables: other code that begins an iteration may have the same id.
        plan = plan_of(entry)
        if plan is UNKNOWN or plan.has_actions or op_name in READING:
            return self._fallback(op_name, args)
        keep(cell, cell[0], SlowPath(plan, may_pass=True))
        return self._passed(tracker, cells, plan, op_name, args)

    def _marked(self, tracker: Tracker, plan: ActionPlan) -> tuple[Any, ...] | None:
        """The attribute that marks an execution, if it needs one; None if all do not share it."""
        if not plan.claims or _internals.no_tape_records():
            return ()
        if not tracker.has_passed(plan.driver_data) or tracker.local.op_callbacks:
            return None
        marked: tuple[Any, ...] = plan.driver_data.marked
        return marked

    def _value_of(self, tracker: Tracker, cell: Cell, ctx: Any, value: Any) -> Any:
        """An argument of an operator, read if it is a variable.

        Args:
            cell: counts the readings.
        """
        entry: Any = cell[cell[0] + 1] if type(value) is _internals.VARIABLE else None
        marked = self._marked(tracker, entry.plan) if type(entry) is Inlined else None
        if marked is None:
            return _internals.value_of(value)
        vanilla, arguments = self._vanilla.fast_path, _internals.reading_of(value)
        start = _now()
        result = vanilla(ctx, "ReadVariableOp", None, *arguments, *marked)
        end = _now()
        cell[0] += 1
        self._ended(tracker, entry, start, end)
        if not tracker.depth:
            self._values.note("ReadVariableOp", arguments, result)
        return result

    def _passed(
        self,
        tracker: Tracker,
        cells: Cells,
        plan: ActionPlan,
        op_name: str,
        args: tuple[Any, ...],
    ) -> Any:
        """The way of an operator without actions that is passed variables, on the fast path.

        Raises:
            FallbackException: it has to take the slow path, where readings are seen.
        """
        readings = self._readings(cells, args, may_be_inlined=False)
        if readings is None:
            return self._fallback(op_name, args)
        marked = self._marked(tracker, plan)
        if marked is None:
            return self._fallback(op_name, args)
        return tracker, cells[op_name], marked, None, readings, args

    def _readings(
        self, cells: Cells, args: tuple[Any, ...], *, may_be_inlined: bool
    ) -> tuple[Cell, int] | None:
        """The readings of variables that the runtime does for an operator in C.

        Args:
            may_be_inlined: whether counters and timers may be around them.

        Returns:
            The cell that counts readings, and how many they are; None where anything else is done
            to one of them, one is yet to be analysed, or it is not certain how many they are.
        """
        kinds = tuple(map(type, args))
        number = self._numbers.get(kinds)
        if number is None:
            number = _internals.variables_read(args)
            if number and _internals.tell_variables(kinds):
                self._numbers[kinds] = number
        cell = cells.get("ReadVariableOp")
        if not number or cell is None:
            return None
        first = cell[0] + 1
        known = cell[first : first + number]
        if len(known) < number:
            return None
        for entry in known:
            if entry is None or entry is READ or (may_be_inlined and type(entry) is Inlined):
                continue
            if type(entry) is not ActionPlan or not entry.is_claim:
                return None
        return cell, number

    def _ended(self, tracker: Tracker, entry: Inlined, start: int, end: int) -> None:
        """Tell counters and timers of an execution."""
        # Without a lock: threads take turns where a function is called or a loop goes back, not
        # within a sum (CPython 3.11 to 3.14 with its global lock, which TensorFlow needs).
        for counter in entry.counters:
            counter.count += 1
        for timer, action in entry.timers:
            log = timer.log
            if log is not None and log.due is not None and end >= log.due:
                # The log belongs to a tool, whose code runs when it is due.
                enter = self._dispatcher.tool_code.enter
                enter(self._dispatcher.call, action, (start, end), timer.add)
                continue
            # As `add` does it, without its frame.
            timer.executions += 1
            timer.nanoseconds += end - start
            if log is not None:
                log.numbers.extend((timer.number, start, end, tracker.native))

    def _look(self, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Run an operator on the fast path, if its plan allows.

        Raises:
            FallbackException: it has to take the slow path.
        """
        tracker = LOCAL.tracker
        assert tracker is not None  # the way was found by it
        if tracker.run is not None:
            if not tracker.run.is_vanilla(op_name):
                return self._fallback(op_name, args)(ctx, op_name, name, args)
            cell = tracker.run.cell(op_name)
            return self._counted(cell, ctx, op_name, name, args)
        if tracker.depth:
            return self._outside(tracker, ctx, op_name, name, args)
        if op_name in PYTHON_FUNCTIONS:
            return call_python(tracker, lambda: self._vanilla.fast_path(ctx, op_name, name, *args))
        if op_name in NOT_OPS:
            return self._vanilla.fast_path(ctx, op_name, name, *args)
        scope = tracker.ids.scope(ctx.scope_name)
        cell = tracker.ids.cell(scope, op_name)
        if plan_of(entry_of(cell)) is UNKNOWN and any(map(_internals.is_read_by_runtime, args)):
            keep(cell, cell[0], READ_AND_UNKNOWN)
        plan = self._plan(tracker, cell, scope, op_name)
        if (
            plan is None
            or type(entry_of(cell)) is SlowPath
            or entry_of(cell) is READ_AND_UNKNOWN
            or (plan.has_actions and not plan.is_blind)
            or (plan.claims and not _internals.no_tape_records())
        ):
            return self._fallback(op_name, args)(ctx, op_name, name, args)
        self._start(tracker, plan, cell)
        result = self._counted(cell, ctx, op_name, name, args)
        tracker.ids.started.discard((id(cell), cell[0] - 1))
        if op_name in READING:
            self._values.note(op_name, args, result)
        for action in plan.after:
            self._dispatcher.run(action, [])
        return result

    def _counted(self, cell: Cell, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Run an operator vanilla, and count it if it does not fall back."""
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        cell[0] += 1
        return result

    def _outside(
        self, tracker: Tracker, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]
    ) -> Any:
        """Run an operator of a backward pass that no known operator's gradient function runs."""
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        if op_name == "AddN":
            tracker.sums[id(result)] = Sum(weakref.ref(result), list(args[0]))
        elif op_name not in _BOOKKEEPING:
            self._dispatcher.not_seen(_FOREIGN)
        return result

    def _plan(self, tracker: Tracker, cell: Cell, scope: str, kind: str) -> ActionPlan | None:
        """The plan of the next operator of a cell; None if it is yet to be analysed."""
        plan: ActionPlan | None = plan_of(entry_of(cell))
        if plan is not UNKNOWN:
            return plan
        number, generation = cell[0], tracker.generation
        plan = self._dispatcher.plan(tracker.ids.op_id(scope, kind, number))
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
        """Keep the plan of an operator as the entry that takes the shortest way."""
        if not tracker.keeps_plans(generation):
            return
        before = cell[number + 1] if number + 1 < len(cell) else UNKNOWN
        entry: Any = plan or (READ if kind in READING else None)
        if plan.is_blind:
            entry = inlined(plan, plan.steps_before, plan.steps_after) or plan
        passes_variables = before is READ_AND_UNKNOWN and type(entry) is not Inlined
        if passes_variables or (plan.has_actions and not plan.is_blind):
            entry = SlowPath(plan, not plan.has_actions and kind not in READING)
        keep(cell, number, entry)

    def _start(self, tracker: Tracker, plan: ActionPlan, cell: Cell) -> None:
        """Run the routines before an operator, which look at no tensor; once, on either path."""
        failed = retried() if plan else None
        if failed is not None:
            raise failed
        this = id(cell), cell[0]
        if this not in tracker.ids.started:
            for action in plan.before:
                self._dispatcher.run(action, [])
            tracker.ids.started.add(this)

    # -- the slow path ----------------------------------------------------

    def execute(self, vanilla: Any) -> Any:
        """The patch of ``execute.execute``."""
        originals, local, state = self._vanilla, LOCAL, STATE

        def execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None
        ) -> Any:
            tracker = local.tracker
            if tracker is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            tracker.recorded = None
            kind = op_name.decode() if isinstance(op_name, bytes) else op_name
            has_fallen = kind in tracker.fallen and not ctx.op_callbacks
            tracker.fallen.discard(kind)
            listening = not state.paused and (not tracker.stale or tracker.refresh())
            cell: Any = None
            entry: Any = UNKNOWN
            if listening:
                try:
                    cell = tracker.cells[ctx.scope_name][kind]
                    entry = cell[cell[0] + 1]
                except LookupError:
                    pass
                except AttributeError:
                    # No context; which is TensorFlow's to refuse.
                    return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
                if entry is None:
                    try:
                        outputs = originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
                    except tf.errors.OpError as error:
                        raise (_internals.named(error, name) if has_fallen else error) from None
                    cell[0] += 1
                    return outputs
            elif tracker.marking is None:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            if entry is UNKNOWN and (kind in NOT_OPS or _internals.op_def_of(kind) is None):
                tracker.ids.enter_function(kind)
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            for value in inputs:
                if not isinstance(value, _internals.EagerTensor):
                    self._dispatcher.not_seen(_NO_TENSORS)
                    return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            request = OpRequest(kind, num_outputs, attrs, ctx, name, originals, has_fallen)
            if not listening:
                return self._in_replacement(tracker, request, list(inputs))
            if tracker.run is not None:
                return self._backward(tracker, entry, request, list(inputs))
            if tracker.depth:
                return originals.execute(op_name, num_outputs, inputs, attrs, ctx, name)
            return self._forward(tracker, cell, entry, request, list(inputs))

        self._hook = named_as(vanilla, execute)
        return execute

    def _in_replacement(self, tracker: Tracker, request: OpRequest, inputs: list[Any]) -> Any:
        """Run an operator of a replacement: its record carries the replaced operator's mark."""
        outputs = request.execute(inputs)
        if not _internals.no_tape_records():
            request.record(inputs, outputs, tracker.marking)
            tracker.note_recorded(outputs)
        return outputs

    def _backward(self, tracker: Tracker, entry: Any, request: OpRequest, inputs: list[Any]) -> Any:
        """Run a backward operator."""
        run = tracker.run
        assert run is not None
        if type(entry) is not SlowPath and run.is_vanilla(request.kind):
            outputs = request.execute(inputs)
            run.cell(request.kind)[0] += 1
            return outputs
        outputs = list(run.execute(request.kind, inputs, request.execute_recorded))
        tracker.note_recorded(outputs)
        return outputs

    def _forward(
        self, tracker: Tracker, cell: Cell, entry: Any, request: OpRequest, inputs: list[Any]
    ) -> Any:
        """Run a forward operator."""
        failed = retried() if sys.exception() is not None else None
        if failed is not None:
            raise failed
        kind, name_scope = request.kind, request.context.scope_name
        plan: ActionPlan | None
        if type(entry) is SlowPath:
            plan = entry.plan
        else:
            scope = tracker.ids.scope(name_scope)
            cell = tracker.ids.cell(scope, kind)
            plan = self._plan(tracker, cell, scope, kind)
        number, generation = cell[0], tracker.generation
        blind = plan if plan is not None and plan.is_blind else None
        if blind is not None:
            self._start(tracker, blind, cell)
        cell[0] = number + 1
        tracker.ids.started.discard((id(cell), number))
        tape = not _internals.no_tape_records()
        is_recorded = tape
        if plan is None:
            scope = tracker.ids.scope(name_scope)
            op_id = tracker.ids.op_id(scope, kind, number)
            outputs, new = self._executor.run_analysed(tracker, op_id, request, inputs, scope)
            self._keep(tracker, cell, number, kind, new, generation)
        elif plan.has_actions and blind is None:
            outputs = self._executor.run_planned(tracker, plan, request, inputs)
        elif plan.claims and tape:
            outputs = self._executor.run_claimed(tracker, plan, request, inputs)
        else:
            outputs = request.execute(inputs)
            is_recorded = False
        if blind is not None:
            for action in blind.after:
                self._dispatcher.run(action, [])
        if kind in READING and outputs:
            self._values.note(kind, inputs, outputs[0])
        if is_recorded:
            tracker.note_recorded(outputs)
        return outputs


def _is_of_stateless(error: Exception, op_name: str) -> bool:
    """Whether an error is of TensorFlow's runtime, about an operator that has no state."""
    op_def = _internals.op_def_of(op_name)
    return isinstance(error, tf.errors.OpError) and op_def is not None and not op_def.is_stateful
