"""Writes the actions on a captured graph into a copy of it, which a compiler then compiles.

Traceable routines become a part of compiled code, as functions of the selected tensors and of
keyword arguments. :func:`reason_against` gives the reason why the actions on an operator cannot be
compiled::

    if not any(reason_against(plan, is_one_output) for plan, is_one_output in ...):
        copy = Writer(dispatcher, module).write({"linear": OpActions(plan, operator)})
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.inline.steps import StepKind, lowered
from amanda.interface.action import Action, ActionKind
from amanda.python.text import printable
from amanda_torch import _internals
from amanda_torch.autograd.functions import AmandaSubstitute
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.compiled.deferred import is_marked_deferrable
from amanda_torch.compiled.gradients import JointOp, LearnedNode, RunCounts, is_deferred
from amanda_torch.compiled.operators import Operator
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.operators.calls import item_at, put_item
from amanda_torch.routines import RoutineDispatcher, selected


@attrs.frozen
class OpActions:
    """The actions on one operator of a graph.

    Attributes:
        plan: the actions.
        operator: what its node runs.
        gradients: facts about its backward operators; None without actions on them.
        nodes: the backward operators that a tool analyses.
    """

    plan: ActionPlan
    operator: Operator
    gradients: KnownGradients | None = None
    nodes: Sequence[LearnedNode] | None = None


def reason_against(plan: ActionPlan, is_one_output: bool) -> str:
    """The reason why the actions on an operator cannot be compiled with it; "" if they can.

    Args:
        is_one_output: True if it returns one tensor.
    """
    if refused := _refused(plan):
        return f"{min(refused, key=_can_follow).routine} is not traceable"
    if any(not is_deferred(action) for action in plan.after) and not is_one_output:
        return "a routine gets several outputs of an operator"
    return ""


def only_follows(plan: ActionPlan) -> bool:
    """True if all actions that cannot be compiled could run after the graph."""
    return all(map(_can_follow, _refused(plan)))


def _refused(plan: ActionPlan) -> list[Action]:
    """The actions on a forward operator that cannot be compiled with it."""
    replaced = [] if plan.replace is None else [plan.replace]
    return [
        action
        for action in (*plan.before, *replaced, *plan.after)
        if not (is_traceable(action) or is_deferred(action))
    ]


def _can_follow(action: Action) -> bool:
    """True if a routine may run after the whole graph, if all others do."""
    kind = lowered(action).kind
    is_added_up = kind is StepKind.COUNT or kind is StepKind.SHAPE_SUM
    return is_added_up or is_marked_deferrable(action.func)


def is_traceable(action: Action) -> bool:
    """True if a compiler may trace the routine of an action."""
    func = getattr(action.func, "__func__", action.func)
    return bool(getattr(func, "amanda_traceable", False))


class CompiledCode:
    """Compiled code of a graph with actions; errors of routines get notes that name them.

    Args:
        function: the code.
        written: a copy of the graph that it was made of: compilers change their input.
        compiler: its name.
        routines: names of the routines in it.
        counts: additions after its run.
        interceptor: the thread's interceptor.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        written: fx.GraphModule,
        compiler: str,
        routines: Collection[str],
        counts: RunCounts,
        interceptor: Interceptor,
    ) -> None:
        self._counts = counts
        self._interceptor = interceptor
        self._function = function
        self._written = written
        self._compiler = compiler
        self._routines = routines

    def __call__(self, *inputs: Any) -> Any:
        """Run the code."""
        try:
            return self.run(inputs)
        except Exception as error:
            if self._routines and not notes_of(error):
                self._explain(error, inputs)
            raise

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the code; its errors do not name compiled routines."""
        interceptor = self._interceptor
        muted = interceptor.muted
        try:
            # Compiled graphs may be called as modules.
            interceptor.muted = muted + 1
            return self._counts.run(self._function, inputs, interceptor.iteration)
        finally:
            interceptor.muted = muted

    def _explain(self, error: Exception, inputs: Sequence[Any]) -> None:
        """Run the written graph on copies of inputs, for the notes of its error.

        Nothing of this is seen by the program.
        """
        state = torch.get_rng_state()
        try:
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
            _internals.without_gradients(self._written, *copies)
        except Exception as found:
            # An error without notes is the program's own.
            for text in notes_of(found):
                error.add_note(text)
        else:
            error.add_note(
                f"amanda: raised by code that {self._compiler} made with "
                f"{', '.join(sorted(self._routines))}, and not operator by operator"
            )
        finally:
            torch.set_rng_state(state)


def notes_of(error: BaseException) -> list[str]:
    """The notes of Amanda's at an error."""
    notes = getattr(error, "__notes__", ())
    return [text for text in notes if text.startswith("amanda:")]


