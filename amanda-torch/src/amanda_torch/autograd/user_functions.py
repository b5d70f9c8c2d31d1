"""Routines on the gradients of an ``autograd.Function`` as a whole.

Such a function has one node, and PyTorch runs its backward in Python, through a method that the
driver patches. The graph is not changed: the function's results stay the same objects, including
views and tensors that it has changed in place (``mark_dirty``). ::

    with created_nodes() as nodes:
        result = cls.apply(*args)
    function = FunctionNode(nodes[0], whole, call, values, tensors_of(result))

A replacement is kept in the node's metadata, where :func:`run_backward` finds it: the function's
own backward does not run then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from amanda.engine.plan import ActionPlan
from amanda.interface.action import ActionKind
from amanda_torch import _internals
from amanda_torch.autograd.nodes import BACKWARD, is_own, new_nodes
from amanda_torch.autograd.whole_operator import InputGradients, WholeOperator, hook_outputs
from amanda_torch.operators.calls import Place, TorchCall

# -- the nodes that a function makes ----------------------------------------


class _Creation(threading.local):
    nodes: list[Any] | None = None


_CREATION = _Creation()


def note_created(*args: Any, **kwargs: Any) -> None:
    """Note a new node while :func:`created_nodes` is entered; it replaces the nodes'
    ``__init__``."""
    if _CREATION.nodes is not None and args:
        _CREATION.nodes.append(args[0])
    # Of a node ``object`` takes all arguments, as long as nothing is in place of its own.
    if not (args and isinstance(args[0], _internals.FUNCTION_NODE)):
        object.__init__(*args, **kwargs)


@contextmanager
def created_nodes() -> Iterator[list[Any]]:
    """The nodes of ``autograd.Function``s that this thread makes within it.

    An operator in place on a view hides the node from the graph, within ``CopySlices``.
    """
    outer, _CREATION.nodes = _CREATION.nodes, []
    try:
        yield _CREATION.nodes
    finally:
        _CREATION.nodes = outer


def is_function_call(func: Any) -> bool:
    """True if `func` applies an ``autograd.Function``, outside of functorch's transforms."""
    return isinstance(func, functools.partial) and func.func is _internals.apply_function


# -- the backward of one node -------------------------------------------------


class _Backward(Protocol):
    is_replaced: bool

    def __call__(self, node: Any, vanilla: Callable[..., Any], gradients: Any) -> Any: ...


@_internals.not_counted_by_warnings
def run_backward(node: Any, vanilla: Callable[..., Any], gradients: tuple[Any, ...]) -> Any:
    """Run the backward of a node, or its replacement.

    Args:
        vanilla: PyTorch's method, which takes the node and `gradients`.
    """
    backward: _Backward | None = node.metadata.get(BACKWARD)
    if backward is None:
        return vanilla(node, *gradients)
    return backward(node, vanilla, gradients)


class _Skipped:
    """The backward of a node within an operator whose gradients a tool supplies: computes
    nothing."""

    __slots__ = ("_whole",)
    is_replaced = True

    def __init__(self, whole: WholeOperator) -> None:
        self._whole = whole

    def __call__(self, node: Any, vanilla: Callable[..., Any], gradients: Any) -> Any:
        if self._whole.replaces():
            return (None,) * len(node.needs_input_grad)
        return vanilla(node, *gradients)


def skip_functions(whole: WholeOperator, outputs: Sequence[Any], start: int) -> None:
    """Have the ``autograd.Function``s within an operator compute no gradient while it is replaced.

    PyTorch calls them with zeros where no gradient flows. Operators of ``torch.library`` are such
    functions.
    """
    for node in new_nodes(outputs, start):
        if _internals.forward_class(node) is not None and not is_own(node):
            node.metadata[BACKWARD] = _Skipped(whole)


