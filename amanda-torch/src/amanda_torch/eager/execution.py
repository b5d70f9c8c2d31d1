"""Runs one execution of an operator that a tool acts on or has yet to analyse.

The interceptor keeps a :class:`KnownOp` for each operator that a thread has run. It calls
:meth:`Executor.run_described` while analyses are pending, and then::

    result = executor.run_known(known, func, args, kwargs)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import OpExecution
from amanda.engine.plan import EMPTY_PLAN, ActionPlan
from amanda.errors import ToolTypeError
from amanda.inline.steps import Around, joined
from amanda_torch import _internals
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.executions import Execution
from amanda_torch.autograd.gradient_graphs import NO_GRADIENTS, KnownGradients
from amanda_torch.autograd.substitution import write_back
from amanda_torch.eager import records
from amanda_torch.eager.keras_layers import with_values
from amanda_torch.eager.operation import Operation, made_leaf
from amanda_torch.eager.phases import phase_of
from amanda_torch.operators.calls import (
    TorchCall,
    is_no_output,
    outputs_of,
    tensors_of,
    with_tensors,
)
from amanda_torch.operators.layouts import NO_LAYOUT, Layout
from amanda_torch.routines import TOOL_CODE, RoutineDispatcher, call_joined, until_result

if TYPE_CHECKING:
    from amanda_torch.eager.op_ids import Tracker


_SWALLOWING = frozenset(
    """add sub mul div true_divide floor_divide remainder matmul pow eq ne lt le gt ge rsub rdiv
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift""".split()
)
"""The operators that ``a + b`` and the like call: PyTorch turns a TypeError in them into
NotImplemented, and Python that into a TypeError about unsupported operands."""


def unswallowed(error: BaseException, name: str) -> BaseException:
    """Return an exception; for a tool's TypeError, which ``a + b`` would replace, another type."""
    if not isinstance(error, TypeError):
        return error
    notes = getattr(error, "__notes__", ())
    swallowed = name.startswith("__") or name.rstrip("_") in _SWALLOWING
    if not swallowed or not any(note.startswith("amanda:") for note in notes):
        return error
    raised = ToolTypeError(f"TypeError: {error}")
    raised.__cause__ = error
    for note in notes:
        raised.add_note(note)
    return raised


Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
_mode_depth = _internals.mode_depth

_FORMS = 16
"""Forms of call for which a layout is made; an operator with more is described at each call."""


class KnownOp(records.KnownFields):
    """Facts that a thread has learned about one operator, under one plan.

    Attributes:
        plan: the operator's actions; None while analyses of it are pending.
        around: :attr:`ActionPlan.around` of the plan.
        is_joined: True if the steps after the operator get its inputs, too.
        layout: layout of the inputs, in the form of the last call.
        forms: number of layouts made so far.
    """

    __slots__ = ("around", "forms", "is_joined", "layout", "plan")

    plan: Any
    around: Around

    def __init__(self, op_id: str, name: str, executor: Executor, plan: ActionPlan | None) -> None:
        self.op_id = op_id
        self.name = name
        self.executor = executor
        self.iterations = executor.claimer.iterations
        self.gradients = executor.new_gradients(op_id)
        self.layout = NO_LAYOUT
        self.form = None
        self.forms = 0
        self.plan = plan
        if plan is not None:
            self.follow(plan)

    def follow(self, plan: ActionPlan) -> None:
        """Set the plan."""
        self.plan = plan
        self.claims = plan.claims
        self.around = plan.around
        self.steps_before = self.steps_after = None
        self.is_joined = False
        if plan.around is not Around.ALL:
            steps = plan.steps_before, plan.steps_after
            pairs = joined(*steps) if plan.around is Around.TENSORS else None
            self.is_joined = pairs is not None
            self.steps_before, self.steps_after = pairs or steps


