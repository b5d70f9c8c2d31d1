"""The fast path of eager operators, ``TFE_Py_FastPathExecute`` in C, and who does not take it.

TensorFlow's generated functions first try the fast path. It takes arguments of any kind. If it
raises ``_FallbackException``, the function converts its arguments to tensors and calls the slow
path, ``execute.execute``::

    gen_math_ops.mat_mul
        fast path        operators whose routines and arguments do not ask for more
        slow path        all others

The patch lets an operator run on the fast path, and counts it, or raises that exception. The
reasons are those of :class:`~amanda_tensorflow.eager.plan_cache.Reason`, found in this order by
:meth:`FastPath.decide`, which returns one of:

* a cell: the operator runs vanilla and is counted there;
* a tuple: the tracker; the cell; the attribute by which the execution is marked, or an empty tuple;
  the entry;
* a :data:`Runner`.

=============  ==================================================================================
reason         found by
=============  ==================================================================================
`REPLACEMENT`  the thread: a replacement runs, and tapes record
`ANALYSIS`     no entry, or :data:`~amanda_tensorflow.eager.plan_cache.UNKNOWN`
`ROUTINES`     the entry, the types of the arguments, and whether tapes record
`READINGS`     the arguments: the runtime reads a variable among them unseen, in C
`MARK`         the entry, and whether tapes record
=============  ==================================================================================
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.op_request import Vanilla
from amanda_tensorflow.eager.plan_cache import PLAIN, UNKNOWN, Cell, OperatorEntry, Reason, entry_of
from amanda_tensorflow.eager.slow_path import SlowPath
from amanda_tensorflow.eager.tape_marks import Sum
from amanda_tensorflow.eager.tool_errors import call_python, raise_if_retried
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker
from amanda_tensorflow.eager.variable_readings import READING, VariableValues
from amanda_tensorflow.operators.types import CONTROL_FLOW, NOT_OPS, PYTHON_FUNCTIONS

_BOOKKEEPING = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Operators that a backward pass itself runs, outside of gradient functions."""
_FOREIGN = (
    "backward operators whose forward ran outside of the scope, was itself a backward "
    "operator, or is hidden in a function"
)
_NOT_CONVERTED = "operators whose inputs only TensorFlow's runtime can convert"
_RESOURCE = tf.resource.as_datatype_enum
_inputs_of = _internals.INPUT_COUNTS
_no_tape_records = _internals.no_tape_records
_only_tensors = _internals.TENSORS_ONLY.issuperset
_no_variables, _is_read = _internals.NO_VARIABLES.issuperset, _internals.is_read_by_runtime

Args = tuple[Any, ...]
Runner = Callable[[Any, str, Any, Args], Any]
"""Runs an operator: it is given the arguments of the fast path."""


