"""One execution of an operator that some tool acts on or has yet to analyse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.errors import ToolTypeError
from amanda.interface.action import Action
from amanda.state import ATTACHED
from amanda_torch import _internals
from amanda_torch.autograd.nodes import Claimer, GradientState, form_of
from amanda_torch.autograd.substitution import write_back
from amanda_torch.eager.operation import Operation, made_leaf
from amanda_torch.eager.points import Points
from amanda_torch.operators.calls import TorchCall, tensors_of, with_tensors
from amanda_torch.operators.layouts import Layout
from amanda_torch.operators.names import name_of

if TYPE_CHECKING:
    from amanda_torch.thread.modules import Tracker


_SWALLOWING = frozenset(
    """add sub mul div true_divide floor_divide remainder matmul pow eq ne lt le gt ge rsub rdiv
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift""".split()
)
"""Operators that Python's operators call; those turn any TypeError into NotImplemented."""


def _unswallowed(error: TypeError, name: str) -> BaseException:
    """A tool's TypeError in a form that reaches the user from ``a + b`` too."""
    notes = getattr(error, "__notes__", ())
    swallowed = name.startswith("__") or name.rstrip("_") in _SWALLOWING
    if not swallowed or not any(note.startswith("amanda:") for note in notes):
        return error
    raised = ToolTypeError(f"TypeError: {error}")
    raised.__cause__ = error
    for note in notes:
        raised.add_note(note)
    return raised


_ATTACHED = ATTACHED
_is_grad_enabled = torch.is_grad_enabled

_FORMS = 16
"""Forms of call in which an operator is laid out; one that has more is described each time."""


class Memory:
    """What a thread has learned of one operator.

    Attributes:
        gradients: of its backward operators.
        layout: of its tensors in the form in which it was called last; None if it is not known.
        forms: how often it was called in another form than before.
    """

    __slots__ = ("forms", "gradients", "layout")

    def __init__(self, gradients: GradientState) -> None:
        self.gradients = gradients
        self.layout: Layout | None = None
        self.forms = 0