class Writer:
    """Writes actions into a copy of one graph."""

    def __init__(
        self, dispatcher: RoutineDispatcher, module: fx.GraphModule, counts: RunCounts
    ) -> None:
        self._dispatcher = dispatcher
        self._counts = counts
        self._module = _internals.copied_graph(module)
        self._graph = self._module.graph
        self._numbers = itertools.count()
        self._places: dict[Any, int] = {}

    def write(self, actions: Mapping[str, OpActions]) -> fx.GraphModule:
        """The copy of the graph, with the actions on its operators, by the names of their nodes."""
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._places = {node: number for number, node in enumerate(placeholders)}
        for node in list(self._graph.nodes):
            inlined = actions.get(node.name)
            if inlined is not None:
                self._instrument(node, inlined)
        self._graph.lint()
        self._module.recompile()
        return self._module

    def _instrument(self, node: fx.Node, inlined: OpActions) -> None:
        plan, operator = inlined.plan, inlined.operator
        given, kwargs = operator.arguments(node.args, dict(node.kwargs))
        kwargs_given = dict(kwargs)
        args = list(given)
        inputs = [item_at(place, args, kwargs) for place in operator.places]
        with self._graph.inserting_before(node):
            for action in plan.before:
                for index, new in self._call(action, inputs):
                    inputs[index] = new
            if plan.replace is not None:
                node.op, node.target = "call_function", _replacement(plan.replace)
                node.args, node.kwargs = (
                    tuple(selected(plan.replace, inputs)),
                    self._keywords(plan.replace),
                )
        if plan.replace is None:
            for place, value in zip(operator.places, inputs, strict=True):
                if value is not None or not isinstance(place, str):
                    put_item(place, args, kwargs, value)
            node.op, node.target = "call_function", operator.func
            node.args, node.kwargs = tuple(args), kwargs
        if inlined.gradients is not None:
            self._trace_gradients(node, inlined, given, kwargs_given)
        last = written = node
        for action in plan.after:
            last, written = self._after(action, last, written)

    def _trace_gradients(
        self, node: fx.Node, inlined: OpActions, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Replace the operator by a function that finds its backward operators.

        Args:
            args, kwargs: of the operator, before its routines.
        """
        assert inlined.gradients is not None
        places = inlined.operator.places
        site = JointOp(inlined.plan, inlined.gradients, inlined.nodes, places)
        inputs = [item_at(place, args, kwargs) for place in places]
        given = list(dict.fromkeys(value for value in inputs if value in self._places))
        routine = functools.partial(_gradient_routine, self._dispatcher)
        numbers = [self._places[value] for value in given]
        with self._graph.inserting_before(node):
            keywords = [self._mapped(mapping) for mapping in site.keywords]
        node.args = (keywords, given, *node.args)
        node.target = site.traced(node.target, routine, numbers)  # type: ignore[arg-type]
        self._counts.sites.append(site)

    def _after(self, action: Action, last: fx.Node, written: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Write a routine after the last node; return the operator's result, and the last node."""
        # Nodes are written before a mark, or their order would be reversed.
        with self._graph.inserting_after(written):
            mark = self._graph.call_function(_nothing)
        users = list(last.users)
        with self._graph.inserting_before(mark):
            changed = self._call(action, [last])
        written = mark.prev
        self._graph.erase_node(mark)
        for _, new in changed:
            for user in users:
                user.replace_input_with(last, new)
            last = new
        return last, written

    def _call(self, action: Action, values: Sequence[Any]) -> list[tuple[int, fx.Node]]:
        """Write the call of a routine; return the positions of its results, and their nodes."""
        if is_deferred(action):
            self._counts.forward = [*self._counts.forward, action.func]
            return []
        chosen = selected(action, values)
        indices = range(len(values)) if action.select is None else action.select
        routine = _routine(self._dispatcher, action)
        called = self._graph.call_function(routine, tuple(chosen), self._keywords(action))
        return [
            (index, self._graph.call_function(_item, (called, position)))
            for position, index in enumerate(indices)
            if chosen[position] is not None
        ]

    def _keywords(self, action: Action) -> dict[str, Any]:
        """A routine's keyword arguments in the graph: tensors become its buffers."""
        return self._mapped(action.kwargs)

    def _mapped(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        mapped: dict[str, Any] = _internals.map_tree(self._as_node, dict(keywords))
        return mapped

    def _as_node(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = f"_amanda_{next(self._numbers)}"
        self._module.register_buffer(name, value)
        _internals.announce_buffer(self._module, name)
        return self._graph.get_attr(name)


def _gradient_routine(dispatcher: Dispatcher, action: Action) -> Callable[..., Any]:
    """The function by which a compiled backward pass calls a routine."""
    if action.kind is ActionKind.REPLACE_BACKWARD_OP:
        return _replacement(action)
    return _routine(dispatcher, action)


def _routine(dispatcher: Dispatcher, action: Action) -> Callable[..., Any]:
    """The function by which the graph calls a routine.

    It returns a tuple with one tensor for each selected tensor: the routine's result, or the
    selected tensor. The gradient of an isolated routine passes straight through.
    """

    def amanda_routine(*tensors: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            if action.differentiable:
                result = action.func(*tensors, **kwargs)
            else:
                result = _internals.without_gradients(action.func, *tensors, **kwargs)
        except Exception as error:
            _name(error, action)
            raise
        count = len(tensors) if action.select is None else len(action.select)
        results = dispatcher.checked(action, result, count) if result is not None else tensors
        return tuple(
            _substituted(action, old, new) for old, new in zip(tensors, results, strict=True)
        )

    return amanda_routine


def _name(error: Exception, action: Action) -> None:
    """Add a note with the routine that has raised, while it is traced or identified.

    Drivers are not notified, as by :func:`amanda.engine.notes.note`: the error may not reach the
    program.
    """
    error.add_note(printable(f"amanda: raised in {action.routine} at op {action.op_id}"))


def _substituted(action: Action, old: Any, new: Any) -> Any:
    if new is None or new is old or old is None or action.differentiable:
        return old if new is None else new
    if old.requires_grad and torch.is_grad_enabled():
        return AmandaSubstitute.apply(old, [new.detach()])
    return new.detach()


def _replacement(action: Action) -> Callable[..., Any]:
    def amanda_replacement(*tensors: Any, **kwargs: Any) -> Any:
        try:
            return action.func(*tensors, **kwargs)
        except Exception as error:
            _name(error, action)
            raise

    return amanda_replacement


def _item(results: tuple[Any, ...], position: int) -> Any:
    return results[position]


def _nothing() -> None:
    """Called by a node that marks a place in the graph while it is written."""
