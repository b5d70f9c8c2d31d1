"""minigrad: seven operators on NumPy arrays, with automatic differentiation.

It stands in for your framework, and knows nothing of Amanda. A user calls operators on
tensors, then :func:`backward`, and reads ``grad`` of the leaves.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Gradients = list["MiniTensor | None"]


class Node:
    """One backward operator: from the gradients of its outputs to those of its inputs.

    Attributes:
        name: what kind it is.
        edges: for each input the node that its gradient goes to, and which of that node's
            outputs it belongs to; None where no gradient is wanted.
        vjp: computes arrays of gradients from arrays of gradients.
        outputs: how many there are.
        number: nodes made later have a higher one.
    """

    _numbers = itertools.count()

    def __init__(
        self, name: str, edges: list[Any], vjp: Callable[..., Any], outputs: int = 1
    ) -> None:
        self.name, self.edges, self.vjp, self.outputs = name, edges, vjp, outputs
        self.number = next(Node._numbers)

    def run(self, grads: Gradients) -> Gradients:
        """The gradients of the inputs."""
        arrays = self.vjp([None if grad is None else grad.data for grad in grads])
        return [None if array is None else MiniTensor(array) for array in arrays]


class Leaf(Node):
    """Where a gradient ends."""

    def __init__(self) -> None:
        super().__init__("leaf", [], lambda grads: [])
        self.grad: MiniTensor | None = None

    def run(self, grads: Gradients) -> Gradients:
        """Add to the gradient."""
        self.grad = total(self.grad, grads[0])
        return []


class MiniTensor:
    """An array of numbers.

    Attributes:
        data: the array.
        edge: the node that its gradient goes to, and which of that node's outputs it is;
            None if it has no gradient.
    """

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data = np.asarray(data, dtype=np.float64)
        self.edge: tuple[Node, int] | None = (Leaf(), 0) if requires_grad else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.data, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return self.data.shape

    @property
    def grad(self) -> MiniTensor | None:
        """The gradient of a leaf, after :func:`backward`."""
        node = self.edge[0] if self.edge else None
        return node.grad if isinstance(node, Leaf) else None


class MiniParameter(MiniTensor):
    """A leaf that is trained."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=True)


class MiniOperator:
    """A function of arrays, and then of attributes by keyword.

    It returns the output, or a tuple of them, and a function from their gradients (None
    where there is none) to those of the inputs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.function = function
        self.signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return execute(self, list(bound.args), bound.kwargs)


def execute(
    op: MiniOperator, inputs: Sequence[MiniTensor | None], attributes: dict[str, Any]
) -> Any:
    """Run an operator; every call of one comes through here."""
    arrays = [None if tensor is None else tensor.data for tensor in inputs]
    results, vjp = op.function(*arrays, **attributes)
    outputs = [
        MiniTensor(array) for array in (results if isinstance(results, tuple) else [results])
    ]
    edges = [None if tensor is None else tensor.edge for tensor in inputs]
    if _mode.enabled and any(edges):
        node = Node(f"{op.__name__}_backward", edges, vjp, len(outputs))
        for index, output in enumerate(outputs):
            output.edge = (node, index)
    return tuple(outputs) if isinstance(results, tuple) else outputs[0]


def backward(*outputs: MiniTensor) -> None:
    """Add the gradients of the sum of `outputs` to their leaves."""
    run_graph(outputs)


def run_graph(outputs: Sequence[MiniTensor]) -> None:
    """Run the nodes that `outputs` lead to, the latest first."""
    waiting: dict[Node, Gradients] = {}

    def send(edge: tuple[Node, int] | None, grad: MiniTensor | None) -> None:
        if edge is not None and grad is not None:
            node, index = edge
            grads = waiting.setdefault(node, [None] * node.outputs)
            grads[index] = total(grads[index], grad)

    for output in outputs:
        send(output.edge, MiniTensor(np.ones_like(output.data)))
    while waiting:
        node = max(waiting, key=lambda node: node.number)
        for edge, grad in zip(node.edges, node.run(waiting.pop(node)), strict=True):
            send(edge, grad)


def total(left: MiniTensor | None, right: MiniTensor | None) -> MiniTensor | None:
    """The sum of two gradients."""
    if left is None or right is None:
        return right if left is None else left
    return MiniTensor(left.data + right.data)


class _Mode(threading.local):
    enabled = True


_mode = _Mode()


def grad_enabled() -> bool:
    """True if operators leave nodes in this thread."""
    return _mode.enabled


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Within it, operators leave no nodes."""
    old, _mode.enabled = _mode.enabled, False
    try:
        yield
    finally:
        _mode.enabled = old


# -- operators ----------------------------------------------------------------

random = np.random.default_rng(0)
"""What dropout draws from."""


@MiniOperator
def add(left, right):
    """The sum."""
    return left + right, lambda grads: [grads[0], grads[0]]


@MiniOperator
def mul(left, right):
    """The product of the elements."""
    return left * right, lambda grads: [grads[0] * right, grads[0] * left]


@MiniOperator
def relu(x):
    """The positive part."""
    positive = x > 0
    return x * positive, lambda grads: [grads[0] * positive]


@MiniOperator
def linear(x, weight, bias=None):
    """A weight row for each output, and a bias."""

    def vjp(grads):
        (grad,) = grads
        return [grad @ weight, grad.T @ x, None if bias is None else grad.sum(axis=0)]

    return x @ weight.T + (0.0 if bias is None else bias), vjp


@MiniOperator
def cat(*tensors):
    """One after the other, along the first dimension."""
    ends = np.cumsum([len(tensor) for tensor in tensors])
    return np.concatenate(tensors), lambda grads: np.split(grads[0], ends[:-1])


@MiniOperator
def split(x, *, sections):
    """Equal parts of the first dimension."""
    parts = tuple(np.split(x, sections))

    def vjp(grads):
        whole = [
            np.zeros_like(part) if grad is None else grad
            for part, grad in zip(parts, grads, strict=True)
        ]
        return [np.concatenate(whole)]

    return parts, vjp


@MiniOperator
def dropout(x, *, rate):
    """Without some elements, at random; the others are larger instead."""
    kept = (random.random(x.shape) >= rate) / (1 - rate)
    return x * kept, lambda grads: [grads[0] * kept]
