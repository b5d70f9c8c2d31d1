"""Counts the executions of an operator, and adds up their FLOPs by the shapes of each.

:class:`OpFlops` has the routines before and after an execution, and ``totals()``: executions,
FLOPs, and executions whose FLOPs are not known. A formula runs once for equal shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

import amanda
from amanda.inline import Counter, ShapeSum
from amanda.python.memo import Memo
from amanda.tools.description import OpDescription
from amanda_tools._operators.call_shapes import Shapes, plain, shapes_of, sum_of_parts
from amanda_tools._operators.op_table import FlopFormula
from amanda_tools._operators.routines import Handover
from amanda_tools._operators.signature import CallShapes, OpSignature
from amanda_tools._values.shapes import HANDLES

SHAPES_KEPT = 1024
"""Shapes of one operator whose FLOPs are kept."""


@attrs.define(eq=False)
class OpFlops:
    """An operator that counts FLOPs, or whose FLOPs are not known.

    Attributes:
        op: the operator.
        formula: its formula; None if there is none.
        signature: facts that all executions share; of a backward operator, the forward one's.
        forward: of a backward operator its forward operator, else None.
        sum: the executions whose shapes are read when they run.
        is_elementwise: its FLOPs are none of a product, and a figure of their own.
        static: by the shapes that the graph has, and those of the forward operator: the counter
            of these executions, and the FLOPs of one, None if they are not known.
    """

    op: OpDescription
    formula: FlopFormula | None
    signature: OpSignature
    forward: OpFlops | None = None
    is_elementwise: bool = False
    sum: ShapeSum = attrs.field(init=False)
    static: dict[Any, tuple[Counter, int | None]] = attrs.field(factory=dict)
    _known: Memo[tuple[Shapes, Shapes | None], int | None] = attrs.field(
        factory=lambda: Memo(SHAPES_KEPT)
    )
    _inputs: Handover[tuple[Any, ...]] = attrs.field(factory=Handover)

    @classmethod
    def of(
        cls,
        op: OpDescription,
        formula: FlopFormula | None,
        signature: OpSignature,
        total: Counter,
        forward: OpFlops | None = None,
        is_elementwise: bool = False,
    ) -> OpFlops:
        """Make one without executions.

        Args:
            total: the FLOPs of all operators like it.
        """
        found = cls(op, formula, signature, forward, is_elementwise)
        of = None if forward is None else forward.sum
        found.sum = ShapeSum(found.flops, total, shapes_of=shapes_of, of=of)
        return found

    def suffices(self, inputs: tuple[Any, ...]) -> bool:
        """Return True if the formula reads no other shapes of inputs than these.

        Args:
            inputs: shapes; None for those that the graph does not have.
        """
        found = None if self.formula is None else self.formula.suffices
        return found is not None and found(self.signature, inputs)

    @property
    def reads_outputs(self) -> bool:
        """True if its formula reads the shapes of the outputs."""
        return self.formula is not None and self.formula.reads_outputs

    def flops(self, shapes: Shapes, forward: Shapes | None = None) -> int | None:
        """Return the FLOPs of an execution with these shapes; None if they are not known.

        Args:
            forward: of a backward operator the shapes of its forward operator; None for those of
                the last execution.
        """
        if self.formula is None:
            return None
        if self.forward is not None and forward is None:
            forward = self.forward.sum.last
        key = shapes, forward
        if key not in self._known:
            self._known[key] = self._computed(self.formula, shapes, forward)
        return self._known[key]

    def _computed(self, formula: FlopFormula, shapes: Shapes, forward: Shapes | None) -> int | None:
        own = shapes[0], shapes[1] if formula.reads_outputs else ()
        calls = [own] if self.forward is None or forward is None else [own, forward]
        return sum_of_parts(calls, lambda *part: self._of_part(formula, *part))

    def _of_part(
        self, formula: FlopFormula, own: Shapes, forward: Shapes | None = None
    ) -> int | None:
        """Return the FLOPs of one sample under ``torch.vmap``, of one item of nested tensors."""
        call = self.call(*own)
        if self.forward is not None and forward is not None:
            before, cost = self.forward.call(*forward), self.forward.flops(forward)
            call = attrs.evolve(call, forward=before, forward_flops=cost)
        return formula.flops(call)

    def call(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> CallShapes:
        """Return the call with these shapes.

        Raises:
            LookupError: a size is unknown, such as that of a ragged axis.
        """
        return CallShapes(self.signature, plain(inputs), plain(outputs))

    def counter(self, shapes: Shapes, forward: Shapes | None = None) -> Counter:
        """Return the counter of the executions with these shapes, which the graph has."""
        key = shapes, forward
        if key not in self.static:
            self.static[key] = Counter(), self.flops(shapes, forward)
        return self.static[key][0]

    def totals(self) -> tuple[int, int, int]:
        """Return the executions, their FLOPs, and how many of them have unknown FLOPs."""
        executions, flops, unknown = self.sum.executions, self.sum.amount, self.sum.unknown
        for counter, amount in tuple(self.static.values()):
            executions += counter.count
            flops += counter.count * (amount or 0)
            unknown += counter.count * (amount is None)
        return executions, flops, unknown

    # -- routines in graphs ------------------------------------------------

    @amanda.deferrable
    def run(
        self, *inputs: Any, outputs: tuple[Any, ...] = (), forward: Shapes | None = None
    ) -> None:
        """Routine before an execution whose outputs need not be seen.

        Args:
            outputs: their shapes, where the formula reads them and the graph has them.
            forward: shapes of the forward operator, where the graph has them.
        """
        self._add(shapes_of(inputs), outputs, forward)

    @amanda.deferrable
    def begin(self, *inputs: Any) -> None:
        """Routine before an execution."""
        self._inputs.leave(shapes_of(inputs))

    @amanda.deferrable
    def end(
        self, *outputs: Any, inputs: tuple[Any, ...] | None = None, forward: Shapes | None = None
    ) -> None:
        """Routine after an execution.

        Args:
            inputs: their shapes, where the graph has those that the formula reads; None where
                :meth:`begin` has run.
            forward: shapes of the forward operator, where the graph has them.
        """
        found = self._inputs.take() or () if inputs is None else inputs
        self._add(found, shapes_of(outputs), forward)

    def _add(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], forward: Any) -> None:
        shapes = inputs, outputs
        self.sum.add(self.flops(shapes, forward), shapes)


def known_shapes(
    specs: Sequence[Any] | None, suffices: Callable[[tuple[Any, ...]], bool] | None = None
) -> tuple[Any, ...] | None:
    """Return the shapes of tensors as the graph has them; None if it does not tell enough.

    Args:
        specs: descriptions of the tensors; None for absent ones.
        suffices: True if these shapes, None for those that the graph does not have, are enough;
            None where all have to be known.
    """
    if specs is None:
        return None
    shapes, is_open = [], False
    for spec in specs:
        shape = None if spec is None else spec.shape
        if spec is not None and (shape is None or None in shape or spec.dtype in HANDLES):
            shape, is_open = None, True
        shapes.append(shape)
    found = tuple(shapes)
    return None if is_open and not (suffices and suffices(found)) else found
