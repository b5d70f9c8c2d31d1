"""Backward operators: finding an operator's autograd nodes, and hooking them.

A :class:`Claimer` does it right after the operator has run::

    start = _internals.sequence_number()
    result = operator(...)
    claimer.claim(plan, known, make_call, result, start, iteration)

Autograd numbers the nodes that a thread makes: those of the operator are the nodes behind its
outputs whose number is at least `start`. Hooks hold the graph's tensors weakly or not at all: a
hook that holds an output keeps the graph alive, which keeps the hook alive.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amanda.engine.backward import BackwardExecution, OpHandle, PastTensor, backward_needs
from amanda.engine.plan import ActionPlan
from amanda.errors import CapabilityError
from amanda.interface.action import ActionKind, InstPoint
from amanda.interface.calls import BackwardCall, NamedOp
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.functions import OWN_FUNCTIONS
from amanda_torch.operators.calls import TorchCall, tensors_of
from amanda_torch.operators.names import is_constant
from amanda_torch.routines import BackwardRoutines, RoutineDispatcher

_MARK = "amanda"
"""Key in a node's metadata: by scope, the operator that owns an accumulation."""

_REACHED = "amanda_reached"
"""Key in the metadata of a leaf's accumulation: by scope, its :class:`Reached`."""

_graph_task = _internals.graph_task
_without_modes = _internals.without_modes

_OWN_NODES = frozenset(map(_internals.node_class, OWN_FUNCTIONS))

BACKWARD = "amanda_backward"
"""Key in a node's metadata: what runs in the place of its backward, or around it; see
:mod:`amanda_torch.autograd.user_functions`."""

_ALIAS = "amanda_alias"
"""Key in the metadata of the nodes of aliases that this package has made."""


def past_tensors(
    tensors: Sequence[Any], modules: Callable[[], list[nn.Module]]
) -> list[PastTensor | None]:
    """Tensors for backward analyses, held weakly; None stays None.

    Args:
        modules: a function that gives the running modules, innermost first.
    """
    running = [weakref.ref(module) for module in modules()]

    def still_running() -> list[nn.Module]:
        return [module for module in (ref() for ref in running) if module is not None]

    def current_value(tensor: Any) -> Any:
        return tensor if is_constant(tensor, still_running) else None

    return [None if tensor is None else PastTensor(tensor, current_value) for tensor in tensors]


class KnownGradients:
    """Facts that a thread has learned about the backward operators of one operator, under one plan.

    Attributes:
        handle: leads hooks to the operator's records; holds no tensors.
        hooks: by backward id, where no analysis is pending: they hold nothing of one graph,
            and serve every execution.
        form: the form of its gradient graph if no node of it needs a hook, see
            :func:`form_of`; None if that is not known.
    """

    __slots__ = ("form", "handle", "hooks")

    def __init__(self, handle: OpHandle) -> None:
        self.handle = handle
        self.hooks: dict[str, NodeHooks] = {}
        self.form: Any = None


def form_of(outputs: Any) -> Any:
    """The form of an operator's gradient graph: the types of the node of its first output, and
    of the nodes that follow that one.

    A fingerprint that costs little: an operator whose graph changes its form, such as linear
    when its bias begins to need a gradient, changes it there.
    """
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
"""Where a gradient goes: an autograd node and the number of its input, or a leaf and -1."""


def edge_of(tensor: Any) -> Edge | None:
    """Where the gradient of a tensor goes; None if the tensor needs none."""
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
    """``ConvolutionBackward0``, ``AccumulateGrad``: the name without the C++ namespace."""
    return str(node.name()).rpartition("::")[2]


def is_accumulation(node: Any) -> bool:
    """Whether a node adds a gradient to a leaf's ``grad``."""
    return hasattr(node, "variable")


def is_replaced(node: Any) -> bool:
    """Whether a tool supplies the gradients of a node, which computes none."""
    backward = node.metadata.get(BACKWARD)
    return backward is not None and bool(backward.is_replaced)


def set_alias(node: Any) -> None:
    """Mark the node of an alias that this package has made."""
    node.metadata[_ALIAS] = True


