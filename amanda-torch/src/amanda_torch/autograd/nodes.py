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

from amanda.engine.backward import BackwardExecution, OpHandle, backward_needs
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan, backward_is_settled
from amanda.errors import CapabilityError
from amanda.interface.calls import BackwardCall
from amanda_torch import _internals
from amanda_torch.autograd.functions import OWN_FUNCTIONS
from amanda_torch.operators.calls import TorchCall
from amanda_torch.operators.names import BackwardOpView, is_constant
from amanda_torch.thread.local import muted

_MARK = "amanda"
_ALIAS = "amanda_alias"


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


Edge = tuple[Any, int]
"""Where a gradient goes: an autograd node and the number of its output, or a leaf and -1."""


def edge_of(tensor: Any) -> Edge | None:
    """Where the gradient of a tensor goes; None if it has none."""
    if tensor is None or not tensor.requires_grad:
        return None
    if tensor.grad_fn is None:
        return tensor, -1
    return tensor.grad_fn, tensor.output_nr


def is_edge(target: Any, number: int, edge: Edge) -> bool:
    """Whether a gradient that a node sends to `target` goes where `edge` says."""
    if edge[1] == -1:
        return getattr(target, "variable", None) is edge[0]
    return target is edge[0] and number == edge[1]


def node_name(node: Any) -> str:
    """``ConvolutionBackward0``, ``AccumulateGrad``; without the C++ namespace."""
    return str(node.name()).rpartition("::")[2]


def is_accumulation(node: Any) -> bool:
    """Whether a node adds a gradient to a leaf's ``grad``."""
    return hasattr(node, "variable")


def set_alias(node: Any) -> None:
    """Mark the node of an alias that this package has made."""
    node.metadata[_ALIAS] = True


def is_own(node: Any) -> bool:
    """Whether a node belongs to a function or an alias that this package inserts."""
    if type(node).__name__ == "AliasBackward0":
        return _ALIAS in node.metadata
    return _internals.forward_class(node) in OWN_FUNCTIONS


def new_nodes(outputs: Sequence[Any], start: int, *, aliases: bool = False) -> Iterator[Any]:
    """The nodes that an operator has made, and the accumulations that they feed.

    Args:
        outputs: the operator's output tensors.
        start: the sequence number read before the operator ran.
        aliases: whether aliases made by this package count.
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
            if aliases and _ALIAS in node.metadata:
                yield node
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
        self,
        plan: ActionPlan,
        make_call: Callable[[], TorchCall],
        outputs: Sequence[Any],
        start: int,
        iteration: int,
    ) -> None:
        """Find and hook the backward operators of an operator that has just run.

        `make_call` describes its call; it is asked only for an analysis.
        """
        state = self.state_of(plan.op_id)
        state.iteration = iteration
        state.form = None
        bare = OpHandle(plan.op_id, self._dispatcher.scopes())
        full: tuple[TorchCall, OpHandle] | None = None
        counts: dict[str, int] = {}
        ids = []
        for node in new_nodes(outputs, start):
            if is_accumulation(node) and not self._owns(node, plan.op_id, bare, iteration):
                continue
            name = node_name(node)
            number = counts.get(name, 0)
            counts[name] = number + 1
            backward_id = f"{plan.op_id}/grad/{name}:{number}"
            ids.append(backward_id)
            before, after, pending = backward_needs(bare, backward_id)
            if not (before or after):
                continue
            backward = BackwardCall(op=BackwardOpView(name), op_id=backward_id)
            handle = bare
            if pending:
                full = full or self._described(plan.op_id, make_call(), outputs)
                call, handle = full
                backward.names = _input_names(node, call)
                backward.inputs, backward.outputs = handle.inputs, handle.outputs
            execution = BackwardExecution(self._dispatcher, handle, backward)
            NodeHooks(execution).register(node, before, after)
        state.ids = tuple(ids)

    def _described(
        self, op_id: str, call: TorchCall, outputs: Sequence[Any]
    ) -> tuple[TorchCall, OpHandle]:
        """The call, and a handle that leads to its tensors."""
        inputs = weak(call.inputs, call.modules)
        return call, OpHandle(op_id, self._dispatcher.scopes(), inputs, weak(outputs, call.modules))

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
        found = next((i for i, (e, _) in enumerate(left) if is_edge(target, number, e)), None)
        names.append("" if found is None else left.pop(found)[1])
    return names


class NodeHooks:
    """The hooks of one autograd node, in one graph."""

    __slots__ = ("_execution",)

    def __init__(self, execution: BackwardExecution) -> None:
        self._execution = execution

    def register(self, node: Any, before: bool, after: bool) -> None:
        """Hook a node at one or both of its ends."""
        if before:
            node.register_prehook(self.before)
        if after:
            node.register_hook(self.after)

    def before(self, grad_outputs: tuple[Any, ...]) -> Any:
        """Prehook: the gradients to consume instead, None for the same."""
        if all(gradient is None for gradient in grad_outputs) and grad_outputs:
            # Nothing flows here: a replacement has taken another way.
            return None
        values = list(grad_outputs)
        with muted():
            changed = self._execution.before(values)
        return None if changed is values else tuple(changed)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        if all(gradient is None for gradient in grad_outputs) and grad_outputs:
            return None
        values = list(grad_inputs)
        with muted():
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
