"""Backward operators in the code that a compiler makes of a captured graph.

A compiler such as inductor traces the forward and the backward pass of a graph together: it runs
the graph with autograd on, and then autograd's backward pass, whose operators are recorded. So the
autograd nodes exist while it traces. A :class:`JointOp` finds the nodes of one operator, as the
eager driver does, and hooks them: the computations of the hooks become a part of the compiled
backward pass::

    site = JointOp(plan, known, nodes, places)
    node.target = site.traced(node.target, routine, numbers)

The ids and actions of the backward operators are known from earlier, eager runs. Counters are no
part of the code: see :class:`RunCounts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from amanda.engine.backward import OpHandle
from amanda.engine.plan import ActionPlan
from amanda.errors import RoutineResultError, described
from amanda.inline import Counter
from amanda.inline.steps import StepKind, lowered
from amanda.interface.action import Action
from amanda.state import TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.executions import Past
from amanda_torch.autograd.functions import TracedGradients, TracedOperator
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import all_none
from amanda_torch.autograd.leaves import note_reached
from amanda_torch.autograd.nodes import is_accumulation, new_nodes, node_name
from amanda_torch.autograd.whole_operator import gather_inputs
from amanda_torch.compiled.deferred import Deferred, call_all
from amanda_torch.compiled.sizes import BySize
from amanda_torch.operators.calls import Place, item_at, put_item, tensors_of, with_tensors
from amanda_torch.operators.names import may_alias
from amanda_torch.routines import RoutineDispatcher

JOINT_COMPILERS = frozenset({"inductor", "aot_eager", "aot_eager_decomp_partition"})
"""The compilers that trace the backward pass with the forward pass."""

Routine = Callable[..., Sequence[Any]]
"""A routine as the code calls it: a function that returns a tensor for each argument."""


class OtherNodesError(Exception):
    """The compiler makes other backward operators than eager mode."""


def other_nodes_said(error: BaseException) -> str:
    """The text of an :class:`OtherNodesError`; "" for another error."""
    # Compilers wrap errors while they trace, and extend the text.
    found: BaseException | None = error
    while found is not None and not isinstance(found, OtherNodesError):
        found = found.__cause__ or found.__context__ or getattr(found, "inner_exception", None)
    return str(found).partition("\n")[0] if found is not None else ""


def is_deferred(action: Action) -> bool:
    """True if a routine is no part of the code: it is counted when the compiled code has run."""
    return lowered(action).kind is StepKind.COUNT


# -- what the eager driver has learned ----------------------------------------


@attrs.frozen
class LearnedNode:
    """One backward operator.

    Attributes:
        name: name of its autograd node.
        before, after: the actions on it.
    """

    name: str
    before: Sequence[Action]
    after: Sequence[Action]

    def traced(self) -> Sequence[Action]:
        """The actions whose routines are a part of the code."""
        return [action for action in (*self.before, *self.after) if not is_deferred(action)]


def learned(plan: ActionPlan, gradients: KnownGradients) -> Sequence[LearnedNode] | None:
    """The backward operators of an operator; None while analyses of them are pending."""
    if not plan.claims:
        return ()
    graph = gradients.graph
    if graph is not None:
        if graph.hooks is None:
            return None
        pairs = list(zip(graph.shape.names, graph.hooks, strict=True))
    else:
        # An operator whose nodes are all hooked at once, such as a view.
        pairs = [(hooks.name, hooks) for hooks in gradients.hooks.values()]
        pairs = [pair for pair in pairs if pair[0] != "AccumulateGrad"]
        if not gradients.hooks:
            return None
    found = []
    for name, hooks in pairs:
        routines = hooks.routines()
        if routines is None and not hooks.is_idle:
            return None
        before, after = ((), ()) if routines is None else (routines.before, routines.after)
        found.append(LearnedNode(name, before, after))
    return found


def reason_against_gradients(
    plan: ActionPlan,
    name: str,
    nodes: Sequence[LearnedNode],
    compiler: str,
    is_traceable: Callable[[Action], bool],
) -> str:
    """The reason why the actions on an operator's gradients cannot be compiled; "" if they can.

    Args:
        name: of the operator.
        nodes: result of :func:`learned`.
        compiler: its name.
    """
    if compiler not in JOINT_COMPILERS:
        return "a tool looks at backward operators"
    if plan.acts_on_gradients:
        if plan.replace is not None:
            return "a tool replaces an operator, and looks at its gradients"
        if may_alias(name):
            return "a routine gets the gradients of a view, or of what is written into"
    replaced = () if plan.replace_backward is None else (plan.replace_backward,)
    whole = (*plan.before_backward, *replaced, *plan.after_backward)
    for action in (*whole, *(action for node in nodes for action in node.traced())):
        if not is_traceable(action):
            return f"{action.routine} is not traceable"
    return ""


# -- counters, and the accumulations of leaves --------------------------------


@attrs.frozen
class LeafSite:
    """An operator that uses leaves, in code without written actions.

    Attributes:
        gradients: what is known of its backward operators.
        leaves: the numbers of the leaves among the inputs of the graph.
        past: its tensors in the run, for analyses.
    """

    gradients: KnownGradients
    leaves: Sequence[int]
    past: Past
    counters: Sequence[Deferred] = ()


class OtherBackwardError(Exception):
    """The backward pass of a compiler's code is not compiled as a whole."""


