"""Backward operators: finding an operator's autograd nodes, and hooking them.

Nodes are told by autograd's sequence numbers: those an operator has made are
numbered from the value read before it (research/torch-driver.md, section 2).
Hooks hold the graph's tensors weakly or not at all: a hook that holds an
output would keep it alive for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from amanda.action import ActionKind, ActionPlan
from amanda.calls import BackwardCall
from amanda.dispatch import (
    BackwardExecution,
    Dispatcher,
    OpHandle,
    backward_is_settled,
    replaced_gradients,
)
from amanda.errors import CapabilityError
from amanda_torch import _internals
from amanda_torch.ops import BackwardOpView, TorchCall
from amanda_torch.routines import OWN_FUNCTIONS, AmandaGradients
from amanda_torch.scopes import is_constant

_MARK = "amanda"


class WeakTensor:
    """A forward tensor as a backward context finds it: called, it gives the tensor or None."""

    __slots__ = ("_modules", "_ref")

    def __init__(self, tensor: torch.Tensor, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._ref = weakref.ref(tensor)
        self._modules = modules

    def __call__(self) -> torch.Tensor | None:
        return self._ref()

    def constant(self) -> torch.Tensor | None:
        """The tensor if it is a parameter, buffer or variable."""
        tensor = self._ref()
        return tensor if is_constant(tensor, self._running) else None

    def _running(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self._modules) if module is not None]


def weak(tensors: Sequence[Any], modules: Callable[[], list[nn.Module]]) -> list[Any]:
    """Weak stand-ins for tensors; None stays None."""
    running = [weakref.ref(module) for module in modules()]
    return [None if tensor is None else WeakTensor(tensor, running) for tensor in tensors]


class GradientState:
    """What a thread has learned of one operator's backward operators.

    Attributes:
        form: the form of its gradient graph when it had settled, see :func:`form_of`.
        ids: its backward operators when last claimed; None before the first time.
        iteration: the iteration in which it last ran.
    """

    __slots__ = ("form", "ids", "iteration")

    def __init__(self) -> None:
        self.form: Any = None
        self.ids: tuple[str, ...] | None = None
        self.iteration = -1


def form_of(outputs: Any) -> Any:
    """The types of an output's node and of those before it; a cheap fingerprint."""
    if not isinstance(outputs, torch.Tensor):
        if not isinstance(outputs, (list, tuple)):
            return ()
        outputs = next((item for item in outputs if isinstance(item, torch.Tensor)), None)
        if outputs is None:
            return ()
    node = outputs.grad_fn
    if node is None:
        return ()
    return [type(node), *[type(edge[0]) for edge in node.next_functions]]


def node_name(node: Any) -> str:
    """``ConvolutionBackward0``, ``AccumulateGrad``; without the C++ namespace."""
    return str(node.name()).rpartition("::")[2]


def is_accumulation(node: Any) -> bool:
    """Whether a node adds a gradient to a leaf's ``grad``."""
    return hasattr(node, "variable")


def is_own(node: Any) -> bool:
    """Whether a node belongs to one of the functions that this package inserts."""
    return _internals.forward_class(node) in OWN_FUNCTIONS


def new_nodes(outputs: Sequence[Any], start: int) -> Iterator[Any]:
    """The nodes that an operator has made, and the accumulations that they feed.

    Args:
        outputs: the operator's output tensors.
        start: the sequence number read before the operator ran.
    """
    waiting = [t.grad_fn for t in outputs if t is not None and t.requires_grad]
    for tensor in outputs:
        base = _internals.base_of(tensor) if tensor is not None else None
        if base is not None and base.requires_grad:
            # In-place on a view gives the base a new node (CopySlices).
            waiting.append(base.grad_fn)
    seen = set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_own(node):
            waiting.extend(edge[0] for edge in node.next_functions)
        elif is_accumulation(node):
            yield node
        elif _internals.node_sequence(node) >= start:
            yield node
            waiting.extend(edge[0] for edge in node.next_functions)


