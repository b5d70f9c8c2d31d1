"""Tensors of the toy framework and its automatic differentiation."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_SEQUENCE = itertools.count()


class _GradMode(threading.local):
    enabled: bool = True


_MODE = _GradMode()


class Tensor:
    """A flat list of numbers with a shape of up to two dimensions.

    As little is promised of tensors as frameworks promise: they cannot be hashed, and those
    without dimensions take no weak references, as the scalars of NumPy.

    Attributes:
        data: the numbers, row by row.
        shape: sizes of the dimensions; ``()`` for a single number.
        requires_grad: True if gradients flow to it.
        grad: the gradient that ``backward`` has accumulated, for a leaf.
        node: the graph node that computes its gradient; None for a leaf.
        index: which of the node's outputs it is.
        version: how often it was changed in place.
    """

    __slots__ = (
        "_accumulator",
        "data",
        "grad",
        "index",
        "node",
        "requires_grad",
        "shape",
        "version",
    )

    __hash__ = None  # type: ignore[assignment]

    def __new__(
        cls, data: list[float], shape: tuple[int, ...], requires_grad: bool = False
    ) -> Tensor:
        """A tensor of `cls`, or of the class that goes with the shape."""
        by_shape = Array if shape else Scalar
        return object.__new__(by_shape if cls is Tensor else cls)

    def __init__(
        self, data: list[float], shape: tuple[int, ...], requires_grad: bool = False
    ) -> None:
        if len(data) != math.prod(shape):
            raise ValueError(f"{len(data)} numbers do not have the shape {shape}")
        self.data = data
        self.shape = shape
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self.node: GradientNode | None = None
        self.index = 0
        self.version = 0
        self._accumulator: weakref.ref[AccumulateGrad] | None = None

    def __repr__(self) -> str:
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({self.tolist()}{gradient})"

    def tolist(self) -> Any:
        """The numbers as nested lists."""
        if not self.shape:
            return self.data[0]
        if len(self.shape) == 1:
            return list(self.data)
        width = self.shape[1]
        return [self.data[i * width : (i + 1) * width] for i in range(self.shape[0])]

    def alias(self) -> Tensor:
        """A tensor of the same numbers, in the same memory, outside of the graph."""
        return Tensor(self.data, self.shape)

    def become(self, other: Tensor) -> None:
        """Take over the value of `other` and its place in the graph (for in-place operators).

        Raises:
            RuntimeError: this is a leaf that requires a gradient.
        """
        if _MODE.enabled and self.requires_grad and self.node is None:
            raise RuntimeError("a leaf that requires a gradient cannot be changed in place")
        self.data[:] = other.data
        self.version += 1
        self.requires_grad, self.node, self.index = other.requires_grad, other.node, other.index

    def backward(self, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Accumulate the gradient of this tensor's sum in the leaves it depends on."""
        run_graph([self], None, retain_graph=retain_graph, create_graph=create_graph)

    def edge(self) -> Edge | None:
        """Where this tensor's gradient goes to; None if nowhere."""
        if not self.requires_grad:
            return None
        if self.node is not None:
            return self.node, self.index
        accumulator = self._accumulator() if self._accumulator is not None else None
        if accumulator is None:
            accumulator = AccumulateGrad(self)
            self._accumulator = weakref.ref(accumulator)
        return accumulator, 0


class Array(Tensor):
    """A tensor that takes weak references."""

    __slots__ = ("__weakref__",)


class Scalar(Tensor):
    """A tensor without dimensions: it takes no weak references."""

    __slots__ = ()


class Parameter(Array):
    """A leaf that is trained."""

    __slots__ = ()


class Buffer(Array):
    """State of a module that is not trained."""

    __slots__ = ()


def tensor(values: Any, requires_grad: bool = False) -> Tensor:
    """A tensor of a number, a list of numbers or a list of equally long lists."""
    return Tensor(*flattened(values), requires_grad=requires_grad)


def parameter(values: Any) -> Parameter:
    """A trainable leaf."""
    return Parameter(*flattened(values), requires_grad=True)


def buffer(values: Any) -> Buffer:
    """A leaf that belongs to a module and is not trained."""
    return Buffer(*flattened(values))


def flattened(values: Any) -> tuple[list[float], tuple[int, ...]]:
    """The numbers in `values`, row by row, and its shape.

    Raises:
        ValueError: rows differ in length.
    """
    if not isinstance(values, (list, tuple)):
        return [float(values)], ()
    rows = [row for row in values if isinstance(row, (list, tuple))]
    if not rows:
        return [float(value) for value in values], (len(values),)
    if len(rows) != len(values) or len({len(row) for row in rows}) > 1:
        raise ValueError(f"not a rectangle of numbers: {values!r}")
    return [float(value) for row in rows for value in row], (len(rows), len(rows[0]))


# -- automatic differentiation ------------------------------------------------

Gradients = list["Tensor | None"]


