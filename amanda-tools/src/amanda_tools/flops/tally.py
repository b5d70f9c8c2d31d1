"""Counts executions by their shapes; formulas are applied when the figures are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs

import amanda
from amanda.inline import Counter, ShapeSum
from amanda.namespace import Namespace
from amanda.state import tool_locked
from amanda.tools.description import OpDescription
from amanda_tools._internals import is_in_backward
from amanda_tools._operators.cost import Formula
from amanda_tools._operators.routines import Handover
from amanda_tools._operators.signature import CallShapes, Shape, Signature
from amanda_tools.flops.gradients import Formula as GradientFormula
from amanda_tools.flops.gradients import GradientShapes

KeyT = TypeVar("KeyT")

_FOLD = 1024
"""Distinct shapes of an operator that are kept before formulas turn them into numbers."""


def no_backward_pass() -> bool:
    """Return False: no backward pass is known."""
    return False


def backward_probe(namespace: Namespace) -> Callable[[], bool]:
    """Return a function that says whether this thread is within a backward pass."""
    return is_in_backward if namespace.matches("pytorch") else no_backward_pass


@attrs.define(eq=False)
class Totals:
    """Sums over the executions of an operator.

    Attributes:
        executions: number of executions.
        macs: their multiply-accumulates.
        unknown: executions with shapes that the formula does not know.
    """

    executions: int = 0
    macs: int = 0
    unknown: int = 0


@attrs.define(eq=False)
class RunningSum:
    """The multiply-accumulates of many operators, asked for at both ends of each step.

    Operators that have not been executed since the last time are not looked at, apart from those
    that runs of graphs count.
    """

    counter: Counter = attrs.field(factory=Counter)
    _waiting: list[Tally[Any]] = attrs.field(factory=list)
    _watched: list[Tally[Any]] = attrs.field(factory=list)

    def watch(self, tally: Tally[Any]) -> None:
        """Note an operator that is to be looked at each time."""
        self._watched.append(tally)

    def wait(self, tally: Tally[Any]) -> None:
        """Note an operator that was executed, once until :meth:`macs` is asked."""
        self._waiting.append(tally)

    def add(self, macs: int) -> None:
        """Add those of some executions."""
        self.counter.count += macs

    def macs(self) -> int:
        """Return the sum."""
        # Not where a driver adds up by itself: a step may be small.
        if self._waiting or self._watched:
            tool_locked(self._look)
        return self.counter.count

    def _look(self) -> None:
        waiting, self._waiting = self._waiting, []
        for tally in waiting:
            tally.is_waiting = False
            tally.totals()
        for tally in self._watched:
            tally.totals()


@attrs.define(eq=False)
class KnownShapes:
    """Executions with shapes that are in the graph.

    Attributes:
        counter: counts them.
    """

    counter: Counter = attrs.field(factory=Counter)
    _seen: int = 0

    def new(self) -> int:
        """Return how many there were since the last time."""
        seen, self._seen = self._seen, self.counter.count
        return self._seen - seen


class Formulated(Protocol):
    """An operator with a formula."""

    def macs(self, shapes: Any, /) -> int:
        """Return the multiply-accumulates of one execution with these shapes."""


@attrs.define(eq=False)
class Tally(Generic[KeyT]):
    """Counts executions by their shapes, and converts them to multiply-accumulates later.

    Attributes:
        op: gives the multiply-accumulates of one execution with given shapes.
        sum: that of many operators, to which these are added.
        is_waiting: whether that sum is to look at it.
        added: executions that a driver may add up by itself.
        folded: the sums over all others that :meth:`totals` has found so far.
    """

    op: Formulated
    sum: RunningSum = attrs.field(factory=RunningSum)
    is_waiting: bool = False
    _runs: dict[KeyT, int] = attrs.field(factory=dict)
    _known: dict[KeyT, int | None] = attrs.field(factory=dict)
    _counters: dict[KeyT, KnownShapes] = attrs.field(factory=dict)
    added: ShapeSum | None = None
    folded: Totals | None = None

    def counter(self, key: KeyT) -> Counter:
        """Return the counter of the executions with these shapes, which are in the graph."""
        if not self._counters:
            self.sum.watch(self)
        return self._counters.setdefault(key, KnownShapes()).counter

    def add(self, key: KeyT) -> None:
        """Count one execution with these shapes."""
        runs = self._runs
        if not self.is_waiting:
            self.is_waiting = True
            self.sum.wait(self)
        runs[key] = runs.get(key, 0) + 1
        # A decoder meets new shapes at every step: memory must not grow with them.
        if len(runs) > _FOLD:
            self.totals()

    @property
    def pending(self) -> int:
        """Number of distinct shapes that are not turned into numbers yet."""
        return len(self._runs)

    def totals(self) -> Totals:
        """Return the sums over all executions."""
        total, runs, added = self.folded or Totals(), self._runs, self.added
        for key, counted in self._counters.items():
            executions = counted.new()
            if executions:
                runs[key] = runs.get(key, 0) + executions
        for key, executions in runs.items():
            total.executions += executions
            macs = self.known_macs(key)
            if macs is None:
                total.unknown += executions
            else:
                total.macs += executions * macs
                self.sum.add(executions * macs)
        if runs:
            # These counts are in the totals; the same shapes may occur again.
            self.folded = total
            runs.clear()
        if added is None:
            return total
        return Totals(
            total.executions + added.executions,
            total.macs + added.amount,
            total.unknown + added.unknown,
        )

    def known_macs(self, key: KeyT) -> int | None:
        """Multiply-accumulates of one execution; None for a form that the formula does not know."""
        # Asked at the end of each step, mostly for the shapes of the last one.
        if key in self._known:
            return self._known[key]
        try:
            macs = self.op.macs(key)
        except (LookupError, TypeError, ValueError, StopIteration):
            macs = None
        if len(self._known) >= _FOLD:
            self._known.clear()
        self._known[key] = macs
        return macs


def sums_so_far(tallies: Collection[Tally[Any]]) -> tuple[list[int], list[int]]:
    """The executions of operators and their multiply-accumulates, as far as they are added up."""
    # At the end of each step: a method would cost a frame for each operator.
    executions = [
        (0 if t.added is None else t.added.executions)
        + (0 if t.folded is None else t.folded.executions)
        for t in tallies
    ]
    macs = [
        (0 if t.added is None else t.added.amount) + (0 if t.folded is None else t.folded.macs)
        for t in tallies
    ]
    return executions, macs


def shapes_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes of tensors; None for absent ones."""
    try:
        shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        # Kept for each operator: the garbage collector does not visit tuples of numbers, but
        # torch.Size.
        return tuple([tuple(shape) if isinstance(shape, tuple) else shape for shape in shapes])
    except (RuntimeError, ValueError):
        return shapes_of_items(tensors)