class Executor:
    """Runs the operators of one thread that have actions or pending analyses.

    Attributes:
        claimer: finds the backward operators of the operators that it runs.
    """

    def __init__(self, dispatcher: RoutineDispatcher, tracker: Tracker) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self.claimer = Claimer(dispatcher)

    # -- by its plan ------------------------------------------------------

    def run_known(
        self, known: KnownOp, func: Any, args: Args, kwargs: Kwargs, key: Any = None
    ) -> Any:
        """Run an operator, and the routines around it, without a description of its call.

        If a description is needed, :meth:`run_described` runs the operator.
        """
        plan, layout = known.plan, known.layout
        values: Any = None
        is_blind = known.around <= Around.BLIND
        if not is_blind:
            if _internals.is_plain() and not (layout.is_in_place and _is_grad_enabled()):
                values = layout.values(func, args, kwargs, key)
            if values is None:
                return self.run_described(known, func, args, kwargs, key)
        try:
            if is_blind or (known.is_joined and not layout.writes):
                return self._run_watched(known, func, args, kwargs, key, values)
            if plan.before:
                stopped = TOOL_CODE.enter(until_result, plan.before, values, isolated=True)
                if stopped:
                    return self.run_described(known, func, args, kwargs, key, stopped)
            result = self._run_claimed(known, func, args, kwargs, key)
            if plan.after:
                outputs = outputs_of(result, values, layout.written)
                stopped = TOOL_CODE.enter(until_result, plan.after, outputs, isolated=True)
                if stopped:
                    return self.go_on_after(known, key, values, result, *stopped)
            return result
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause

    def _run_watched(
        self,
        known: KnownOp,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        key: Any,
        inputs: Sequence[Any] | None,
    ) -> Any:
        """Run an operator between steps that change no value.

        Args:
            inputs: the inputs that the steps after it get; None for steps without tensors.
        """
        if known.steps_before:
            self._dispatcher.run_blind(known.steps_before)
        result = self._run_claimed(known, func, args, kwargs, key)
        if inputs is not None:
            outputs = tensors_of(result)
            TOOL_CODE.enter(call_joined, known.steps_after, inputs, outputs, isolated=True)
        elif known.steps_after:
            self._dispatcher.run_blind(known.steps_after)
        return result

    def _run_claimed(
        self, known: KnownOp, func: Any, args: Args, kwargs: Kwargs, key: Any = None
    ) -> Any:
        """Run an operator itself, and claim its backward operators if a tool analyses them."""
        is_claimed = known.claims and _is_grad_enabled()
        start = _internals.sequence_number() if is_claimed else 0
        native = self._dispatcher.native
        if native is not None:
            # At the program's line, which warnings name. The gate itself calls most operators; with
            # the mode it would be done for each, which takes longer.
            result = _internals.call_in_place(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if not is_claimed:
            return result
        if _mode_depth():
            # Modes are on: this one after an autograd.Function, and the modes beneath it.
            given = known, func, args, kwargs, result, start, key
            _internals.without_modes(self.claimed, *given)
        elif native is None or not native.claim(self._tracker, known, result, start):
            self.claimed(known, func, args, kwargs, result, start, key)
        return result

    def go_on_after(
        self, known: KnownOp, key: Any, inputs: Sequence[Any], result: Any, done: int, returned: Any
    ) -> Any:
        """Run the remaining routines after an operator, once one of them has returned a value.

        Args:
            inputs: the values that the operator has run on.
            result: result of the operator.
            done: number of routines that have run.
            returned: result of the last of them; None if the next one selects a missing position.
        """
        plan = known.plan
        is_given = known.around is Around.TENSORS
        outputs = outputs_of(result, inputs, known.layout.written) if is_given else []
        try:
            changed = self._dispatcher.go_on(plan.after, outputs, done, returned)
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause
        if changed is outputs:
            return result
        is_function = isinstance(key, type)
        written = written_outputs(known.layout.is_in_place, is_function, inputs, outputs)
        return with_outputs(plan, written, inputs, result, outputs, changed)

    def claimed(
        self,
        known: KnownOp,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        result: Any,
        start: int,
        key: Any = None,
    ) -> None:
        """Claim the backward operators of an operator that has just run.

        Args:
            start: the sequence number read before it.
        """
        if _internals.is_traced():
            return
        describe = functools.partial(
            self._call, func, known.name, known.plan.op_id, args, kwargs, key
        )
        execution = Execution(describe, self._tracker.references, key or func, args, kwargs)
        gradients = self.gradients_of(known)
        with _internals.reading((result, *args)):
            about = known.plan, gradients, execution, result, start, self._tracker.iteration
            self.claimer.claim(*about)

    # -- on a description of its call -------------------------------------

    def run_described(
        self,
        known: KnownOp,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        key: Any = None,
        stopped: tuple[Any, ...] | None = None,
        later: Set[Any] | None = None,
    ) -> Any:
        """Run an operator with any actions, and the analyses that are pending.

        Args:
            known: the facts about the operator; it has a plan afterwards.
            key: the object that declares the operator's parameters, if not `func`.
            stopped: if some of the routines before it have run, their number and the result of the
                last one.
            later: None to run routines. Otherwise only analyses run, and those of these tools wait
                for the next execution.
        """
        if _internals.is_traced():
            return func(*args, **kwargs)
        outer = _internals.modes() if _mode_depth() else ()
        about = func, known.name, known.op_id, args, kwargs, key
        try:
            if outer:
                _internals.hide_modes()
            with _internals.reading((*args, *kwargs.values())):
                call = self._call(*about)
                if known.plan is None:
                    result = self._run_first(known, call, outer, later)
                else:
                    result = self._run_again(known, call, outer, key or func, stopped)
            if outer:
                _internals.show_modes(outer)
        except BaseException as error:
            _internals.set_modes(outer)
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause
        return result

    def _run_first(
        self, known: KnownOp, call: TorchCall, outer: Sequence[Any], later: Set[Any] | None
    ) -> Any:
        """Run an operator of which analyses are pending, for the arguments of `run_described`.

        Args:
            outer: modes of the program, which only the operator itself meets.
        """
        call.phase = phase_of(call, self._tracker)
        if _internals.in_forward_ad():
            self._dispatcher.not_seen("tangents of operators in forward-mode differentiation")
        scopes = self._tracker.active
        execution = OpExecution(self._dispatcher, call, scopes, later or frozenset())
        plan = execution.plan if later is None else EMPTY_PLAN
        values = list(call.inputs)
        if plan.before:
            values = self._dispatcher.run_all(plan.before, values)
        handle = known.gradients.handle
        operation = Operation(self._dispatcher, plan, call, handle, execution, outer)
        result = operation.run(values)
        plan = operation.plan
        known.follow(plan)
        if later is not None:
            return result
        wants = type(result) is not _Tensor or result.requires_grad or _internals.in_functorch()
        if not plan.acts_on_gradients and not (plan.claims and wants):
            known.gradients = NO_GRADIENTS
        return self._finish(operation, call, known, result)

    def _run_again(
        self, known: KnownOp, call: TorchCall, outer: Sequence[Any], key: Any, stopped: Args | None
    ) -> Any:
        """Run an operator that has a plan, for the arguments of `run_described`."""
        dispatcher, plan = self._dispatcher, known.plan
        if known.around is Around.TENSORS and known.forms < _FORMS:
            known.forms += 1
            layout = Layout.of(call, known.name, key)
            known.layout = layout or NO_LAYOUT
            known.form = None if layout is None else layout.form
        values = list(call.inputs)
        if stopped is None:
            values = dispatcher.run_all(plan.before, values)
        else:
            values = dispatcher.go_on(plan.before, values, *stopped)
        handle = self.gradients_of(known).handle
        operation = Operation(dispatcher, plan, call, handle, None, outer)
        return self._finish(operation, call, known, operation.run(values))

    def gradients_of(self, known: KnownOp) -> KnownGradients:
        """The facts about an operator's backward operators, as an object that can be changed."""
        found: KnownGradients = known.gradients
        if found is NO_GRADIENTS:
            found = known.gradients = self.new_gradients(known.op_id)
            found.graph = NO_GRADIENTS.graph
        return found

    def new_gradients(self, op_id: str) -> KnownGradients:
        """A new, empty record of the facts about an operator's backward operators."""
        tracker = self._tracker
        return KnownGradients(OpHandle(op_id, tracker.active, model=tracker.frame.model))

    def _finish(self, operation: Operation, call: TorchCall, known: KnownOp, result: Any) -> Any:
        """Hook the backward operators of an operator that has run, and run the routines after it.

        Returns:
            The result of the operator.
        """
        plan = operation.plan
        given = tensors_of(result)
        changed = outputs = operation.hook_outputs(given)
        if is_no_output(result):
            given = changed = outputs = outputs_of(result, call.inputs, call.written)
        # The hooks of single nodes are registered after those on all output gradients and
        # before those on all input gradients, and run in this order (contract rule 8).
        if plan.claims and _is_grad_enabled():
            if known.gradients is NO_GRADIENTS:
                self.claimer.note_run(known.op_id, self._tracker.iteration)
            else:
                described = Execution(lambda: call, self._tracker.references)
                iteration = self._tracker.iteration
                about = plan, known.gradients, described, result, operation.start, iteration
                self.claimer.claim(*about)
        operation.hook_inputs(result)
        if plan.after:
            changed = self._dispatcher.run_all(plan.after, outputs)
        if changed is given:
            return result
        if changed is outputs:
            return with_tensors(result, given, outputs)
        written = written_outputs(operation.in_place, operation.is_function, call.inputs, outputs)
        return with_outputs(plan, written, operation.values, result, outputs, changed)

    def _call(
        self, func: Any, name: str, op_id: str, args: Args, kwargs: Kwargs, key: Any = None
    ) -> TorchCall:
        tracker = self._tracker
        if "keras" in sys.modules:
            args, kwargs = with_values(args, kwargs)
        return TorchCall.of(
            func, name, op_id, args, kwargs, tracker.module_path(), tracker.modules, key
        )


def written_outputs(
    is_in_place: bool, is_function: bool, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Sequence[bool]:
    """For each output of an operator, True if it is a tensor of the caller that was written into.

    An ``autograd.Function`` returns only arguments that it has changed in place as they are.
    """
    if not is_function:
        return [is_in_place] * len(outputs)
    return [any(output is value for value in inputs) for output in outputs]


def with_outputs(
    plan: ActionPlan,
    written: Sequence[bool],
    inputs: Sequence[Any],
    result: Any,
    outputs: Sequence[Any],
    values: list[Any],
) -> Any:
    """The result of an operator whose outputs routines have replaced.

    Args:
        written: for each output, True if the operator writes it into a tensor of the caller.
        inputs: the values that the operator has run on.
        outputs: the tensors of `result`.
        values: the outputs after the routines.
    """
    differentiable = any(action.differentiable for action in plan.after)
    for index, (target, value) in enumerate(zip(outputs, values, strict=True)):
        is_written = is_no_output(result) or written[index]
        if value is not target and (is_written or made_leaf(target, inputs)):
            write_back(target, value, differentiable)
            values[index] = target
    return result if is_no_output(result) else with_tensors(result, tensors_of(result), values)
