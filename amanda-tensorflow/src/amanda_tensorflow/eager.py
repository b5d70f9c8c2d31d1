"""The driver for TensorFlow's eager execution.

Every operator that Python runs at once passes one of two places: the fast path
in C, and the slower ``execute`` that the fast path falls back to. The driver
looks at the first, lets operators of no interest pass, and makes the others fall
back: the second place then has their inputs and attributes in one form, whatever
the caller passed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

import amanda
from amanda._import_hook import Watch
from amanda._patching import PatchSet
from amanda.action import Action, ActionPlan
from amanda.namespace import Namespace
from amanda_tensorflow import _internals, records
from amanda_tensorflow.eager_backward import Gradients, Mark, Sum
from amanda_tensorflow.eager_execution import Executor, Request, Vanilla
from amanda_tensorflow.eager_ids import (
    LOCAL,
    UNKNOWN,
    Cell,
    Tracker,
    keep_plan,
    muted,
    plan_in,
)
from amanda_tensorflow.eager_routines import RoutineCall, is_tensor, substitute
from amanda_tensorflow.eager_values import READING, Values
from amanda_tensorflow.ops import is_op
from amanda_tensorflow.plugin import TensorFlowEagerDriver

_KERAS = ("keras", "tf_keras")
_BOOKKEEPING = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Operators that a backward pass runs outside of gradient functions."""
_FOREIGN = (
    "backward operators whose forward ran outside of the scope, was itself a backward "
    "operator, or is hidden in a function"
)
_LEAF_SUMS = "sums of gradients of variables and other leaves"
_NO_TENSORS = "operators called with inputs that are no tensors"