class FunctionNode:
    """The node of one execution of an ``autograd.Function``, under the actions of its plan.

    It holds no tensors.

    Args:
        call: the execution.
        values: the inputs that it ran with.
        outputs: its output tensors.
    """

    def __init__(
        self,
        node: Any,
        whole: WholeOperator,
        call: TorchCall,
        values: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        self._node = node
        self._whole = whole
        self._arguments = [
            -1 if value is None else _argument(place)
            for place, value in zip(call.places, values, strict=True)
        ]
        self._shapes = [v.shape if v is not None and v.requires_grad else None for v in values]
        self._outputs = [_requires_gradient(output) for output in outputs]
        self._tensors = sorted(
            {i for i, arg in enumerate(call.args) if isinstance(arg, torch.Tensor)}
            | set(self._arguments) - {-1}
        )
        # In place on a view: the engine meets CopySlices, and calls no hooks of this node.
        self._is_hidden = all(o.grad_fn is not node for o in outputs if _requires_gradient(o))

    def hook_outputs(self, plan: ActionPlan, outputs: list[Any], start: int) -> None:
        """Register the routines before its backward, and a replacement of it."""
        if plan.before_backward and not self._is_hidden:
            hook_outputs(self._whole, outputs, start)
        if plan.replace_backward or self._is_hidden:
            numbers = {
                i: 0 if self._is_hidden else output.output_nr
                for i, output in enumerate(outputs)
                if self._outputs[i]
            }
            self._node.metadata[BACKWARD] = _FunctionBackward(
                self._whole,
                numbers,
                len(outputs),
                self._arguments,
                self._shapes,
                (bool(plan.replace_backward), self._is_hidden),
            )

    def hook_inputs(self, plan: ActionPlan) -> None:
        """Register the routines after its backward."""
        if plan.after_backward and not self._is_hidden:
            places = {i: self._tensors.index(k) for i, k in enumerate(self._arguments) if k >= 0}
            counts = (len(self._arguments), len(self._outputs))
            kinds = [ActionKind.AFTER_BACKWARD_OP]
            self._node.register_hook(InputGradients(self._whole, kinds, places, counts).after)


def _argument(place: Place) -> int:
    """An input's position among the arguments; -1 for one in a list, which gets no gradient."""
    if isinstance(place, str) or place[1] or place[0][0] != "arg":
        return -1
    return int(place[0][1])


def _requires_gradient(tensor: Any) -> bool:
    return tensor is not None and tensor.requires_grad


class _FunctionBackward:
    """The backward of a function's node: replaced, or enclosed in the routines of its operator.

    Args:
        numbers: output position to the position of its gradient at the node.
        count: the number of outputs.
        arguments: for each input its position in the arguments; -1 for an input in a list.
        shapes: the shape of each input that needs a gradient.
        how: whether it is replaced, and whether it runs the routines of its operator, since the
            node has no hooks.
    """

    def __init__(
        self,
        whole: WholeOperator,
        numbers: Mapping[int, int],
        count: int,
        arguments: Sequence[int],
        shapes: Sequence[Any],
        how: tuple[bool, bool],
    ) -> None:
        self._whole = whole
        self._numbers = numbers
        self._count = count
        self._arguments = arguments
        self._shapes = shapes
        self.is_replaced, self._is_enclosed = how

    def __call__(self, node: Any, vanilla: Callable[..., Any], gradients: Any) -> Any:
        if not self._whole.acts():
            return vanilla(node, *gradients)
        numbers, received = self._numbers, list(gradients)
        full = [received[numbers[i]] if i in numbers else None for i in range(self._count)]
        if self._is_enclosed:
            full = self._whole.before(full)
            for position, number in numbers.items():
                received[number] = full[position]
        if self.is_replaced and self._whole.replaces():
            supplied = self._whole.replaced_in(full, self._shapes)
            produced: list[Any] = [None] * len(node.needs_input_grad)
        else:
            result = vanilla(node, *received)
            produced = list(result) if isinstance(result, tuple) else [result]
            supplied = [produced[k] if k >= 0 else None for k in self._arguments]
        if self._is_enclosed:
            supplied = self._whole.after(supplied)
        for argument, gradient in zip(self._arguments, supplied, strict=True):
            if argument >= 0:
                produced[argument] = gradient
        return tuple(produced)