class RunCounts:
    """The additions to counters after compiled code, and after its backward pass.

    Args:
        claimer: hooks the accumulations of leaves, which are no part of the code.

    Attributes:
        forward: additions of forward operators; constant once the code has run.
        by_size: their additions by symbolic sizes; None without symbolic sizes.
        sites: the operators with backward operators.
        backward: additions of backward operators, beside the counters of the sites.
        handle: handle of the scopes in which these are counted.
        is_first: True before the first run, whose forward operators have been counted.
    """

    def __init__(self, claimer: Claimer) -> None:
        self._claimer = claimer
        self.forward: Sequence[Deferred] = ()
        self.by_size: BySize | None = None
        self.sites: list[JointOp | LeafSite] = []
        self.backward: list[Deferred] = []
        self.handle: OpHandle | None = None
        self.is_first = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Any], iteration: int) -> Any:
        """Run the code.

        Args:
            iteration: the thread's iteration.
        """
        start = _internals.sequence_number()
        result = function(*inputs)
        is_first, self.is_first = self.is_first, False
        if (self.sites or self.backward) and torch.is_grad_enabled():
            self._hook_all(result, inputs, start, iteration, is_first)
        if not is_first:
            later = self.forward if self.by_size is None else self.by_size.added(inputs)
            if later:
                TOOL_LOCK.hold(call_all, later)
        return result

    def _hook_all(
        self, result: Any, inputs: Sequence[Any], start: int, iteration: int, is_first: bool
    ) -> None:
        """Hook the compiled backward pass of a run, and the accumulations of leaves behind it."""
        outputs = tensors_of(result)
        made = new_nodes(outputs, start)
        nodes = [node for node in made if _internals.is_compiled_backward(node)]
        if is_first and made and not nodes:
            raise OtherBackwardError
        counters = [*self.backward, *(one for site in self.sites for one in site.counters)]
        handle = self.handle or self.sites[0].gradients.handle
        count = functools.partial(_count, self._claimer.dispatcher, handle, counters)
        for node in nodes:
            if counters:
                node.register_hook(count)
            self._hook(node, inputs, iteration)

    def _hook(self, node: Any, inputs: Sequence[Any], iteration: int) -> None:
        leaves = {id(t.variable): t for t, _ in node.next_functions if is_accumulation(t)}
        claimer = self._claimer
        reached: list[Any] = []
        for site in self.sites:
            used = [leaves[id(x)] for i in site.leaves if id(x := inputs[i]) in leaves]
            if used:
                claimer.note_run(site.gradients.handle.op_id, iteration)
                past = functools.partial(getattr, site, "past")
                reached += claimer.claim_leaves(used, site.gradients, iteration, past)
        if reached:
            # An accumulation may be listed twice, if operators share a leaf.
            node.register_prehook(functools.partial(note_reached, reached))


