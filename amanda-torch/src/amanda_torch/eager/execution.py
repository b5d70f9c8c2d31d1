"""One execution of an operator that some tool acts on or has yet to analyse.

The interceptor keeps a :class:`KnownOp` for each operator that a thread has met, and runs it
again by ``known.run(known, func, args, kwargs)``: by the shortest way that its actions allow.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from amanda import inline
from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import OpExecution
from amanda.engine.plan import ActionPlan
from amanda.errors import ToolTypeError
from amanda.inline.steps import StepKind, are_all
from amanda.interface.action import Action
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.executions import Execution
from amanda_torch.autograd.gradient_graphs import NO_GRADIENTS, KnownGradients
from amanda_torch.autograd.substitution import write_back
from amanda_torch.eager import records
from amanda_torch.eager.keras_layers import with_values
from amanda_torch.eager.operation import Operation, made_leaf
from amanda_torch.eager.phases import phase_of
from amanda_torch.operators.calls import TorchCall, tensors_of, with_tensors
from amanda_torch.operators.layouts import Layout
from amanda_torch.operators.names import is_in_place
from amanda_torch.routines import (
    LOOKING,
    TOOL_CODE,
    RoutineDispatcher,
    count,
    counters_in,
    until_result,
)

if TYPE_CHECKING:
    from amanda_torch.eager.op_ids import Tracker


_SWALLOWING = frozenset(
    """add sub mul div true_divide floor_divide remainder matmul pow eq ne lt le gt ge rsub rdiv
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift""".split()
)
"""The operators that ``a + b`` and the like call: PyTorch turns a TypeError in them into
NotImplemented, and Python that into a TypeError about unsupported operands."""


def unswallowed(error: BaseException, name: str) -> BaseException:
    """An exception, a tool's TypeError in a form that reaches the user, also from ``a + b``."""
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


_PLAIN = _internals.PLAIN
_is_grad_enabled = torch.is_grad_enabled
_mode_depth = _internals.mode_depth

_FORMS = 16
"""Forms of call for which a layout is made; an operator with more is described at each call."""


_NO_COUNTERS: tuple[Sequence[inline.Counter], Sequence[inline.Counter]] = ((), ())


class KnownOp(records.Known):
    """Facts that a thread has learned about one operator, under one plan.

    Attributes:
        plan: its actions.
        layout: of its inputs, in the form of its last call; None if it is not known.
        forms: how many layouts have been made.
        counters: those before and after it, where its actions run nothing else.
    """

    __slots__ = ("counters", "forms", "layout", "plan")

    def __init__(
        self, plan: ActionPlan, name: str, executor: Executor, gradients: KnownGradients
    ) -> None:
        self.plan = plan
        self.is_claim = plan.is_claim
        self.claims = plan.claims
        self.is_blind = plan.is_blind
        is_simple = plan.is_isolated and (plan.is_blind or plan.is_around)
        self.steps_before = plan.steps_before if is_simple or plan.is_claim else None
        self.steps_after = plan.steps_after if is_simple or plan.is_claim else None
        self.executor = executor
        self.iterations = executor.claimer.iterations
        self.op_id = plan.op_id
        self.name = name
        self.run = executor.choose_runner(plan)
        self.gradients = gradients
        self.layout: Layout | None = None
        self.form = None
        self.forms = 0
        self.counters = _NO_COUNTERS
        if plan.is_blind:
            before, after = counters_in(plan.steps_before), counters_in(plan.steps_after)
            self.counters = before or (), after or ()