def is_own(node: Any) -> bool:
    """Whether a node belongs to a function or an alias that this package inserts."""
    cls = type(node)
    return cls in _OWN_NODES or (cls.__name__ == "AliasBackward0" and _ALIAS in node.metadata)


def new_nodes(outputs: Sequence[Any], start: int, *, aliases: bool = False) -> list[Any]:
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
            # An in-place operator on a view gives the base a new node, too (CopySlices).
            waiting.append(base.grad_fn)
    found, seen = [], set()
    # Breadth first: the list grows while it is read.
    for node in waiting:
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_own(node):
            if aliases and _ALIAS in node.metadata:
                found.append(node)
        elif hasattr(node, "variable"):
            found.append(node)
            continue
        elif _internals.node_sequence(node) >= start:
            found.append(node)
        else:
            continue
        waiting.extend([edge[0] for edge in node.next_functions])
    return found


class Claimer:
    """Finds the autograd nodes of forward operators and hooks them, for one thread."""

    def __init__(self, dispatcher: RoutineDispatcher) -> None:
        self._dispatcher = dispatcher
        self._iterations: dict[str, int] = {}
        self._owners: Any = torch.utils.weak.WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self._iterations.clear()
        self._owners.clear()

    def note_run(self, op_id: str, iteration: int) -> None:
        """Remember the iteration in which an operator with gradients last ran."""
        self._iterations[op_id] = iteration

    def claim(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        make_call: Callable[[], TorchCall],
        result: Any,
        start: int,
        iteration: int,
    ) -> None:
        """Find and hook the backward operators of an operator that has just run.

        Args:
            known: what is known of them, to be added to.
            make_call: describes its call; it is asked only for an analysis.
            result: the operator's result.
            start: the sequence number read before it ran.
            iteration: the iteration of its thread.
        """
        op_id = plan.op_id
        self._iterations[op_id] = iteration
        if known.form is not None and known.form == form_of(result):
            return
        outputs = tensors_of(result)
        counts: dict[str, int] = {}
        described = _Described(make_call, outputs)
        is_settled = STATE.cache and not plan.acts_on_gradients
        reached: list[Reached] = []
        for node in new_nodes(outputs, start):
            if plan.replace_backward is not None and is_replaced(node):
                continue
            fresh = None
            if hasattr(node, "variable"):
                fresh = self._owned(node, op_id, known.handle, iteration)
                if not fresh:
                    _add_reached(reached, node, known.handle)
                    continue
            name = node_name(node)
            number = counts.get(name, 0)
            counts[name] = number + 1
            backward_id = f"{op_id}/grad/{name}:{number}"
            hooks = known.hooks.get(backward_id)
            if hooks is None:
                hooks = self._new_hooks(node, name, backward_id, known, described)
            is_settled = is_settled and hooks.is_idle
            if fresh is None:
                hooks.register(node)
            elif not hooks.is_idle:
                some = hooks if len(fresh) == len(known.handle.scopes) else hooks.of_scopes(fresh)
                some.register_accumulation(node, fresh)
                _add_reached(reached, node, known.handle)
        if reached:
            is_settled = False
            for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
                node.register_prehook(functools.partial(_note_reached, reached))
        known.form = form_of(result) if is_settled else None

    def _new_hooks(
        self,
        node: Any,
        name: str,
        backward_id: str,
        known: KnownGradients,
        described: _Described,
    ) -> NodeHooks:
        """Hooks for a node; those for an analysis find the tensors of this execution."""
        before, after, pending = backward_needs(known.handle, backward_id)
        call, handle = BackwardCall(NamedOp(name), backward_id), known.handle
        if pending:
            call.names = _input_names(node, described.call())
            handle = described.handle(known.handle)
            call.inputs, call.outputs = handle.inputs, handle.outputs
        is_shared = STATE.cache and not pending
        hooks = NodeHooks(self._dispatcher, handle, call, (before, after), is_shared)
        if is_shared:
            known.hooks[backward_id] = hooks
        return hooks

    def _owned(self, node: Any, op_id: str, handle: OpHandle, iteration: int) -> set[Any]:
        """The scopes in which a leaf's accumulation begins to belong to this operator: it does to
        the first operator of the iteration that used the leaf."""
        # A leaf has one accumulation node as long as some graph uses it: the marks on it keep
        # a second operator, or a second graph, from hooking it again.
        marks = node.metadata.setdefault(_MARK, {})
        fresh = set(handle.scopes).difference(marks)
        if not fresh:
            return fresh
        owner = self._owners.get(node.variable)
        if owner is not None and owner != op_id and self._iterations.get(owner) == iteration:
            # The owner ran in this iteration. It left no mark, since its backward operators
            # need no hooks.
            return set()
        self._owners[node.variable] = op_id
        for scope in fresh:
            marks[scope] = op_id
        return fresh