def _count(
    dispatcher: RoutineDispatcher, handle: OpHandle, later: Sequence[Deferred], *_: Any
) -> None:
    """A posthook of the compiled backward pass."""
    if not dispatcher.is_paused() and handle.records():
        _internals.without_modes(TOOL_LOCK.hold, call_all, later)


# -- while a compiler traces ---------------------------------------------------


class JointOp:
    """An operator of a graph with its backward operators.

    Args:
        plan: its actions.
        gradients: what is known of its backward operators.
        nodes: these; None if no tool analyses them.
        places: places of its inputs.

    Attributes:
        gradients: what is known of its backward operators.
        keywords: the keyword arguments of its routines, in order: the code gets tensors for them.
        counters: counters of the compiled backward pass.
        leaves: numbers of the graph's inputs whose accumulations may belong to it.
        past: None: no analysis of these is pending.
    """

    def __init__(
        self,
        plan: ActionPlan,
        gradients: KnownGradients,
        nodes: Sequence[LearnedNode] | None,
        places: Sequence[Place],
    ) -> None:
        self._plan = plan
        self._nodes = nodes
        self._places = places
        self.gradients = gradients
        self.past: Past | None = None
        self.counters: list[Counter] = []
        self.leaves: list[int] = []
        replaced = () if plan.replace_backward is None else (plan.replace_backward,)
        whole = (*plan.before_backward, *replaced, *plan.after_backward)
        inner = [action for node in nodes or () for action in node.traced()]
        self._actions = [*whole, *inner]

    @property
    def keywords(self) -> list[Mapping[str, Any]]:
        """See the class."""
        return [action.kwargs for action in self._actions]

    def traced(
        self,
        function: Callable[..., Any],
        routine: Callable[[Action], Routine],
        numbers: Sequence[int],
    ) -> Callable[..., Any]:
        """The function that the graph calls in place of the operator.

        Its first arguments are the keyword arguments of routines, and the operator's inputs that
        are inputs of the graph.

        Args:
            function: the operator's.
            routine: makes the function by which code calls a routine.
            numbers: the numbers of these inputs of the graph.
        """
        routines = {id(action): routine(action) for action in self._actions}

        def amanda_operator(
            keywords: Sequence[Mapping[str, Any]], given: Sequence[Any], *args: Any, **kwargs: Any
        ) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            bound = {
                id(action): functools.partial(routines[id(action)], **named)
                for action, named in zip(self._actions, keywords, strict=True)
            }
            start = _internals.sequence_number()
            result = self._run(function, args, kwargs, bound)
            if self._nodes is not None:
                leaves = self._claim(tensors_of(result), start, bound)
                # An input may be no leaf in a run of the code, which checks it.
                known = {x.grad_fn: number for x, number in zip(given, numbers, strict=True)}
                self.leaves = [known[node] for node in leaves if node in known]
            return result

        return amanda_operator

    # -- the operator as a whole ------------------------------------------

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: Mapping[int, Routine],
    ) -> Any:
        """Run the operator, with the routines on its gradients as a whole."""
        plan = self._plan
        if not plan.acts_on_gradients:
            return function(*args, **kwargs)
        values = [item_at(place, args, kwargs) for place in self._places]
        if plan.after_backward:
            # As in eager mode, leaves get their gradients from the last input to the first.
            change = functools.partial(_changed, plan.after_backward, bound)
            given = gather_inputs(change, values, identity=TracedGradients)
            changed, named = list(args), dict(kwargs)
            for place, value in zip(self._places, given, strict=True):
                if value is not None:
                    put_item(place, changed, named, value)
            values = given
            args, kwargs = tuple(changed), named
        result = function(*args, **kwargs)
        outputs = tensors_of(result)
        if plan.replace_backward is not None:
            outputs = self._replaced(plan.replace_backward, values, outputs, bound)
        if plan.before_backward:
            change = functools.partial(_changed, plan.before_backward, bound)
            outputs = gather_inputs(change, outputs, identity=TracedGradients)
        return with_tensors(result, tensors_of(result), outputs)

    def _replaced(
        self,
        action: Action,
        values: Sequence[Any],
        outputs: Sequence[Any],
        bound: Mapping[int, Routine],
    ) -> list[Any]:
        """The outputs, whose gradients a tool's replacement propagates to the inputs."""
        positions = [i for i, value in enumerate(values) if value is not None]

        def vjp(gradients: list[Any]) -> list[Any]:
            chosen = gradients if action.select is None else [gradients[i] for i in action.select]
            supplied = _supplied(action, bound[id(action)](*chosen), len(values))
            for index, (value, new) in enumerate(zip(values, supplied, strict=True)):
                if value is not None and new is not None and new.shape != value.shape:
                    raise RoutineResultError(
                        f"{action.routine} replaces the backward of op {action.op_id} and must "
                        f"return a gradient of shape {tuple(value.shape)} for its input {index}, "
                        f"got one of shape {tuple(new.shape)}"
                    )
            return [supplied[position] for position in positions]

        given = [values[position] for position in positions]
        return list(_internals.apply_function(TracedOperator, vjp, len(outputs), *outputs, *given))

    # -- its backward operators -------------------------------------------

    def _claim(self, outputs: Sequence[Any], start: int, bound: Mapping[int, Routine]) -> list[Any]:
        """Hook its autograd nodes; return the nodes of inputs of the graph behind them.

        Raises:
            OtherNodesError: they differ from those in eager mode.
        """
        assert self._nodes is not None
        every = new_nodes(outputs, start)
        nodes = [node for node in every if not _is_end(node)]
        # A compiler may begin the trace several times.
        counters = self.counters = []
        if not self._nodes:
            # Compilers copy tensors that eager mode returns as they are, as by dropout in eval
            # mode.
            nodes = []
        if len(nodes) != len(self._nodes):
            self._say_other(nodes)
        for node, known in zip(nodes, self._nodes, strict=True):
            if known.traced() and node_name(node) != known.name:
                self._say_other(nodes)
            _hook(node, known, bound, counters)
        return [node for node in every if _is_end(node)]

    def _say_other(self, nodes: Sequence[Any]) -> None:
        assert self._nodes is not None
        here, eager = [*map(node_name, nodes)], [node.name for node in self._nodes]
        raise OtherNodesError(
            f"{self._plan.op_id} has the backward operators {', '.join(here) or 'none'}, and in "
            f"eager mode {', '.join(eager) or 'none'}"
        )