class Claimer:
    """Assigns autograd nodes to forward operators, for one thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._states: dict[str, GradientState] = {}
        self._owners: Any = torch.utils.weak.WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self._states.clear()
        self._owners.clear()

    def state_of(self, op_id: str) -> GradientState:
        """What is known of one operator."""
        state = self._states.get(op_id)
        if state is None:
            state = self._states[op_id] = GradientState()
        return state

    def claim(
        self, plan: ActionPlan, call: TorchCall, outputs: Sequence[Any], start: int, iteration: int
    ) -> None:
        """Find and hook the backward operators of an operator that has just run."""
        state = self.state_of(plan.op_id)
        state.iteration = iteration
        scopes = self._dispatcher.scopes()
        handle = OpHandle(
            plan.op_id, scopes, weak(call.inputs, call.modules), weak(outputs, call.modules)
        )
        counts: dict[str, int] = {}
        ids = []
        for node in new_nodes(outputs, start):
            if is_accumulation(node) and not self._owns(node, plan.op_id, handle, iteration):
                continue
            name = node_name(node)
            number = counts.get(name, 0)
            counts[name] = number + 1
            backward_id = f"{plan.op_id}/grad/{name}:{number}"
            ids.append(backward_id)
            self._hook(node, name, backward_id, handle, call)
        state.ids = tuple(ids)
        state.form = None

    def settle(self, plan: ActionPlan, outputs: Any) -> None:
        """Remember the form of an operator whose backward operators need nothing."""
        state = self.state_of(plan.op_id)
        if state.ids is not None and backward_is_settled(plan, state.ids):
            state.form = form_of(outputs)

    def _owns(self, node: Any, op_id: str, handle: OpHandle, iteration: int) -> bool:
        """Whether an accumulation belongs to this operator: the iteration's first
        that consumed the leaf."""
        marks = node.metadata.setdefault(_MARK, {})
        fresh = [scope for scope in handle.scopes if scope not in marks]
        if not fresh:
            return False
        owner = self._owners.get(node.variable)
        if owner is not None and owner != op_id and self.state_of(owner).iteration == iteration:
            # The owner ran in this iteration; its node needed no hook.
            return False
        self._owners[node.variable] = op_id
        for scope in fresh:
            marks[scope] = op_id
        return True

    def _hook(
        self, node: Any, name: str, backward_id: str, handle: OpHandle, call: TorchCall
    ) -> None:
        backward = BackwardCall(
            op=BackwardOpView(name),
            op_id=backward_id,
            names=_input_names(node, call),
            inputs=handle.inputs,
            outputs=handle.outputs,
        )
        execution = BackwardExecution(self._dispatcher, handle, backward)
        before, after = execution.needed()
        hooks = NodeHooks(execution, is_accumulation(node))
        if before:
            node.register_prehook(hooks.before)
        if after:
            node.register_hook(hooks.after)


def _input_names(node: Any, call: TorchCall) -> list[str]:
    """For each gradient a node produces, the forward input that it belongs to."""
    if is_accumulation(node):
        return []
    edges = call.edges or [edge_of(tensor) for tensor in call.inputs]
    left = [(e, n) for e, n in zip(edges, call.names, strict=True) if e is not None]
    names = []
    for target, number in node.next_functions:
        while is_own(target) and target.next_functions:
            target, number = target.next_functions[0]
        found = next((i for i, (e, _) in enumerate(left) if e == (target, number)), None)
        names.append("" if found is None else left.pop(found)[1])
    return names


class NodeHooks:
    """The hooks of one autograd node, in one graph."""

    __slots__ = ("_execution", "_is_accumulation")

    def __init__(self, execution: BackwardExecution, accumulates: bool) -> None:
        self._execution = execution
        self._is_accumulation = accumulates

    def before(self, grad_outputs: tuple[Any, ...]) -> Any:
        """Prehook: the gradients to consume instead, None for the same."""
        values = list(grad_outputs)
        changed = self._execution.before(values)
        return None if changed is values else tuple(changed)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        values = list(grad_inputs)
        changed = self._execution.after(values, list(grad_outputs))
        if changed is values:
            return None
        for index, (old, new) in enumerate(zip(values, changed, strict=True)):
            if old is None and new is not None:
                raise CapabilityError(
                    f"op {self._execution.call.op_id} produces no gradient at position {index}, "
                    "so that PyTorch takes none in its place; return None there"
                )
        return tuple(changed)


def count_foreign(roots: Sequence[Any], start: int) -> int:
    """How many nodes of a backward pass belong to operators that ran before `start`."""
    waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    seen, foreign = set(waiting), 0
    while waiting:
        node = waiting.pop()
        if node is None or is_accumulation(node):
            continue
        foreign += _internals.node_sequence(node) < start
        following = [edge[0] for edge in node.next_functions if edge[0] not in seen]
        seen.update(following)
        waiting.extend(following)
    return foreign


# -- actions on the whole operator ----------------------------------------


class WholeOperator:
    """Routines on the gradients of an operator's inputs or outputs, in one graph."""

    __slots__ = ("_dispatcher", "_handle", "_kind")

    def __init__(self, dispatcher: Dispatcher, handle: OpHandle, kind: ActionKind) -> None:
        self._dispatcher = dispatcher
        self._handle = handle
        self._kind = kind

    def run(self, gradients: list[Any]) -> list[Any]:
        """The gradients after the routines of all scopes that have not ended."""
        if self._dispatcher.is_paused():
            return gradients
        for _, record in self._handle.records():
            for action in record.actions(self._kind):
                gradients = self._dispatcher.run(action, gradients)
        return gradients

    def replace(self, gradients: list[Any], grad_outputs: list[Any]) -> list[Any]:
        """The gradients that the replacement supplies, where it has not ended."""
        if not self._dispatcher.is_paused():
            for _, record in self._handle.records():
                for action in record.actions(ActionKind.REPLACE_BACKWARD_OP):
                    gradients = replaced_gradients(
                        self._dispatcher, action, grad_outputs, gradients
                    )
        return gradients


