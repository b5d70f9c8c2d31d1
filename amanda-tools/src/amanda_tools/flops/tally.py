"""What was executed: how often with which shapes. Formulas are applied when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import attrs

from amanda.tools.description import OpDescription
from amanda_tools._operators.cost import Formula
from amanda_tools._operators.handover import Handover
from amanda_tools._operators.parameters import Parameter
from amanda_tools._operators.signature import CallShapes, Shape, Signature
from amanda_tools.flops.gradients import Formula as GradientFormula
from amanda_tools.flops.gradients import GradientShapes

KeyT = TypeVar("KeyT")

_FOLD = 1024
"""Different shapes of one operator that are kept before they become a number."""


@attrs.define(eq=False)
class Totals:
    """What the executions of an operator add up to.

    Attributes:
        executions: how many there were.
        macs: their multiply-accumulates.
        unknown: how many of them had a form that the formula does not know.
    """

    executions: int = 0
    macs: int = 0
    unknown: int = 0


@attrs.define(eq=False)
class Tally(Generic[KeyT]):
    """Counts executions by shapes, cheaply, and turns them into numbers later."""

    macs_of: Callable[[KeyT], int]
    _runs: dict[KeyT, int] = attrs.field(factory=dict)
    _folded: Totals = attrs.field(factory=Totals)

    def add(self, key: KeyT) -> None:
        """One more execution with these shapes."""
        runs = self._runs
        runs[key] = runs.get(key, 0) + 1
        if len(runs) > _FOLD:
            self.totals()

    @property
    def pending(self) -> int:
        """How many different shapes wait to become a number."""
        return len(self._runs)

    def totals(self) -> Totals:
        """The sums over all executions."""
        total, runs = self._folded, self._runs
        for key, executions in runs.items():
            total.executions += executions
            try:
                total.macs += executions * self.macs_of(key)
            except (LookupError, TypeError, ValueError, StopIteration):
                # A form of the operator that the formula does not know.
                total.unknown += executions
        runs.clear()
        return total


def shapes_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of tensors, as their framework represents them; None for an absent one."""
    try:
        return tuple([None if tensor is None else tensor.shape for tensor in tensors])
    except (RuntimeError, ValueError):
        return shapes_of_items(tensors)


def shapes_of_items(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The same where some are nested, whose items have a shape each."""
    return tuple(
        Items(tuple([tuple(item.shape) for item in tensor.unbind()]))
        if is_nested(tensor)
        else None if tensor is None else tensor.shape
        for tensor in tensors
    )  # fmt: skip


def is_nested(tensor: Any) -> bool:
    """Whether a tensor is one of PyTorch's that hold a list of others."""
    return bool(getattr(tensor, "is_nested", False))


@attrs.frozen
class Items:
    """The shapes of the items of a nested tensor."""

    shapes: tuple[Shape, ...]


def plain(shapes: Sequence[Any]) -> tuple[Shape | None, ...]:
    """The same as plain numbers.

    Raises:
        LookupError: a size is none, such as that of a ragged axis.
    """
    try:
        return tuple(None if s is None else tuple(int(size) for size in s) for s in shapes)
    except (AttributeError, TypeError) as error:
        raise LookupError("a ragged axis has no one size") from error


def by_item(shapes: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The same for each item of the nested tensors among them; without one, the shapes.

    Raises:
        ValueError: they have different numbers of items.
    """
    if not any(isinstance(shape, Items) for shape in shapes):
        yield shapes
        return
    counts = {len(shape.shapes) for shape in shapes if isinstance(shape, Items)}
    if len(counts) > 1:
        raise ValueError(f"nested tensors of {sorted(counts)} items")
    for number in range(counts.pop()):
        yield tuple(s.shapes[number] if isinstance(s, Items) else s for s in shapes)


@attrs.define(eq=False)
class ProductOp:
    """A forward operator that computes products.

    Attributes:
        op: the operator.
        signature: what its formula needs beside the shapes.
        formula: the formula.
        last: the shapes of the last execution, inputs and outputs.
        shapes_of: what asks tensors for their shapes.
    """

    op: OpDescription
    signature: Signature
    formula: Formula
    last: tuple[Any, Any] = ((), ())
    shapes_of: Callable[[Sequence[Any]], tuple[Any, ...]] = shapes_of
    _inputs: Handover[Any] = attrs.field(factory=Handover)
    tally: Tally[tuple[Any, Any]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self.macs)

    def run(self, *inputs: Any) -> None:
        """Instrumentation routine: an execution whose outputs need not be seen."""
        self.last = (self.shapes_of(inputs), ())
        self.tally.add(self.last)

    def begin(self, *inputs: Any) -> None:
        """Instrumentation routine before an execution."""
        self._inputs.leave(self.shapes_of(inputs))

    def end(self, *outputs: Any) -> None:
        """Instrumentation routine after it."""
        self.last = (self._inputs.take() or (), self.shapes_of(outputs))
        self.tally.add(self.last)

    def call(self, shapes: tuple[Any, Any]) -> CallShapes:
        """The call with these shapes."""
        return CallShapes(self.signature, plain(shapes[0]), plain(shapes[1]))

    def macs(self, shapes: tuple[Any, Any]) -> int:
        """The multiply-accumulates of an execution with these shapes."""
        # What no formula asks for need not fit: an output may be nested, and an input not.
        outputs = shapes[1] if self.formula.needs_outputs else ()
        return sum(self.formula.macs(self.call((part, outputs))) for part in by_item(shapes[0]))


@attrs.define(eq=False)
class ProductGradientOp:
    """A backward operator that computes gradients of products."""

    op: OpDescription
    forward: ProductOp
    formula: GradientFormula
    _received: Handover[Any] = attrs.field(factory=Handover)
    tally: Tally[tuple[Any, Any, tuple[Any, Any]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self.macs)

    def begin(self, *grad_outputs: Any) -> None:
        """Instrumentation routine before an execution."""
        self._received.leave(shapes_of(grad_outputs))

    def end(self, *grad_inputs: Any) -> None:
        """Instrumentation routine after it."""
        received = self._received.take() or ()
        self.tally.add((received, shapes_of(grad_inputs), self.forward.last))

    def macs(self, key: tuple[Any, Any, tuple[Any, Any]]) -> int:
        """The multiply-accumulates of an execution with these shapes."""
        received, produced, last = key
        forward = self.forward.call(last)
        # Only few formulas need the forward operator's figure; those that do not know
        # its form must not fail for it.
        try:
            macs = self.forward.formula.macs(forward)
        except (LookupError, TypeError, ValueError, StopIteration):
            macs = 0
        return self.formula(GradientShapes(forward, macs, plain(received), plain(produced)))


@attrs.define(eq=False)
class OtherOp:
    """An operator that computes no product, or none that is known.

    Attributes:
        op: the operator.
        is_free: whether it counts zero by convention.
        executions: how often an unknown one ran; 0 for the others.
    """

    op: OpDescription
    is_free: bool
    executions: int = 0

    def count(self) -> None:
        """Instrumentation routine: one more execution."""
        self.executions += 1


@attrs.define
class OpBytes:
    """What an operator reads and writes.

    Attributes:
        weights: the parameters among its inputs.
        activation_bytes: bytes of the outputs of its first execution; None where
            sizes are not known before the program runs, 0 for views.
    """

    parameters: list[Parameter] = attrs.field(factory=list)
    activation_bytes: int | None = 0