def _is_end(node: Any) -> bool:
    """True if a node is a compiler's stand-in for an input of the graph."""
    return is_accumulation(node) or _internals.stands_for_leaf(node)


def _hook(
    node: Any, known: LearnedNode, bound: Mapping[int, Routine], counters: list[Counter]
) -> None:
    counted = [a.func for a in (*known.before, *known.after) if is_deferred(a)]
    before = [action for action in known.before if not is_deferred(action)]
    after = [action for action in known.after if not is_deferred(action)]

    def on_begin(grad_outputs: tuple[Any, ...]) -> Any:
        if all_none(grad_outputs):
            return None
        counters.extend(counted)  # type: ignore[arg-type]
        return tuple(_changed(before, bound, list(grad_outputs))) if before else None

    def on_end(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        if all_none(grad_outputs):
            return None
        return tuple(_changed(after, bound, list(grad_inputs)))

    if before or counted:
        node.register_prehook(on_begin)
    if after:
        node.register_hook(on_end)


def _changed(
    actions: Sequence[Action], bound: Mapping[int, Routine], gradients: list[Any]
) -> list[Any]:
    """The gradients after some routines."""
    for action in actions:
        indices = range(len(gradients)) if action.select is None else action.select
        results = bound[id(action)](*(gradients[index] for index in indices))
        for index, new in zip(indices, results, strict=True):
            gradients[index] = new
    return gradients


def _supplied(action: Action, result: Any, count: int) -> list[Any]:
    """The gradients that a replacement supplies for `count` inputs.

    Raises:
        RoutineResultError: their number is wrong.
    """
    gradients = list(result) if isinstance(result, (list, tuple)) else [result]
    if result is None or len(gradients) > count:
        raise RoutineResultError(
            f"{action.routine} replaces the backward of op {action.op_id} and must return one "
            f"gradient for each of its {count} inputs (None for none), got {described(result)}"
        )
    return gradients + [None] * (count - len(gradients))