class GradientNode:
    """One backward operator: takes the gradients of its outputs, gives the gradients of its inputs.

    Attributes:
        name: the kind of the backward operator.
        edges: where the gradient of each input goes to.
        sequence: nodes made later have a higher number.
    """

    __slots__ = ("__weakref__", "_function", "_saved", "edges", "name", "output_count", "sequence")

    def __init__(
        self,
        name: str,
        edges: list[Edge | None],
        function: Callable[..., Sequence[Tensor | None]],
        saved: Sequence[Tensor] = (),
        output_count: int = 1,
    ) -> None:
        self.name = name
        self.edges = edges
        self.sequence = next_sequence()
        self.output_count = output_count
        self._function = function
        self._saved: list[tuple[Tensor, int]] | None = [(t, t.version) for t in saved]

    def run(self, grads: Gradients) -> Gradients:
        """The gradients of the inputs.

        Raises:
            RuntimeError: the graph was freed, or a saved tensor was changed in place.
        """
        if self._saved is None:
            raise RuntimeError(f"{self.name}: the graph is freed; use retain_graph=True")
        for saved, version in self._saved:
            if saved.version != version:
                raise RuntimeError(f"{self.name}: a tensor it needs was changed in place")
        return self._computed(grads, [saved for saved, _ in self._saved])

    def _computed(self, grads: Gradients, saved: list[Tensor]) -> Gradients:
        return list(self._function(grads, *saved))

    def free(self) -> None:
        """Let go of the saved tensors."""
        self._saved = None


class AccumulateGrad(GradientNode):
    """The backward operator at a leaf: adds to its ``grad``."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Tensor) -> None:
        super().__init__("AccumulateGrad", [], lambda grads: [])
        self.leaf = leaf

    def _computed(self, grads: Gradients, saved: list[Tensor]) -> Gradients:
        (grad,) = grads
        leaf = self.leaf
        leaf.grad = grad if leaf.grad is None or grad is None else total(leaf.grad, grad)
        return []

    def free(self) -> None:
        """A leaf has saved nothing."""


Edge = tuple[GradientNode, int]


def next_sequence() -> int:
    """A number below the sequence numbers of all nodes made from now on."""
    return next(_SEQUENCE)


def record(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    function: Callable[..., Sequence[Tensor | None]],
    saved: Sequence[Tensor] = (),
) -> None:
    """Make `outputs`, which are new, depend on `inputs` in the graph.

    Args:
        function: called with the list of the outputs' gradients (None where there
            is none) and the `saved` tensors; returns one gradient per input.
    """
    if not _MODE.enabled or not any(t.requires_grad for t in inputs):
        return
    node = GradientNode(name, [t.edge() for t in inputs], function, saved, len(outputs))
    attach(node, outputs)


def attach(node: GradientNode, outputs: Sequence[Tensor]) -> None:
    """Let `node` compute the gradients of `outputs`."""
    for index, output in enumerate(outputs):
        output.requires_grad, output.node, output.index = True, node, index


def total(left: Tensor, right: Tensor) -> Tensor:
    """The sum of two gradients."""
    out = Tensor([a + b for a, b in zip(left.data, right.data, strict=True)], left.shape)
    record("TotalBackward", [left, right], [out], lambda grads: [grads[0], grads[0]])
    return out


def grad(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
) -> Gradients:
    """The gradients of the sum of all `outputs` with respect to `inputs`."""
    return run_graph(outputs, inputs, retain_graph=retain_graph, create_graph=create_graph)


def run_graph(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor] | None,
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Gradients:
    """Run the backward operators of `outputs`; gradients for `inputs`, or accumulated."""
    pending = _PendingGradients()
    wanted = [tensor.edge() for tensor in inputs or ()]
    found: Gradients = [None] * len(wanted)
    with set_grad(create_graph):
        for output in outputs:
            pending.send(output.edge(), Tensor([1.0] * len(output.data), output.shape))
        while pending:
            node, gradients = pending.take()
            for i, edge in enumerate(wanted):
                if edge is not None and edge[0] is node:
                    found[i] = gradients[edge[1]]
            if inputs is not None and isinstance(node, AccumulateGrad):
                continue
            for edge, result in zip(node.edges, node.run(gradients), strict=False):
                pending.send(edge, result)
            if not retain_graph and not create_graph:
                node.free()
    return found


class _PendingGradients:
    """The gradients that have been computed for nodes that have not run."""

    def __init__(self) -> None:
        self._gradients: dict[GradientNode, Gradients] = {}
        self._queue: list[tuple[int, GradientNode]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def send(self, edge: Edge | None, gradient: Tensor | None) -> None:
        """Add a gradient to those of the node that an edge leads to."""
        if edge is None or gradient is None:
            return
        node, index = edge
        if node not in self._gradients:
            self._gradients[node] = [None] * node.output_count
            heapq.heappush(self._queue, (-node.sequence, node))
        slot = self._gradients[node]
        slot[index] = gradient if (old := slot[index]) is None else total(old, gradient)

    def take(self) -> tuple[GradientNode, Gradients]:
        """Remove the node that was made last, with its gradients."""
        _, node = heapq.heappop(self._queue)
        return node, self._gradients.pop(node)


def grad_enabled() -> bool:
    """True if operators are recorded for differentiation in this thread."""
    return _MODE.enabled


@contextmanager
def set_grad(enabled: bool) -> Iterator[None]:
    """Switch differentiation on or off in this thread."""
    old, _MODE.enabled = _MODE.enabled, enabled
    try:
        yield
    finally:
        _MODE.enabled = old


def no_grad() -> Any:
    """Within it, nothing is recorded for differentiation."""
    return set_grad(False)