class EagerDriver(TensorFlowEagerDriver):
    """Instruments the operators that TensorFlow runs at once."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._patches = PatchSet()
        self._values = Values()
        self._gradients = Gradients(dispatcher)
        self._trackers: weakref.WeakSet[Tracker] = weakref.WeakSet()
        self._watch: Watch | None = None
        self._vanilla: Any = None

    @property
    def namespace(self) -> Namespace:
        """``tensorflow/<major>.<minor>/eager``."""
        return Namespace(f"tensorflow/{'.'.join(tf.__version__.split('.')[:2])}/eager")

    # -- life cycle -------------------------------------------------------

    def attach(self) -> None:
        """Patch the two places that all operators pass, and those that tapes pass.

        Raises:
            CapabilityError: this TensorFlow lacks a private symbol; it is named.
        """
        _internals.require("eager")
        records.install()
        try:
            self._patch()
        except BaseException:
            self.detach()
            raise

    def _patch(self) -> None:
        patches = self._patches
        self._vanilla = Vanilla(
            _internals.PYWRAP.TFE_Py_FastPathExecute,
            _internals.EXECUTE.execute,
            _internals.EXECUTE.record_gradient,
        )
        patches.wrap(_internals.PYWRAP, "TFE_Py_FastPathExecute", self._fast_path)
        patches.wrap(_internals.EXECUTE, "execute", self._execute)
        patches.wrap(_internals.EXECUTE, "record_gradient", _record_gradient)
        patches.wrap(_internals.RECORD, "record_operation", self._record_operation)
        patches.wrap(_internals.IMPERATIVE_GRAD, "imperative_grad", self._imperative_grad)
        records.EAGER.run = self._gradients.run
        missing = [name for name in _KERAS if not self._patch_keras(name)]
        if missing:
            self._watch = Watch(missing, self._patch_keras)

    def _patch_keras(self, name: str) -> bool:
        """Notice the calls of layers, if that Keras is imported."""
        layers = getattr(sys.modules.get(name), "layers", None)
        layer = getattr(layers, "Layer", None)
        if layer is not None:
            self._patches.wrap(layer, "__call__", _layer_call)
        return name in sys.modules

    def detach(self) -> None:
        """Undo every patch."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if records.EAGER.run == self._gradients.run:
            records.EAGER.run = None
        self._patches.undo()
        self._values.clear()

    def enter_thread(self) -> None:
        """Start to see the current thread's operators."""
        if LOCAL.tracker is None:
            tracker = LOCAL.tracker = Tracker(self.dispatcher)
            tracker.executor = Executor(self.dispatcher, tracker, self._values)
            self._trackers.add(tracker)
        LOCAL.tracker.replan()

    def exit_thread(self) -> None:
        """Stop to see them."""
        tracker, LOCAL.tracker = LOCAL.tracker, None
        if tracker is not None:
            tracker.clear()

    def invalidate(self) -> None:
        """Make all threads ask for their plans again."""
        for tracker in tuple(self._trackers):
            tracker.replan()

    def new_iteration(self) -> None:
        """Restart the operator ids' counters of the current thread."""
        if LOCAL.tracker is not None:
            LOCAL.tracker.new_iteration()

    # -- routines ---------------------------------------------------------

    def vanilla(self) -> AbstractContextManager[None]:
        """Mute the current thread's tracker."""
        return muted()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        """``stop_recording``, of all tapes and accumulators."""
        return _internals.stop_recording()

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        """Both of the above in one."""
        return RoutineCall(isolated)

    def is_tensor(self, value: Any) -> bool:
        """See :func:`amanda_tensorflow.eager_routines.is_tensor`."""
        return is_tensor(value)

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """See :func:`amanda_tensorflow.eager_routines.substitute`."""
        return substitute(old, new, action)

    # -- operators: the fast path -----------------------------------------

    def _fast_path(self, vanilla: Any) -> Any:
        look = self._look
        local = LOCAL

        def TFE_Py_FastPathExecute(ctx: Any, op_name: str, name: Any, *args: Any) -> Any:  # noqa: N802
            tracker = local.tracker
            if tracker is None:
                return vanilla(ctx, op_name, name, *args)
            if tracker.stale and not tracker.refresh():
                if tracker.marking is not None and not _internals.no_tape_records():
                    raise _internals.FallbackException(op_name)
                return vanilla(ctx, op_name, name, *args)
            try:
                cell = tracker.cells[ctx.scope_name][op_name]
                plan = cell[cell[0] + 1]
            except LookupError:
                return look(tracker, ctx, op_name, name, args)
            if plan is not None:
                return look(tracker, ctx, op_name, name, args)
            result = vanilla(ctx, op_name, name, *args)
            cell[0] += 1
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
                raise _internals.FallbackException(op_name)
            cell = tracker.run.cell(op_name)
            return self._counted(cell, ctx, op_name, name, args)
        if tracker.depth:
            return self._outside(tracker, ctx, op_name, name, args)
        if not is_op(op_name):
            return self._vanilla.fast_path(ctx, op_name, name, *args)
        scope = ctx.scope_name or ""
        cell = tracker.cell(scope, op_name)
        plan = self._plan(tracker, cell, scope, op_name)
        if plan is None or plan.has_actions and not plan.is_blind:
            raise _internals.FallbackException(op_name)
        if plan.claims and not _internals.no_tape_records():
            raise _internals.FallbackException(op_name)
        self._start(tracker, plan, cell)
        result = self._counted(cell, ctx, op_name, name, args)
        tracker.started = None
        if op_name in READING:
            self._values.note(op_name, args[0], result)
        for action in plan.after:
            self.dispatcher.run(action, [])
        return result

    def _counted(
        self, cell: Cell, ctx: Any, op_name: str, name: Any, args: tuple[Any, ...]
    ) -> Any:
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
            self.dispatcher.not_seen(_FOREIGN)
        return result

    def _plan(self, tracker: Tracker, cell: Cell, scope: str, kind: str) -> ActionPlan | None:
        """The plan of the next operator of a type; None if it is yet to be analysed."""
        plan: ActionPlan | None = plan_in(cell)
        if plan is not UNKNOWN:
            return plan
        number, generation = cell[0], tracker.generation
        plan = self.dispatcher.plan(tracker.op_id(scope, kind, number))
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
        if tracker.keeps_plans(generation):
            kept = plan if plan or kind in READING else None
            keep_plan(cell, number + 1, kept)

    def _start(self, tracker: Tracker, plan: ActionPlan, cell: Cell) -> None:
        """Run the routines before an operator that look at no tensor, once."""
        if not plan.before:
            return
        if tracker.started != (cell, cell[0]):
            for action in plan.before:
                self.dispatcher.run(action, [])
        tracker.started = (cell, cell[0])

    # -- operators: the slow path -----------------------------------------

    def _execute(self, vanilla: Any) -> Any:
        def execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None
        ) -> Any:
            tracker = LOCAL.tracker
            if tracker is None:
                return vanilla(op_name, num_outputs, inputs, attrs, ctx, name)
            tracker.recorded = None
            kind = op_name.decode() if isinstance(op_name, bytes) else op_name
            listening = not tracker.stale or tracker.refresh()
            if not listening and tracker.marking is None:
                return vanilla(op_name, num_outputs, inputs, attrs, ctx, name)
            if not is_op(kind) or _internals.op_def_of(kind) is None:
                return vanilla(op_name, num_outputs, inputs, attrs, ctx, name)
            if not all(isinstance(value, _internals.EagerTensor) for value in inputs):
                self.dispatcher.not_seen(_NO_TENSORS)
                return vanilla(op_name, num_outputs, inputs, attrs, ctx, name)
            request = Request(kind, num_outputs, attrs, ctx, name, self._vanilla)
            if not listening:
                return self._in_replacement(tracker, request, list(inputs))
            if tracker.run is not None:
                return self._backward(tracker, request, list(inputs))
            if tracker.depth:
                return vanilla(op_name, num_outputs, inputs, attrs, ctx, name)
            return self._forward(tracker, request, list(inputs))

        return execute

    def _in_replacement(self, tracker: Tracker, request: Request, inputs: list[Any]) -> Any:
        """An operator of the function that replaces one: its gradient is the replaced one's."""
        outputs = request.execute(inputs)
        if not _internals.no_tape_records():
            request.record(inputs, outputs, tracker.marking)
            tracker.note_recorded(outputs)
        return outputs

    def _backward(self, tracker: Tracker, request: Request, inputs: list[Any]) -> Any:
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

    def _forward(self, tracker: Tracker, request: Request, inputs: list[Any]) -> Any:
        kind = request.kind
        scope = request.context.scope_name or ""
        cell = tracker.cell(scope, kind)
        plan = self._plan(tracker, cell, scope, kind)
        number, generation = cell[0], tracker.generation
        executor = tracker.executor
        assert executor is not None
        tape = not _internals.no_tape_records()
        if plan is not None and plan.is_blind:
            self._start(tracker, plan, cell)
        cell[0] = number + 1
        tracker.started = None
        recorded = False
        if plan is None or plan.has_actions and not plan.is_blind:
            op_id = tracker.op_id(scope, kind, number)
            outputs, new = executor.run(plan, op_id, request, inputs, scope)
            recorded = True
            if plan is None:
                self._keep(tracker, cell, number, kind, new, generation)
        elif plan.claims and tape:
            outputs = executor.run_claimed(plan, request, inputs)
            recorded = True
        else:
            outputs = request.execute(inputs)
        if plan is not None and plan.is_blind:
            for action in plan.after:
                self.dispatcher.run(action, [])
        if kind in READING and outputs:
            self._values.note(kind, inputs[0], outputs[0])
        if recorded:
            tracker.note_recorded(outputs)
        return outputs

    # -- tapes ------------------------------------------------------------

    def _record_operation(self, vanilla: Any) -> Any:
        """A function with a custom gradient ends with a record for the outputs of Identities."""

        def record_operation(
            op_type: Any,
            output_tensors: Any,
            input_tensors: Any,
            backward_function: Any,
            forward_function: Any = None,
        ) -> Any:
            tracker = LOCAL.tracker
            mark = None
            if tracker is not None and output_tensors:
                mark = tracker.owner_of(output_tensors[0])
            if mark is not None:
                backward_function = self._owned(mark, len(input_tensors), backward_function)
            return vanilla(
                op_type, output_tensors, input_tensors, backward_function, forward_function
            )

        return record_operation

    def _owned(self, mark: Mark, inputs: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """A custom gradient function, whose operators are backward operators of `mark`'s."""
        owner = mark.with_inputs(inputs)
        run = self._gradients.run

        def backward_function(*out_grads: Any) -> Any:
            return run(owner, lambda gradients: function(*gradients), out_grads)

        return backward_function

    def _imperative_grad(self, vanilla: Any) -> Any:
        """Every backward pass of eager execution comes through here."""

        def imperative_grad(*args: Any, **kwargs: Any) -> Any:
            tracker = LOCAL.tracker
            if tracker is None or tracker.muted:
                return vanilla(*args, **kwargs)
            outer = tracker.enter_backward()
            try:
                return vanilla(*args, **kwargs)
            finally:
                left = tracker.exit_backward(outer)
                if left:
                    self.dispatcher.not_seen(_LEAF_SUMS, left)

        return imperative_grad


def _record_gradient(vanilla: Any) -> Any:
    """What the driver has recorded itself is not recorded twice."""

    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> Any:
        tracker = LOCAL.tracker
        if tracker is not None and tracker.recorded is not None and tracker.is_recorded(outputs):
            return None
        return vanilla(op_name, inputs, attrs, outputs)

    return record_gradient


def _layer_call(vanilla: Any) -> Any:
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        tracker = LOCAL.tracker
        if tracker is None or tracker.muted:
            return vanilla(layer, *args, **kwargs)
        tracker.enter_layer(layer)
        try:
            return vanilla(layer, *args, **kwargs)
        finally:
            tracker.exit_layer()

    return __call__


def self_test() -> list[str]:
    """Run a tiny computation under a tool that masks its weight; what went wrong, if anything."""
    seen: list[str] = []
    mask = tf.constant([[1.0, 0.0]])
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            seen.append(context.get_op_id())
            context.insert_before_op(lambda weight: weight * mask, inputs=[1])

    tool.add_inst_for_op(analyse)
    x, weight = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])
    mask = tf.transpose(mask)
    with amanda.apply(tool, drivers=[TensorFlowEagerDriver]), tf.GradientTape() as tape:
        tape.watch([x, weight])
        y = tf.matmul(x, weight)
    dx, dw = tape.gradient(y, [x, weight])
    problems = [] if seen == ["/MatMul:0"] else [f"operators seen: {seen}, not /MatMul:0"]
    for what, got, wanted in (("y", y, [[3.0]]), ("dx", dx, [[3.0, 0.0]]), ("dw", dw, [[1.0], [2.0]])):
        if got.numpy().tolist() != wanted:
            problems.append(f"{what} is {got.numpy().tolist()}, not {wanted}")
    return problems