class Reached:
    """The backward passes that have come to a leaf through operators of one scope.

    All graphs that use a leaf share its accumulation, also graphs that were made before the scope,
    under ``disabled()``, or by threads that the scope does not cover: in their passes the routines
    of the scope do not act.

    Attributes:
        passes: the last of them, by the numbers of :func:`amanda_torch._internals.graph_task`.
        always: whether all later passes are taken for such.
    """

    __slots__ = ("always", "passes")

    def __init__(self) -> None:
        self.passes: collections.deque[int] = collections.deque(maxlen=_PASSES)
        self.always = False


_PASSES = 64
"""Backward passes that may run at once in different threads over one leaf."""


def _add_reached(found: list[Reached], node: Any, handle: OpHandle) -> None:
    """Find what has to be told when a pass comes to an operator that uses the leaf of `node`."""
    known = node.metadata.get(_REACHED)
    if known:
        for scope in handle.scopes:
            if scope in known:
                found.append(known[scope])  # noqa: PERF401 - a comprehension costs a frame


def _note_reached(reached: Sequence[Reached], gradients: Sequence[Any]) -> None:
    """A prehook of the nodes that have made an operator's outputs."""
    for gradient in gradients:
        if gradient is not None:
            break
    else:
        return
    task, makes_graph = _graph_task(), torch.is_grad_enabled()
    for one in reached:
        one.passes.append(task)
        # The graph of this pass may lead to the leaf by nodes that no operator owns.
        one.always = one.always or makes_graph


class _Described:
    """The call of an operator, which is described when the first analysis asks for it."""

    __slots__ = ("_call", "_handle", "_make_call", "_outputs")

    def __init__(self, make_call: Callable[[], TorchCall], outputs: Sequence[Any]) -> None:
        self._make_call = make_call
        self._outputs = outputs
        self._call: TorchCall | None = None
        self._handle: OpHandle | None = None

    def call(self) -> TorchCall:
        """The call."""
        self._call = self._call or self._make_call()
        return self._call

    def handle(self, bare: OpHandle) -> OpHandle:
        """A handle like `bare`, which also leads to the tensors of the call."""
        if self._handle is None:
            call = self.call()
            scopes = [scope for scope in (ref() for ref in bare.scopes) if scope is not None]
            inputs = past_tensors(call.inputs, call.modules)
            outputs = past_tensors(self._outputs, call.modules)
            self._handle = OpHandle(bare.op_id, scopes, inputs, outputs)
        return self._handle