def known_shapes(specs: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the shapes of tensors as far as the graph has them; None if a shape is unknown.

    Args:
        specs: descriptions of the tensors; None for absent ones.
    """
    shapes = closed_shapes(specs)
    for spec, shape in zip(specs or (), shapes or (), strict=True):
        if spec is not None and shape is None:
            return None
    return shapes


def closed_shapes(specs: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the shapes of tensors that are in the graph; None for others and for absent ones."""
    if specs is None:
        return None
    shapes = []
    for spec in specs:
        shape = None if spec is None else spec.shape
        is_open = shape is None or None in shape or spec.dtype in _HANDLES
        shapes.append(None if is_open else shape)
    return tuple(shapes)


_HANDLES = ("resource", "variant")
"""Element types of tensors that routines do not get."""


def shapes_of_items(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """:func:`shapes_of` for tensors some of which are nested: shapes of their items."""
    return tuple(
        Items(tuple([tuple(item.shape) for item in tensor.unbind()]))
        if is_nested(tensor)
        else None if tensor is None else tensor.shape
        for tensor in tensors
    )  # fmt: skip


def is_nested(tensor: Any) -> bool:
    """True for PyTorch's nested tensors, which hold a list of tensors."""
    return bool(getattr(tensor, "is_nested", False))


@attrs.frozen
class Items:
    """Shapes of the items of a nested tensor."""

    shapes: tuple[Shape, ...]


def plain(shapes: Sequence[Any]) -> tuple[Shape | None, ...]:
    """Convert shapes to plain numbers.

    Raises:
        LookupError: a size is unknown, such as that of a ragged axis.
    """
    try:
        # For each operator that is new: a generator costs a frame for each size.
        return tuple([None if s is None else tuple(map(int, s)) for s in shapes])
    except (AttributeError, TypeError) as error:
        raise LookupError("a ragged axis has no one size") from error


def split_by_item(shapes: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Split shapes with nested tensors into one tuple per item.

    Raises:
        ValueError: nested tensors have different numbers of items.
    """
    counts = {len(shape.shapes) for shape in shapes if isinstance(shape, Items)}
    if len(counts) > 1:
        raise ValueError(f"nested tensors of {sorted(counts)} items")
    for number in range(counts.pop()):
        yield tuple(s.shapes[number] if isinstance(s, Items) else s for s in shapes)


@attrs.define(eq=False)
class ProductOp:
    """A forward operator with a formula, and the tally of its executions.

    Attributes:
        op: the operator.
        signature: facts that all executions share.
        formula: the formula.
        last: shapes of the last execution in a graph, inputs and outputs.
        shapes_of: :func:`shapes_of`, or :func:`shapes_of_items` once a nested tensor came.
        tally: the executions.
    """

    op: OpDescription
    signature: Signature
    formula: Formula
    last: tuple[Any, Any] = ((), ())
    shapes_of: Callable[[Sequence[Any]], tuple[Any, ...]] = shapes_of
    _inputs: Handover[Any] | None = None
    tally: Tally[tuple[Any, Any]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self)

    @amanda.deferrable
    def run(self, *inputs: Any) -> None:
        """Instrumentation routine before an execution whose outputs need not be seen."""
        self.last = (self.shapes_of(inputs), ())
        self.tally.add(self.last)

    @amanda.deferrable
    def begin(self, *inputs: Any) -> None:
        """Instrumentation routine before an execution."""
        if self._inputs is None:
            self._inputs = Handover()
        self._inputs.leave(self.shapes_of(inputs))

    @amanda.deferrable
    def end(self, *outputs: Any) -> None:
        """Instrumentation routine after an execution."""
        inputs = None if self._inputs is None else self._inputs.take()
        self.last = (inputs or (), self.shapes_of(outputs))
        self.tally.add(self.last)

    def added(self, in_backward: Callable[[], bool]) -> ShapeSum:
        """Return what adds up executions of an eager framework, Python's or the driver's.

        Args:
            in_backward: returns whether this thread is within a backward pass.
        """
        tally = self.tally
        if tally.added is None:
            tally.added = ShapeSum(tally.known_macs, tally.sum.counter)
            if not self.formula.needs_outputs:
                tally.added.in_backward = in_backward
        tally.added.shapes_of = self.shapes_of
        return tally.added

    def last_shapes(self) -> tuple[Any, Any]:
        """Return the shapes of the last execution."""
        added = self.tally.added
        return self.last if added is None else added.last

    def end_of(self, *outputs: Any, shapes: tuple[Any, ...]) -> None:
        """Instrumentation routine after an execution with inputs of known shapes."""
        self.last = (shapes, self.shapes_of(outputs))
        self.tally.add(self.last)

    def call(self, shapes: tuple[Any, Any]) -> CallShapes:
        """Return the call with these shapes."""
        return CallShapes(self.signature, plain(shapes[0]), plain(shapes[1]))

    def macs(self, shapes: tuple[Any, Any]) -> int:
        """Return the multiply-accumulates of an execution with these shapes."""
        # Outputs that the formula does not read may be nested where inputs are not.
        outputs = shapes[1] if self.formula.needs_outputs else ()
        for shape in shapes[0]:
            if type(shape) is Items:
                parts = split_by_item(shapes[0])
                return sum(self.formula.macs(self.call((part, outputs))) for part in parts)
        return self.formula.macs(self.call((shapes[0], outputs)))


@attrs.define(eq=False)
class ProductGradientOp:
    """A backward operator with a formula, and the tally of its executions.

    Attributes:
        op: the operator.
        forward: its forward operator.
        formula: the formula.
        tally: the executions, each with the shapes of the forward operator's last one.
    """

    op: OpDescription
    forward: ProductOp
    formula: GradientFormula
    _received: Handover[Any] = attrs.field(factory=Handover)
    tally: Tally[tuple[Any, Any, tuple[Any, Any]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self)

    @amanda.deferrable
    def begin(self, *grad_outputs: Any) -> None:
        """Instrumentation routine before an execution."""
        self._received.leave(shapes_of(grad_outputs))

    def run(
        self, *grad_outputs: Any, produced: tuple[Any, ...], forward: tuple[Any, Any] | None
    ) -> None:
        """Instrumentation routine before an execution.

        Args:
            produced: shapes of the gradients that are produced, as far as they are needed.
            forward: see :meth:`end`.
        """
        received = shapes_of(grad_outputs)
        self.tally.add((received, produced, forward or self.forward.last_shapes()))

    @amanda.deferrable
    def end(
        self,
        *grad_inputs: Any,
        forward: tuple[Any, Any] | None = None,
        received: tuple[Any, ...] | None = None,
    ) -> None:
        """Instrumentation routine after an execution.

        Args:
            forward: shapes of the forward operator, where a graph tells them.
            received: shapes of the gradients that are consumed, as far as they are needed; None
                where :meth:`begin` has seen them.
        """
        if received is None:
            received = self._received.take() or ()
        self.tally.add((received, shapes_of(grad_inputs), forward or self.forward.last_shapes()))

    def added(self) -> ShapeSum | None:
        """Return what adds up executions, if there is such a sum of the forward operator."""
        tally, forward = self.tally, self.forward.tally.added
        if tally.added is None and forward is not None:
            tally.added = ShapeSum(self.weigh, tally.sum.counter, shapes_of=shapes_of, of=forward)
        return tally.added

    def weigh(self, shapes: tuple[Any, Any]) -> int | None:
        """Return the multiply-accumulates of an execution with these shapes, if they are known."""
        return self.tally.known_macs((*shapes, self.forward.last_shapes()))

    def macs(self, key: tuple[Any, Any, tuple[Any, Any]]) -> int:
        """Return the multiply-accumulates of an execution with these shapes."""
        received, produced, last = key
        forward = self.forward.call(last)
        # Few gradient formulas read this figure; the others must not fail where it is unknown.
        try:
            macs = self.forward.formula.macs(forward)
        except (LookupError, TypeError, ValueError, StopIteration):
            macs = 0
        return self.formula(GradientShapes(forward, macs, plain(received), plain(produced)))


@attrs.define(eq=False)
class UnknownOp:
    """An operator without a formula that does not count zero by convention.

    Attributes:
        op: the operator.
        counter: its executions.
        in_backward: returns whether this thread is within a backward pass. An operator that runs
            forward there is recomputed by a checkpoint, which ends the last one with an exception
            of its own as soon as it has what it needs: it counts before it runs.
    """

    op: OpDescription
    counter: Counter = attrs.field(factory=Counter)
    in_backward: Callable[[], bool] = no_backward_pass
    _started: Handover[bool] = attrs.field(factory=Handover)

    @amanda.deferrable
    def begin(self) -> None:
        """Instrumentation routine before an execution that may raise."""
        is_recomputed = self.in_backward()
        self.counter.count += is_recomputed
        self._started.leave(not is_recomputed)

    @amanda.deferrable
    def end(self) -> None:
        """Instrumentation routine after an execution."""
        self.counter.count += bool(self._started.take())