class Executor:
    """Runs the operators of one thread that are not plainly vanilla."""

    def __init__(self, dispatcher: Dispatcher, tracker: Tracker) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self._points = Points(dispatcher)
        self.claimer = Claimer(dispatcher)

    def run_claimed(
        self,
        plan: ActionPlan,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
    ) -> Any:
        """An operator without actions whose backward operators some tool looks at."""
        if not _is_grad_enabled():
            return func(*args, **kwargs) if kwargs else func(*args)
        state = self._memory(plan).gradients
        start = _internals.sequence_number()
        result = func(*args, **kwargs)
        if state.form is not None and state.form == form_of(result):
            state.iteration = self._tracker.iteration
            return result
        if _internals.is_traced():
            return result
        name = name or name_of(func)
        make_call = functools.partial(self._call, func, name, plan.op_id, args, kwargs)
        self._claim(plan, make_call, result, start)
        return result

    def run_blind(
        self,
        plan: ActionPlan,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
    ) -> Any:
        """An operator with routines that look at no tensor: its arguments stay as they are."""
        operator = func
        if plan.claims and _is_grad_enabled():
            operator = functools.partial(self.run_claimed, plan, func, args, kwargs, name)
            args, kwargs = (), {}
        try:
            if plan.is_isolated and len(_ATTACHED) == 1 and _internals.is_bare():
                return self._points.run_blind(plan, operator, args, kwargs)
            self._run_blind(plan.before)
            result = operator(*args, **kwargs)
            self._run_blind(plan.after)
            return result
        except TypeError as error:
            raise _unswallowed(error, name or name_of(func))  # noqa: B904 - it sets its cause

    def _run_blind(self, actions: Sequence[Action]) -> None:
        if not actions:
            return
        outer = _internals.hide_modes()
        try:
            for action in actions:
                self._dispatcher.run(action, [])
        finally:
            _internals.show_modes(outer)

    def run_around(
        self,
        plan: ActionPlan,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
        key: Any = None,
    ) -> Any:
        """An operator with nothing but routines around it that look at its tensors.

        A call in a form that was met before needs no description, if no routine changes it.
        """
        layout: Layout | None = None
        values: list[Any] | None = None
        if plan.is_isolated and len(_ATTACHED) == 1 and _internals.is_plain():
            layout = self._memory(plan).layout
            if layout is not None:
                values = layout.values(key or func, args, kwargs)
        elif _internals.is_traced():
            return func(*args, **kwargs)
        if layout is None or values is None or (layout.is_in_place and _is_grad_enabled()):
            return self.run(plan, func, name or name_of(func), plan.op_id, args, kwargs, key)[0]
        try:
            changed = self._points.run(plan.before, values) if plan.before else values
            if changed is not values:
                name = name or name_of(func)
                return self.run(plan, func, name, plan.op_id, args, kwargs, key, changed)[0]
            if plan.claims and _is_grad_enabled():
                result = self.run_claimed(plan, func, args, kwargs, name)
            else:
                result = func(*args, **kwargs) if kwargs else func(*args)
            if plan.after:
                outputs = tensors_of(result)
                changed = self._points.run(plan.after, outputs)
                if changed is not outputs:
                    return _with_outputs(plan, layout.is_in_place, values, result, outputs, changed)
            return result
        except TypeError as error:
            raise _unswallowed(error, name or name_of(func))  # noqa: B904 - it sets its cause

    def run(
        self,
        plan: ActionPlan | None,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any = None,
        values: list[Any] | None = None,
    ) -> tuple[Any, ActionPlan]:
        """Run an operator with its analyses and actions.

        Args:
            plan: None if some analysis has yet to run.
            key: what declares the operator's parameters, if not `func`.
            values: its inputs as the routines before it have left them; None if these
                have yet to run.

        Returns:
            The operator's result and its plan.
        """
        outer = _internals.hide_modes()
        try:
            return self._run(plan, func, name, op_id, args, kwargs, key, values, outer)
        except TypeError as error:
            raise _unswallowed(error, name)  # noqa: B904 - it sets its cause
        finally:
            _internals.show_modes(outer)

    def _run(
        self,
        plan: ActionPlan | None,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        values: list[Any] | None,
        outer: Sequence[Any],
    ) -> tuple[Any, ActionPlan]:
        """Run an operator while `outer`, the modes of others, are hidden from what we do."""
        call = self._call(func, name, op_id, args, kwargs, key)
        execution = None
        if plan is None:
            execution = self._dispatcher.begin(call)
            plan = execution.plan
        elif plan.is_around:
            self._learn(plan, call, name, key or func)
        if values is None:
            values = list(call.inputs)
            for action in plan.before:
                values = self._dispatcher.run(action, values)
        operation = Operation(self._dispatcher, plan, call, name, execution, outer)
        result = operation.run(values)
        plan = operation.plan
        outputs = operation.hook_outputs(tensors_of(result))
        # Between the whole operator's hooks: they run first and last.
        if plan.claims and _is_grad_enabled():
            self._claim(plan, lambda: call, result, operation.start)
        operation.hook_inputs(result)
        return self._finish(plan, operation, result, outputs), plan

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
        return TorchCall.of(
            func, name, op_id, args, kwargs, tracker.module_path(), tracker.modules, key
        )

    def _claim(
        self, plan: ActionPlan, make_call: Callable[[], TorchCall], result: Any, start: int
    ) -> None:
        if _internals.in_functorch():
            self._dispatcher.not_seen("backward operators under a functorch transform")
            return
        outputs = tensors_of(result)
        self.claimer.settle(plan, result)
        state = self.claimer.state_of(plan.op_id)
        if state.form is None or state.form != form_of(result):
            self.claimer.claim(plan, make_call, outputs, start, self._tracker.iteration)
        state.iteration = self._tracker.iteration

    def _finish(
        self, plan: ActionPlan, operation: Operation, result: Any, outputs: list[Any]
    ) -> Any:
        """The routines after the operator, and the result that its caller gets."""
        values = outputs
        for action in plan.after:
            values = self._dispatcher.run(action, values)
        if values is outputs:
            return with_tensors(result, tensors_of(result), values)
        return _with_outputs(plan, operation.in_place, operation.inputs, result, outputs, values)

    # -- what is learned of an operator -----------------------------------

    def _memory(self, plan: ActionPlan) -> Memory:
        memory: Memory | None = plan.driver_data
        if memory is None:
            memory = plan.driver_data = Memory(self.claimer.state_of(plan.op_id))
        return memory

    def _learn(self, plan: ActionPlan, call: TorchCall, name: str, key: Any) -> None:
        """Remember where the operator's tensors sit in a call like this one."""
        memory = self._memory(plan)
        if memory.forms < _FORMS:
            memory.forms += 1
            memory.layout = Layout.of(call, name, key)


def _with_outputs(
    plan: ActionPlan,
    is_in_place: bool,
    inputs: Sequence[Any],
    result: Any,
    outputs: Sequence[Any],
    values: list[Any],
) -> Any:
    """The result of an operator with what the routines after it gave for its outputs."""
    differentiable = any(action.differentiable for action in plan.after)
    for index, (target, value) in enumerate(zip(outputs, values, strict=True)):
        if value is not target and (is_in_place or made_leaf(target, inputs)):
            write_back(target, value, differentiable)
            values[index] = target
    return with_tensors(result, tensors_of(result), values)
