"""Which operators PyTorch's module hooks and torch-function modes see."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from amanda import OpContext
from amanda.interface.points import Point, PointContext
from amanda.python.references import Reference, nothing
from amanda_tools._operators.saved_tensors import node_of
from amanda_tools.coverage.peers import Peer

# -- module hooks -------------------------------------------------------------


@attrs.define
class Borders:
    """Tensors of one execution of an operator, and backward operators between their gradients.

    Attributes:
        op_id: id of the operator.
        inputs, outputs: weak references to its tensors.
        backward: ids of the backward operators that lead from the gradients of its outputs to those
            of its data.
    """

    op_id: str
    inputs: Sequence[weakref.ref[torch.Tensor]]
    outputs: Sequence[weakref.ref[torch.Tensor]]
    backward: Sequence[str]

    def are_within(self, given: frozenset[int], returned: frozenset[int]) -> bool:
        """True if a call with these arguments and results, given as ids of tensors, shows all of
        them."""
        return (
            bool(self.outputs)
            and all(id(ref()) in given for ref in self.inputs)
            and all(id(ref()) in returned for ref in self.outputs)
        )


@attrs.define
class HookedCall:
    """A running call of a module, and the operators first executed in it."""

    module: int
    ops: list[Borders] = attrs.field(factory=list)


class _HooksInThread(threading.local):
    """Of a thread the running calls, and node and tensor of the inputs of the current operator."""

    def __init__(self) -> None:
        self.calls: list[HookedCall] = []
        self.edges: list[tuple[Any, Any]] = []


class ModuleHooks(Peer):
    """Forward hooks on modules: their arguments are compared with the operators' tensors.

    The driver reports the calls of modules: real hooks would be recorded by PyTorch's tracers.
    An operator is seen if its inputs are arguments of the innermost module's call, or parameters or
    buffers of that module, and its outputs are among what the call returns. Full backward hooks
    would change the autograd graph (and fail on modules that work in place), so the backward part
    is derived: of an operator that is seen, the backward operator that consumes the gradients of
    its outputs is seen if it produces the gradients of all its data.
    """

    name = "module_hooks"
    framework = "pytorch"
    how = "measured"

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._local = _HooksInThread()

    def exit(self) -> None:
        self._local = _HooksInThread()

    def passed(self, point: PointContext) -> None:
        module = point.target
        if not isinstance(module, nn.Module):
            return
        if point.point is Point.MODULE_ENTRY:
            self._local.calls.append(HookedCall(id(module)))
        else:
            self._leave(module, point.inputs, point.outputs or ())

    def _leave(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        calls = self._local.calls
        call = None
        # Discard calls without an exit, as when a routine of another tool fails.
        while calls and (call is None or call.module != id(module)):
            call = calls.pop()
        if call is None or not call.ops:
            return
        own = itertools.chain(module.parameters(), module.buffers())
        given = frozenset(map(id, itertools.chain(inputs, own)))
        returned = frozenset(map(id, outputs))
        for op in call.ops:
            if op.are_within(given, returned):
                self._seen |= {op.op_id, *op.backward}

    def look(self, context: OpContext) -> None:
        # Before the operator: one that works in place gives its input another node.
        self._local.edges = [
            (node_of(tensor), tensor)
            for position, tensor in enumerate(context.get_inputs())
            if tensor is not None and tensor.requires_grad and context.get_value(position) is None
        ]

    def look_at_outputs(self, context: OpContext) -> None:
        edges, self._local.edges = self._local.edges, []
        if not self._local.calls:
            return
        op_id = context.get_op_id()
        inputs, outputs = (
            [t for t in tensors or () if t is not None]
            for tensors in (context.get_inputs(), context.get_outputs())
        )
        backward = list(find_border_nodes(op_id, outputs, edges))
        # The innermost module's call; whether it shows the operator is known when it returns.
        borders = Borders(op_id, _references(inputs), _references(outputs), backward)
        self._local.calls[-1].ops.append(borders)

    def seen(self) -> frozenset[str]:
        return frozenset(self._seen)


def _references(tensors: Sequence[Any]) -> list[Reference]:
    return [Reference(tensor, nothing) for tensor in tensors]


def find_border_nodes(
    op_id: str, outputs: Sequence[Any], edges: Sequence[tuple[Any, Any]]
) -> Iterator[str]:
    """Yield the ids of the nodes of the outputs that lead to all `edges` directly.

    Args:
        op_id: id of the forward operator.
        outputs: outputs of the forward operator.
        edges: node and tensor of each input that takes a gradient.
    """
    nodes = {id(node): node for node in map(node_of, outputs) if node is not None}
    counts: collections.Counter[str] = collections.Counter()
    for node in nodes.values():
        name = node.name().rpartition("::")[2]
        targets = [target for target, _ in node.next_functions]
        if all(_leads_to(targets, edge) for edge in edges):
            yield f"{op_id}/grad/{name}:{counts[name]}"
        counts[name] += 1


def _leads_to(targets: Sequence[Any], edge: tuple[Any, Any]) -> bool:
    node, tensor = edge
    if node is not None:
        return any(target is node for target in targets)
    # The gradient of a leaf goes to the node that accumulates it.
    return any(getattr(target, "variable", None) is tensor for target in targets)


# -- torch-function modes -----------------------------------------------------


@attrs.define
class FunctionCall:
    """A call of a PyTorch function that is written in Python.

    Attributes:
        frame: stack frame of the call; kept while the next operator may still belong to it, so that
            no other frame gets its identity.
        ops: ids of the operators first executed in it.
    """

    frame: types.FrameType
    ops: list[str] = attrs.field(factory=list)


class TorchFunction(Peer):
    """Calls of a ``TorchFunctionMode``, derived from the Python stack of each operator.

    With a second mode installed PyTorch would not take its fused paths (attention in eval mode), so
    it is derived. A mode is called for functions that the program calls, and is off while it
    handles a call. Of a function written in Python (``F.normalize``) it therefore sees the
    function, not the operators in it, unless there is only one. It is not called for an
    ``autograd.Function``, nor in the backward pass.
    """

    name = "torch_function"
    framework = "pytorch"
    how = "derived"

    def __init__(self) -> None:
        self._direct: set[str] = set()
        self._alone: set[str] = set()
        self._running: dict[int, FunctionCall] = {}
        self._fresh: dict[int, str] = {}

    def exit(self) -> None:
        self._running.clear()
        self._fresh.clear()

    def look(self, context: OpContext) -> None:
        thread, op_id = threading.get_ident(), context.get_op_id()
        frame = outermost_function()
        self._fresh[thread] = op_id
        call = self._running.get(thread)
        if frame is None:
            self._running.pop(thread, None)
            if not is_custom_function(context):
                self._direct.add(op_id)
            return
        if call is None or call.frame is not frame:
            call = self._running[thread] = FunctionCall(frame)
        call.ops.append(op_id)
        is_backward = id(frame.f_code) in _backward_codes()
        if len(call.ops) > 1 or is_backward or is_custom_function(context):
            self._alone.difference_update(call.ops)
        else:
            self._alone.add(op_id)

    def executed(self, op_id: str) -> None:
        # Only first executions are analysed: any other execution ends the pending call.
        if self._running:
            thread = threading.get_ident()
            if self._fresh.pop(thread, None) != op_id:
                self._running.pop(thread, None)

    def seen(self) -> frozenset[str]:
        return frozenset(self._direct | self._alone)


def is_custom_function(context: OpContext) -> bool:
    """True if an operator is an ``autograd.Function``, which the driver calls through a partial."""
    return isinstance(getattr(context.get_op(), "func", None), functools.partial)


def outermost_function() -> types.FrameType | None:
    """Return the frame of the outermost running PyTorch function that a torch-function mode is
    called for and that is written in Python; None if there is none in this thread."""
    codes = _function_codes()
    found: types.FrameType | None = None
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None:
        if id(frame.f_code) in codes:
            found = frame
        frame = frame.f_back
    return found


@functools.cache
def _function_codes() -> frozenset[int]:
    """Return the ``id`` of the code of each overridable function that is written in Python.

    Code that Dynamo makes may hold what has no hash, and then has none itself.
    """
    functions = itertools.chain(*torch.overrides.get_overridable_functions().values())
    return frozenset(id(f.__code__) for f in functions if isinstance(f, types.FunctionType))


@functools.cache
def _backward_codes() -> frozenset[int]:
    """Return the ``id`` of the code of the functions that start a backward pass."""
    entries: tuple[Any, ...] = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    return frozenset(id(entry.__code__) for entry in entries)


PEERS = (ModuleHooks, TorchFunction)