class FastPath:
    """The patch of ``TFE_Py_FastPathExecute``.

    Args:
        vanilla: TensorFlow's own functions.
        values: is told of the tensors that are read from variables.
        slow_path: the patch that has to be in place when an operator falls back.
    """

    def __init__(
        self, dispatcher: Dispatcher, vanilla: Vanilla, values: VariableValues, slow_path: SlowPath
    ) -> None:
        self._dispatcher = dispatcher
        self._vanilla = vanilla
        self._values = values
        self._slow_path = slow_path
        self._uncounted: Cell = [0]

    # -- the patch --------------------------------------------------------

    def patch(self, vanilla: Any) -> Any:
        """Return the patch of ``TFE_Py_FastPathExecute``."""
        decide, ended, note = self.decide, self._ended, self._values.note
        now, counted, exception = time.perf_counter_ns, list, sys.exception

        def TFE_Py_FastPathExecute(ctx: Any, op_name: str, name: Any, *args: Any) -> Any:  # noqa: N802
            # At each operator the runtime finds the lines of all running functions, longer the more
            # code lies before (2.16 to 2.21): another function decides, and usual cases come first.
            tracker = LOCAL.tracker
            if tracker is None:
                return vanilla(ctx, op_name, name, *args)
            decision = decide(tracker, tracker.cells, ctx, op_name, args)
            if type(decision) is counted:
                result = vanilla(ctx, op_name, name, *args)
                decision[0] += 1
                return result
            if type(decision) is not tuple:
                return decision(ctx, op_name, name, args)
            _, cell, marked, entry = decision
            # The runtime ignores attributes that the operator does not declare.
            if not entry.is_inlined:
                result = vanilla(ctx, op_name, name, *args, *marked)
                cell[0] += 1
            else:
                if exception() is not None:
                    raise_if_retried()
                start = now()
                result = vanilla(ctx, op_name, name, *args, *marked)
                end = now()
                cell[0] += 1
                ended(entry, start, end)
            if entry.is_noted:
                note(op_name, args, result)
                if marked and op_name == "Identity":
                    tracker.note_owner(result, marked[1])
            return result

        self._patched = TFE_Py_FastPathExecute
        return TFE_Py_FastPathExecute

    def _ended(self, entry: OperatorEntry, start: int, end: int) -> None:
        """Tell counters and timers of an execution."""
        # Without a lock: threads take turns where a function is called or a loop goes back, not
        # within a sum (CPython 3.11 to 3.14 with its global lock, which TensorFlow needs).
        for counter in entry.counters:
            counter.count += 1
        for timer, action in entry.timers:
            log = timer.log
            if log is None or log.due is None or end < log.due:
                timer.add(start, end)
            else:
                # The log belongs to a tool, whose code runs when it is due.
                enter = self._dispatcher.tool_code.enter
                enter(self._dispatcher.call, action, (start, end), timer.add)

    # -- the decision -----------------------------------------------------

    def decide(self, tracker: EagerTracker, scopes: Any, ctx: Any, op_name: str, args: Args) -> Any:
        """Decide how an operator runs; for what is returned see the module.

        Args:
            scopes: the cells by name scope.
            args: the arguments of the fast path: inputs, then names and values of attributes.

        Raises:
            FallbackException: it has to take the slow path.
        """
        # A tool's code runs vanilla, whichever driver has called it.
        if STATE.paused or (tracker.stale and not tracker.refresh()):
            return self._replacing(tracker, op_name, args)
        try:
            cell = scopes[tracker.local.scope_name][op_name]
            entry = cell[cell[0] + 1]
        except LookupError:
            return self._look_up(tracker, ctx, op_name, args)
        if entry is UNKNOWN:
            return self._look_up(tracker, ctx, op_name, args)
        if entry.reason is not None:
            return functools.partial(self._with_routines, tracker, cell, entry)
        # Attributes follow the inputs.
        inputs = args[: _inputs_of[op_name]]
        if not _no_variables(map(type, inputs)) and any(map(_is_read, inputs)):
            return functools.partial(self._on_values, tracker)
        if entry is PLAIN:
            return cell
        marked = () if _no_tape_records() else entry.marked
        if marked is None or (marked and tracker.local.op_callbacks):
            return self._with_mark(tracker, cell, entry, op_name, args)
        return tracker, cell, marked, entry

    def _replacing(self, tracker: EagerTracker, op_name: str, args: Args) -> Any:
        """Decide on an operator of a tool's code, perhaps of a replacement; see :meth:`decide`."""
        if tracker.marking is None or _internals.no_tape_records():
            return self._uncounted
        return self._fall_back(Reason.REPLACEMENT, tracker, op_name, args)

    def _look_up(self, tracker: EagerTracker, ctx: Any, op_name: str, args: Args) -> Any:
        """Decide on an operator that has no entry where it was looked for; see :meth:`decide`."""
        run = tracker.run
        if run is not None:
            if run.is_vanilla(op_name):
                return run.cell(op_name)
            return self._fall_back(Reason.ANALYSIS, tracker, op_name, args)
        if tracker.depth:
            return functools.partial(self._outside, tracker)
        if op_name in PYTHON_FUNCTIONS:
            return functools.partial(self._call_python, tracker)
        if op_name in CONTROL_FLOW:
            self._dispatcher.not_seen(f"functions that {op_name} runs in TensorFlow's threads")
        if op_name in NOT_OPS:
            return self._uncounted
        # Outside of layers ids depend on the code that runs, beside the name scope.
        scope = tracker.local.scope_name
        cells = tracker.ids.cells.get(tracker.ids.scope(scope), {})
        if op_name in cells and entry_of(cells[op_name]) is not UNKNOWN:
            return self.decide(tracker, {scope: cells}, ctx, op_name, args)
        return self._fall_back(Reason.ANALYSIS, tracker, op_name, args)

    def _with_mark(
        self, tracker: EagerTracker, cell: Cell, entry: OperatorEntry, op_name: str, args: Args
    ) -> Any:
        """Decide on an operator that tapes record under a mark of ours, which its executions share
        from the second backward pass on; see :meth:`decide`.

        TensorFlow's callbacks are told of attributes: they are not shown this one.
        """
        if tracker.local.op_callbacks or not tracker.has_passed(entry.plan.driver_data):
            return self._fall_back(Reason.MARK, tracker, op_name, args)
        entry.marked = entry.plan.driver_data.marked
        return tracker, cell, entry.marked, entry

    # -- the slow path ----------------------------------------------------

    def _fall_back(
        self, reason: Reason, tracker: EagerTracker, op_name: str, args: Sequence[Any]
    ) -> Runner:
        """Let an operator take the slow path.

        Returns:
            What runs the operator, if the slow path would not convert its arguments alike.

        Raises:
            FallbackException: makes it take the slow path, with our patch in place.
        """
        self._slow_path.put_in_place()
        if _internals.takes_fast_path(op_name, args):
            tracker.sent_to_slow_path.add(op_name)
            if not _internals.needs_no_conversion(op_name, args):
                return functools.partial(self._converted, tracker)
        raise _internals.FallbackException(f"{op_name}: {reason.value}")

    def _converted(
        self,
        tracker: EagerTracker,
        ctx: Any,
        op_name: str,
        name: Any,
        args: Args,
        values: Args = (),
    ) -> Any:
        """Run an operator on the slow path, which may not convert arguments as the fast path does.

        It refuses some that the fast path takes, as an integer beside a variable, and what neither
        takes it refuses by another error.

        Args:
            values: what :func:`_read_variables` has given; it is called otherwise.
        """
        function, arguments = _slow_call(op_name)
        names = list(arguments)
        for value, read in zip(args, values or _read_variables(op_name, args), strict=True):
            found = next((name for name in names if arguments[name] is value), None)
            if read is not value and found is not None:
                names.remove(found)
                arguments[found] = read
        failed: list[Exception] = []
        try:
            return function(**arguments)
        except Exception as error:
            if op_name not in tracker.sent_to_slow_path:
                if not _is_of_stateless(error, op_name):
                    raise
                failed.append(error)
        tracker.sent_to_slow_path.discard(op_name)
        # An operator without state may run twice: the error is that of the fast path, if it is one.
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        if failed:
            raise failed.pop()
        self._dispatcher.not_seen(_NOT_CONVERTED)
        return result

    def _on_values(
        self, tracker: EagerTracker, ctx: Any, op_name: str, name: Any, args: Args
    ) -> Any:
        """Run an operator on the values of the variables that it is passed, which operators read.

        The runtime would read them unseen, in C.
        """
        values = _read_variables(op_name, args)
        if any(map(_is_read, values)):
            leave = self._fall_back(Reason.READINGS, tracker, op_name, args)
            return leave(ctx, op_name, name, args)
        try:
            return self._patched(ctx, op_name, name, *values)
        except _internals.FallbackException:
            # Tapes record it under a mark of its own, or a tool at a reading has changed its plan.
            return self._converted(tracker, ctx, op_name, name, args, values)

    # -- ways to run an operator ------------------------------------------

    def _with_routines(
        self,
        tracker: EagerTracker,
        cell: Cell,
        entry: OperatorEntry,
        ctx: Any,
        op_name: str,
        name: Any,
        args: Args,
    ) -> Any:
        """Run an operator between its routines.

        Raises:
            FallbackException: not all inputs are tensors, or tapes record it under a mark of ours.
        """
        count, run_all, plan = _inputs_of[op_name], self._dispatcher.run_all, entry.plan
        inputs = list(args[:count])
        is_marked = entry.has_mark and not _no_tape_records()
        if is_marked or not entry.stays or not _only_tensors(map(type, inputs)):
            leave = self._fall_back(Reason.ROUTINES, tracker, op_name, args)
            return leave(ctx, op_name, name, args)
        if sys.exception() is not None:
            raise_if_retried()
        cell[0] += 1
        values = run_all(plan.before, inputs) if plan.before else inputs
        try:
            result = self._vanilla.fast_path(ctx, op_name, name, *values, *args[count:])
        except _internals.FallbackException:
            cell[0] -= 1
            return self._refused(tracker, plan, values, op_name)
        outputs = result if type(result) is list else [] if result is None else [result]
        if plan.after:
            outputs = run_all(plan.after, outputs)
        if op_name in READING:
            self._values.note(op_name, inputs, outputs[0])
        return outputs if type(result) is list else outputs[0] if outputs else None

    def _refused(
        self, tracker: EagerTracker, plan: ActionPlan, values: list[Any], op_name: str
    ) -> Any:
        """Run an operator on the slow path, which takes attributes that the fast path has refused,
        as a dtype of NumPy. The routines before it have given `values`."""
        self._slow_path.put_in_place()
        function, arguments = _slow_call(op_name)
        tracker.begun = plan, values
        try:
            return function(**arguments)
        finally:
            tracker.begun = None

    def _outside(self, tracker: EagerTracker, ctx: Any, op_name: str, name: Any, args: Args) -> Any:
        """Run an operator of a backward pass that no known operator's gradient function runs."""
        result = self._vanilla.fast_path(ctx, op_name, name, *args)
        if op_name == "AddN":
            tracker.sums[id(result)] = Sum(weakref.ref(result), list(args[0]))
        elif op_name not in _BOOKKEEPING:
            self._dispatcher.not_seen(_FOREIGN)
        return result

    def _call_python(
        self, tracker: EagerTracker, ctx: Any, op_name: str, name: Any, args: Args
    ) -> Any:
        """Run an operator that calls a Python function."""
        call = functools.partial(self._vanilla.fast_path, ctx, op_name, name, *args)
        return call_python(tracker, call)


def _slow_call(op_name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The slow path of the function of TensorFlow that asks for the fast path, and its arguments.

    Raises:
        FallbackException: the function is none of the generated ones.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    call = None if frame is None else _internals.slow_path_of(frame)
    if call is None:
        raise _internals.FallbackException(op_name)
    return call


def _read_variables(op_name: str, args: Args) -> tuple[Any, ...]:
    """The arguments of the fast path with the values of the variables among the inputs, read in the
    order of the fast path, which finds the same types for them."""
    declared, values = _internals.DECLARED[op_name], list(args)
    for position, value in enumerate(args[: _inputs_of[op_name]]):
        if declared.fixed.get(position) == _RESOURCE:
            continue
        if position not in declared.lists:
            values[position] = _internals.value_of(value)
        elif isinstance(value, (list, tuple)) or _internals.is_sequence(value):
            values[position] = [_internals.value_of(item) for item in value]
    return tuple(values)


def _is_of_stateless(error: Exception, op_name: str) -> bool:
    """True if an error is of TensorFlow's runtime, about an operator that has no state."""
    op_def = _internals.op_def_of(op_name)
    return isinstance(error, tf.errors.OpError) and op_def is not None and not op_def.is_stateful