class Executor:
    """Runs the operators of one thread that are not plainly vanilla.

    Attributes:
        claimer: finds their backward operators.
        runners: its methods that run an operator, by name: bound once for all operators, and not
            before the thread's first one, since they are cycles.
    """

    def __init__(self, dispatcher: RoutineDispatcher, tracker: Tracker) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self.claimer = Claimer(dispatcher)
        # Faster than by STATE, which looks up the thread at each access.
        self._thread = vars(STATE)
        self.runners: dict[str, Callable[..., Any]] = {}

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self.claimer.clear()
        # Not in place: the thread itself may be reading them while another one ends its scopes.
        self.runners = {}

    # -- an operator that is not known ------------------------------------

    def run_first(
        self,
        plan: ActionPlan | None,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        scopes: Sequence[Any],
    ) -> tuple[Any, KnownOp | None]:
        """Run an operator that is new to this thread, or whose plan has changed.

        Args:
            plan: its plan; None if some analysis has yet to run.
            key: what declares the operator's parameters, if not `func`.
            scopes: those that instrument it.

        Returns:
            The operator's result, and what is known of it; None if it runs vanilla.
        """
        if plan is not None:
            known = KnownOp(plan, name, self, self._new_gradients(op_id, scopes))
            return known.run(known, func, args, kwargs, key), known
        outer = _internals.modes() if _mode_depth() else ()
        given = (*args, *kwargs.values()) if kwargs else args
        about = func, name, op_id, args, kwargs, key
        try:
            if outer:
                _internals.hide_modes()
            if _PLAIN.issuperset(map(type, given)):
                result, found, gradients = self._run_analysed(about, scopes, outer)
            else:
                with _internals.reading(given):
                    result, found, gradients = self._run_analysed(about, scopes, outer)
            if outer:
                _internals.show_modes(outer)
        except BaseException as error:
            _internals.set_modes(outer)
            raise unswallowed(error, name)  # noqa: B904 - it sets its cause
        is_vanilla = not (found.claims or found.has_actions)
        return result, None if is_vanilla else KnownOp(found, name, self, gradients)

    def _run_analysed(
        self, about: tuple[Any, ...], scopes: Sequence[Any], outer: Sequence[Any]
    ) -> tuple[Any, ActionPlan, KnownGradients]:
        """Run an operator and its analyses.

        Args:
            about: what describes its call.
            outer: the modes of others, which are hidden.

        Returns:
            Its result, its plan, and what is known of its backward operators.
        """
        call = self._call(*about)
        call.phase = phase_of(call, self._tracker)
        execution = OpExecution(self._dispatcher, call, scopes)
        plan = execution.plan
        inputs = list(call.inputs)
        values = self._dispatcher.run_all(plan.before, inputs) if plan.before else inputs
        is_simple = not (
            outer
            or values is not inputs
            or plan.replace is not None
            or plan.acts_on_gradients
            or _internals.READING.is_on
            or type(call.func) is functools.partial
            or is_in_place(call.op.__name__, call.kwargs)
        )
        if is_simple:
            return self._run_simply(call, scopes, execution, values)
        gradients = self._new_gradients(call.op_id, scopes)
        result, plan = self._carry_out(plan, call, gradients, outer, values, execution)
        return result, plan, gradients

    def _run_simply(
        self, call: TorchCall, scopes: Sequence[Any], execution: OpExecution, values: list[Any]
    ) -> tuple[Any, ActionPlan, KnownGradients]:
        """Run a new operator that has no actions around it, as most of a large model."""
        start = _internals.sequence_number()
        result = _internals.call_in_place(call.func, call.args, call.kwargs)
        outputs = tensors_of(result)
        first, plan = execution.plan, execution.finish(outputs)
        gradients = NO_GRADIENTS
        wants = type(result) is not torch.Tensor or result.requires_grad
        if plan.acts_on_gradients or (plan.claims and (wants or _internals.in_functorch())):
            gradients = self._new_gradients(call.op_id, scopes)
        elif plan.claims and _is_grad_enabled():
            self.claimer.note_run(call.op_id, self._tracker.iteration)
        if plan.acts_on_gradients:
            # Its analysis has seen the outputs.
            operation = Operation(self._dispatcher, first, call, gradients.handle, None, ())
            operation.has_run(values, plan, start)
            return *self._finish(operation, call, gradients, result), gradients
        if gradients is not NO_GRADIENTS and _is_grad_enabled():
            described = Execution(lambda: call, self._tracker.references)
            self._claim(plan, gradients, described, result, start)
        if not plan.after:
            return result, plan, gradients
        changed = self._dispatcher.run_all(plan.after, outputs)
        if changed is not outputs:
            written = [False] * len(outputs)
            result = with_outputs(plan, written, values, result, outputs, changed)
        return result, plan, gradients

    def analyse(
        self,
        plan: ActionPlan | None,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        scopes: Sequence[Any],
        later: Set[Any],
    ) -> Any:
        """Run an operator and its analyses, but no routine; for the arguments of `run_first`.

        Args:
            later: tools whose analyses wait for the next execution.
        """
        if plan is not None:
            return func(*args, **kwargs)
        outer = _internals.modes()
        try:
            with _internals.reading((*args, *kwargs.values())):
                if outer:
                    _internals.hide_modes()
                call = self._call(func, name, op_id, args, kwargs, key)
                call.phase = phase_of(call, self._tracker)
                execution = self._dispatcher.begin(call, scopes, later)
                _internals.set_modes(outer)
                with _internals.running():
                    result = _internals.call_in_place(func, args, kwargs)
                if outer:
                    _internals.hide_modes()
                execution.finish(tensors_of(result))
        finally:
            _internals.set_modes(outer)
        return result

    def choose_runner(self, plan: ActionPlan) -> Callable[..., Any]:
        """The cheapest of the run methods that can carry out a plan."""
        if plan.is_claim:
            name = "run_claimed"
        elif plan.is_blind:
            is_counted = are_all(StepKind.COUNT, (*plan.steps_before, *plan.steps_after))
            name = "run_counted" if is_counted else "run_blind"
        else:
            name = "run_around" if plan.is_around else "run"
        runner = self.runners.get(name)
        if runner is None:
            runner = self.runners[name] = getattr(self, name)
        return runner

    # -- an operator that is known ----------------------------------------

    def run_claimed(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
    ) -> Any:
        """Run an operator without actions, whose backward operators some tool looks at."""
        if not _is_grad_enabled():
            return func(*args, **kwargs) if kwargs else func(*args)
        start = _internals.sequence_number()
        native = self._dispatcher.native
        if native is not None:
            # At the program's line, which warnings name. The gate itself calls most operators; with
            # the mode it would be done for each, which takes longer.
            result = _internals.call_in_place(func, args, kwargs)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if _mode_depth():
            # No mode is off where an autograd.Function has run, nor is one beneath ours.
            given = known, func, args, kwargs, result, start, key
            _internals.without_modes(self.claimed, *given)
        elif native is None or not native.claim(self._tracker, known, result, start):
            self.claimed(known, func, args, kwargs, result, start, key)
        return result

    def claimed(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
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
        if _PLAIN.issuperset(map(type, (result, *args))):
            self._claim(known.plan, gradients, execution, result, start)
        else:
            with _internals.reading((result, *args)):
                self._claim(known.plan, gradients, execution, result, start)

    def checked(
        self, known: KnownOp, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Run the checks and sums after an operator whose other steps the extension has run.

        An output is not finite, or of a kind that the extension does not know, or tensors have
        other shapes than before.
        """
        plan = known.plan
        try:
            with _internals.reading((*args, *kwargs.values(), result)):
                call = self._call(func, known.name, plan.op_id, args, kwargs)
                left = [step for step in plan.steps_after if step.kind in LOOKING]
                for step in left:
                    step.routine.supply(call.inputs, is_new=True)
                # They return nothing, so that the outputs stay as they are.
                actions = [step.action for step in left]
                self._dispatcher.run_all(actions, tensors_of(result))
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause

    def run_counted(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
    ) -> Any:
        """Run an operator whose executions are counted."""
        before, after = known.counters
        if before:
            count(before)
        if known.plan.claims:
            result = self.run_claimed(known, func, args, kwargs, key)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if after:
            count(after)
        return result

    def run_blind(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
    ) -> Any:
        """Run an operator with routines that take no tensor: its arguments stay as they are."""
        plan, operator = known.plan, func
        if plan.claims and _is_grad_enabled():
            operator = functools.partial(self.run_claimed, known, func, args, kwargs, key)
            args, kwargs = (), {}
        try:
            run = self._dispatcher.run_blind if plan.is_isolated else self._run_differentiable
            if plan.before:
                run(plan.before)
            result = operator(*args, **kwargs) if kwargs else operator(*args)
            if plan.after:
                run(plan.after)
            return result
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause

    def _run_differentiable(self, actions: Sequence[Action]) -> None:
        self._dispatcher.run_all(actions, [])

    def run_around(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
    ) -> Any:
        """Run an operator with routines before and after it that take tensors.

        A call in the form of the last one needs no description, unless a routine changes it.
        """
        plan, layout = known.plan, known.layout
        values: list[Any] | None = None
        if (
            layout is not None
            and plan.is_isolated
            and _internals.is_plain()
            and not (layout.is_in_place and _is_grad_enabled())
        ):
            values = layout.values(key or func, args, kwargs)
        if layout is None or values is None:
            return self.run(known, func, args, kwargs, key)
        try:
            dispatcher, changed = self._dispatcher, values
            if plan.before:
                done = TOOL_CODE.enter(until_result, plan.before, values, isolated=True)
                changed = values if done is None else dispatcher.go_on(plan.before, values, *done)
            if changed is not values:
                return self.run(known, func, args, kwargs, key, changed)
            if plan.claims and _is_grad_enabled():
                result = self.run_claimed(known, func, args, kwargs, key)
            elif self._dispatcher.native is not None:
                result = _internals.call_in_place(func, args, kwargs)
            else:
                result = func(*args, **kwargs) if kwargs else func(*args)
            if plan.after:
                outputs = tensors_of(result)
                done = TOOL_CODE.enter(until_result, plan.after, outputs, isolated=True)
                changed = outputs if done is None else dispatcher.go_on(plan.after, outputs, *done)
                if changed is not outputs:
                    written = written_outputs(
                        layout.is_in_place, isinstance(key, type), values, outputs
                    )
                    return with_outputs(plan, written, values, result, outputs, changed)
            return result
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause

    def resumed_before(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        done: int,
        inputs: list[Any],
        returned: Any,
    ) -> Any:
        """Continue after the gate has run some of the routines before an operator.

        Args:
            done: how many.
            inputs: what they select from.
            returned: what the last of them has returned; None if the next one selects what is not
                there.
        """
        plan = known.plan
        try:
            changed = self._dispatcher.go_on(plan.before, inputs, done, returned)
            if changed is not inputs:
                return self.run(known, func, args, kwargs, values=changed)
            if plan.claims and _is_grad_enabled():
                result = self.run_claimed(known, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            return self.resumed_after(known, result, 0, inputs, None) if plan.after else result
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause

    def resumed_after(
        self, known: KnownOp, result: Any, done: int, inputs: list[Any], returned: Any
    ) -> Any:
        """Go on with the routines after an operator, when a routine has returned something.

        Args:
            result: of the operator, which has run on `inputs`.
            done: how many routines have run.
            returned: by the last of them.
        """
        outputs = [] if known.is_blind else tensors_of(result)
        try:
            changed = self._dispatcher.go_on(known.plan.after, outputs, done, returned)
        except TypeError as error:
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause
        if changed is outputs:
            return result
        is_in_place = known.layout is not None and known.layout.is_in_place
        written = written_outputs(is_in_place, False, inputs, outputs)
        return with_outputs(known.plan, written, inputs, result, outputs, changed)

    def run(
        self,
        known: KnownOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
        values: list[Any] | None = None,
    ) -> Any:
        """Run an operator with any actions on a description of its call.

        Args:
            values: its inputs after the routines before it; None if these have yet to run.
        """
        if _internals.is_traced():
            return func(*args, **kwargs)
        plan = known.plan
        outer = _internals.modes()
        try:
            if outer:
                _internals.hide_modes()
            with _internals.reading((*args, *kwargs.values())):
                call = self._call(func, known.name, plan.op_id, args, kwargs, key)
                if plan.is_around and known.forms < _FORMS:
                    known.forms += 1
                    layout = known.layout = Layout.of(call, known.name, key or func)
                    known.form = None if layout is None else layout.form
                gradients = self.gradients_of(known)
                result = self._carry_out(plan, call, gradients, outer, values)[0]
            if outer:
                _internals.show_modes(outer)
        except BaseException as error:
            _internals.set_modes(outer)
            raise unswallowed(error, known.name)  # noqa: B904 - it sets its cause
        return result

    def gradients_of(self, known: KnownOp) -> KnownGradients:
        """The facts about an operator's backward operators, in a form that can be added to."""
        found: KnownGradients = known.gradients
        if found is NO_GRADIENTS:
            found = known.gradients = self._new_gradients(known.op_id, self._tracker.active)
            found.graph = NO_GRADIENTS.graph
        return found

    def _new_gradients(self, op_id: str, scopes: Sequence[Any]) -> KnownGradients:
        return KnownGradients(OpHandle(op_id, scopes, model=self._tracker.frame.model))

    def _carry_out(
        self,
        plan: ActionPlan,
        call: TorchCall,
        gradients: KnownGradients,
        outer: Sequence[Any],
        values: list[Any] | None = None,
        execution: OpExecution | None = None,
    ) -> tuple[Any, ActionPlan]:
        """Run the routines before an operator, it, and those after it.

        Args:
            outer: the modes of others, which are hidden from everything but the operator.
            execution: runs the analyses after it, where some have yet to run.

        Returns:
            Its result, and its plan after those analyses.
        """
        if values is None:
            values = self._dispatcher.run_all(plan.before, list(call.inputs))
        operation = Operation(self._dispatcher, plan, call, gradients.handle, execution, outer)
        return self._finish(operation, call, gradients, operation.run(values))

    def _finish(
        self, operation: Operation, call: TorchCall, gradients: KnownGradients, result: Any
    ) -> tuple[Any, ActionPlan]:
        """Hook the backward operators of an operator that has run, and run the routines after it.

        Returns:
            Its result, and its plan.
        """
        plan = operation.plan
        given = tensors_of(result)
        outputs = operation.hook_outputs(given)
        # The hooks of single nodes are registered after those on all output gradients and
        # before those on all input gradients, and run in this order (contract rule 8).
        if plan.claims and _is_grad_enabled():
            described = Execution(lambda: call, self._tracker.references)
            self._claim(plan, gradients, described, result, operation.start)
        operation.hook_inputs(result)
        changed = self._dispatcher.run_all(plan.after, outputs)
        if changed is outputs:
            return with_tensors(result, given, outputs), plan
        written = written_outputs(operation.in_place, operation.is_function, call.inputs, outputs)
        return with_outputs(plan, written, operation.inputs, result, outputs, changed), plan

    def _call(
        self,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Any = None,
    ) -> TorchCall:
        tracker = self._tracker
        if "keras" in sys.modules:
            args, kwargs = with_values(args, kwargs)
        return TorchCall.of(
            func, name, op_id, args, kwargs, tracker.module_path(), tracker.modules, key
        )

    def _claim(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        execution: Execution,
        result: Any,
        start: int,
    ) -> None:
        if _internals.in_functorch():
            self._dispatcher.not_seen("backward operators under a functorch transform")
            return
        self.claimer.claim(plan, known, execution, result, start, self._tracker.iteration)


def written_outputs(
    is_in_place: bool, is_function: bool, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Sequence[bool]:
    """For each output of an operator, whether it is a tensor of the caller's that was written into.

    An ``autograd.Function`` returns no argument as it is, but those that it has changed in place.
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
    """The result of an operator after routines have returned other outputs.

    Args:
        written: whether the caller sees the operator write into each output.
        inputs: the values that the operator has run on.
        outputs: the tensors of `result`.
        values: the outputs after the routines.
    """
    differentiable = any(action.differentiable for action in plan.after)
    for index, (target, value) in enumerate(zip(outputs, values, strict=True)):
        if value is not target and (written[index] or made_leaf(target, inputs)):
            write_back(target, value, differentiable)
            values[index] = target
    return with_tensors(result, tensors_of(result), values)