def _input_names(node: Any, call: TorchCall) -> list[str]:
    """The name of the forward input whose gradient each output of a node is; "" for none."""
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
    """The hooks of one backward operator, on its autograd node in any graph.

    Attributes:
        is_idle: whether there is nothing to do before it, and nothing after it.
    """

    __slots__ = (
        "_after",
        "_before",
        "_dispatcher",
        "_execution",
        "_handle",
        "_is_shared",
        "is_idle",
    )

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        handle: OpHandle,
        call: BackwardCall,
        needs: tuple[bool, bool],
        is_shared: bool,
    ) -> None:
        """Make hooks that are on no node yet.

        Args:
            needs: whether there is something to do before the operator, and after it.
            is_shared: whether they serve every execution of it.
        """
        self._dispatcher = dispatcher
        self._handle = handle
        self._execution = BackwardExecution(dispatcher, handle, call)
        self._before, self._after = needs
        self._is_shared = is_shared
        self.is_idle = not any(needs)

    def register(self, node: Any) -> None:
        """Hook a node at one or both of its ends."""
        if self._before:
            node.register_prehook(self.before)
        if self._after:
            node.register_hook(self.after)

    def of_scopes(self, scopes: set[Any]) -> NodeHooks:
        """These hooks for some of their scopes: another operator has hooked the node for others."""
        handle = self._handle
        left = [scope for scope in (ref() for ref in handle.scopes if ref in scopes) if scope]
        some = OpHandle(handle.op_id, left, handle.inputs, handle.outputs)
        needs = self._before, self._after
        return NodeHooks(self._dispatcher, some, self._execution.call, needs, False)

    def register_accumulation(self, node: Any, scopes: set[Any]) -> None:
        """Hook a leaf's accumulation: for the passes that come to it through these scopes."""
        known = node.metadata.setdefault(_REACHED, {})
        reached: list[Reached] = []
        for scope in scopes:
            reached.append(known.setdefault(scope, Reached()))  # noqa: PERF401 - likewise

        def before(grad_outputs: tuple[Any, ...]) -> Any:
            for one in reached:
                if one.always or _graph_task() in one.passes:
                    return self.before(grad_outputs)
            return None

        def after(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
            for one in reached:
                if one.always or _graph_task() in one.passes:
                    return self.after(grad_inputs, grad_outputs)
            return None

        if self._before:
            node.register_prehook(before)
        if self._after:
            node.register_hook(after)

    def before(self, grad_outputs: tuple[Any, ...]) -> Any:
        """Prehook: the gradients to consume instead, None for the same."""
        if _nothing_flows(grad_outputs):
            return None
        dispatcher = self._dispatcher
        settled = dispatcher.settled.get(self) or self._settle()
        if settled is None or not dispatcher.is_plain_thread(thread := vars(STATE)):
            values = list(grad_outputs)
            changed = _without_modes(self._execution.before, values)
        elif settled.blind_before:
            if settled.before:
                dispatcher.run_blind(settled.before, thread)
            return None
        else:
            values = list(grad_outputs)
            changed = _without_modes(dispatcher.run_all, settled.before, values)
        return None if changed is values else tuple(changed)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        if _nothing_flows(grad_outputs):
            return None
        dispatcher = self._dispatcher
        settled = dispatcher.settled.get(self) or self._settle()
        values = list(grad_inputs)
        if settled is None or not dispatcher.is_plain_thread(thread := vars(STATE)):
            changed = _without_modes(self._execution.after, values, list(grad_outputs))
        elif settled.blind_after:
            if settled.after:
                dispatcher.run_blind(settled.after, thread)
            return None
        else:
            changed = _without_modes(dispatcher.run_all, settled.after, values)
        if changed is values:
            return None
        for index, (old, new) in enumerate(zip(values, changed, strict=True)):
            if old is None and new is not None:
                raise CapabilityError(
                    f"op {self._execution.call.op_id} produces no gradient at position {index}, "
                    "so that PyTorch takes none in its place; return None there"
                )
        return tuple(changed)

    def _settle(self) -> BackwardRoutines | None:
        """Keep the routines for the next executions; None if an analysis has yet to run, and where
        a routine replaces the operator."""
        settled = self._dispatcher.settled
        if not (self._is_shared and STATE.cache):
            return None
        records = self._handle.records()
        children = [record.children.get(self._execution.call.op_id) for _, record in records]
        for (scope, _), child in zip(records, children, strict=True):
            if child is None or child.actions(ActionKind.REPLACE_BACKWARD_OP):
                return None
            for point in (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP):
                if child.pending(point) and scope.analyses_at(point):
                    return None
        if not children:
            return None
        before, after = (
            [action for child in children if child for action in child.actions(kind)]
            for kind in (ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP)
        )
        routines = settled[self] = BackwardRoutines(before, after)
        return routines


def _nothing_flows(gradients: Sequence[Any]) -> bool:
    """Whether a node gets no gradient: a replacement of its operator has taken another way."""
    for gradient in gradients:
        if gradient is not None:
            return False
    return bool(gradients)


def count_foreign(roots: Sequence[Any], start: int) -> int:
    """How many nodes of a backward pass are of operators that ran before number `start`."""
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