class Selected:
    """Calls a whole-operator routine where only some positions have a gradient."""

    __slots__ = ("_count", "_positions", "_whole")

    def __init__(self, whole: WholeOperator, positions: Sequence[int], count: int) -> None:
        self._whole = whole
        self._positions = positions
        self._count = count

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        full: list[Any] = [None] * self._count
        for position, gradient in zip(self._positions, gradients, strict=True):
            full[position] = gradient
        full = self._whole.run(full)
        return [full[position] for position in self._positions]


def gather_inputs(whole: WholeOperator, values: list[Any]) -> list[Any]:
    """`values` passed through an identity in which their gradients meet."""
    positions = [i for i, t in enumerate(values) if t is not None and t.requires_grad]
    return gather(whole, values, positions) if positions else values


def gather(whole: WholeOperator, values: list[Any], positions: Sequence[int]) -> list[Any]:
    """The tensors at `positions` passed through an identity in which their gradients meet."""
    change = Selected(whole, positions, len(values))
    results = _internals.apply_function(AmandaGradients, change, *[values[i] for i in positions])
    values = list(values)
    for position, result in zip(positions, results, strict=True):
        values[position] = result
    return values


def _is_made(tensor: Any, start: int) -> bool:
    """Whether an output's autograd node is a new one."""
    node = tensor.grad_fn if tensor is not None and tensor.requires_grad else None
    return node is not None and _internals.node_sequence(node) >= start


def hook_outputs(whole: WholeOperator, outputs: list[Any], start: int) -> list[Any]:
    """Let the routines see the output gradients together.

    Where the outputs come from one node, that node is hooked; otherwise they
    pass through an identity, as in :func:`gather_inputs`. An output that the
    operator only handed on (``x.to(x.dtype)``) has no backward operator.
    """
    positions = [i for i, tensor in enumerate(outputs) if _is_made(tensor, start)]
    if not positions:
        return outputs
    nodes = {outputs[i].grad_fn for i in positions}
    if len(nodes) > 1:
        return gather(whole, outputs, positions)
    (node,) = nodes
    numbers = {i: outputs[i].output_nr for i in positions}
    count = len(outputs)

    def before(grad_outputs: tuple[Any, ...]) -> Any:
        full = [grad_outputs[numbers[i]] if i in numbers else None for i in range(count)]
        changed = whole.run(full)
        if changed is full:
            return None
        result = list(grad_outputs)
        for position, number in numbers.items():
            result[number] = changed[position]
        return tuple(result)

    node.register_prehook(before)
    return outputs


def edge_of(tensor: Any) -> tuple[Any, int] | None:
    """Where the gradient of a tensor goes: its node and the number of its output."""
    if tensor is None or not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def hook_input_edges(
    dispatcher: Dispatcher,
    handle: OpHandle,
    kinds: Sequence[ActionKind],
    edges: Sequence[tuple[Any, int] | None],
    outputs: Sequence[Any],
    start: int,
) -> bool:
    """Let routines change or supply the input gradients of an operator of one node.

    View and in-place operators must be treated so: an identity on their inputs
    would cut them off from what they alias.

    Returns:
        False if the operator has several nodes, so that no single hook sees
        all its input gradients; nothing is hooked then.
    """
    nodes = [n for n in new_nodes(outputs, start) if not is_accumulation(n)]
    if len(nodes) != 1:
        return not nodes
    (node,) = nodes
    positions: dict[int, int] = {}
    for place, edge in enumerate(node.next_functions):
        for index, wanted in enumerate(edges):
            if wanted is not None and index not in positions and edge == wanted:
                positions[index] = place
                break
    count, output_count = len(edges), len(outputs)
    numbers = {i: t.output_nr for i, t in enumerate(outputs) if t.grad_fn is node}

    def after(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        full = [grad_inputs[positions[i]] if i in positions else None for i in range(count)]
        whole = WholeOperator(dispatcher, handle, ActionKind.AFTER_BACKWARD_OP)
        changed = full
        if ActionKind.REPLACE_BACKWARD_OP in kinds:
            given = [
                grad_outputs[numbers[i]] if i in numbers else None for i in range(output_count)
            ]
            changed = whole.replace(changed, given)
        if ActionKind.AFTER_BACKWARD_OP in kinds:
            changed = whole.run(changed)
        if changed is full:
            return None
        result = list(grad_inputs)
        for index, place in positions.items():
            if result[place] is not None:
                result[place] = changed[index]
        return tuple(result)

    node.register_hook(after)
    return True
