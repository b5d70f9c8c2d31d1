"""What TensorFlow's backward operators read of the forward pass, which is so long kept.

Nothing is measured: a step costs as many operations as its formula says, at least one for each
element that it makes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

from amanda import OpContext
from amanda.tools.description import describe
from amanda_tools._operators.cost import FORMULAS
from amanda_tools._operators.op_types import VIEWS
from amanda_tools._operators.signature import CallShapes, Signature
from amanda_tools._values.shapes import byte_size
from amanda_tools.remat.plan import MeasuredOp

_PASSING_ON = VIEWS | {"identity_n", "read_variable", "expand_dims"}
"""Types that make no memory of their own."""


class Measurement:
    """Collects the steps of an iteration.

    Attributes:
        steps: the operators in order.
        sizes: bytes of each piece of memory.
        unit: of what a step costs.
        unknown: operators of which nobody knows how much they make.
    """

    unit = "ops"

    def __init__(self) -> None:
        self.steps: list[MeasuredOp] = []
        self.sizes: dict[int, int] = {}
        self.unknown = 0
        self._pieces: dict[int, tuple[Callable[[], Any], int | None]] = {}
        self._places: dict[str, int] = {}

    def before(self, context: OpContext) -> None:
        """Nothing is looked at before an operator."""

    def is_own(self, context: OpContext) -> bool:
        """Whether the operator is the framework's own: all that is seen are."""
        return True

    def after(self, context: OpContext, reason: str) -> bool:
        """Called in an analysis that sees the outputs.

        Args:
            reason: why it must not be run again, "" if it may.
        """
        op = describe(context)
        inputs, outputs = context.get_inputs(), context.get_outputs() or ()
        step = MeasuredOp(op, obstacle=reason)
        pieces = [
            None if tensor is None or context.get_value(index) is not None else self._piece(tensor)
            for index, tensor in enumerate(inputs)
        ]
        step.inputs = [piece for piece in pieces if piece is not None]
        if op.type in _PASSING_ON:
            source = pieces[0] if pieces else None
            for output in outputs:
                self._pieces[id(output)] = weakref.ref(output), source
            step.obstacle = "it makes a view"
        else:
            made = [self._piece(tensor) for tensor in outputs if tensor is not None]
            step.made = [piece for piece in made if piece is not None]
            self.unknown += len(step.made) < len(made)
        step.obstacle = step.obstacle or _obstacle(op.name, context)
        step.cost = float(max(_operations(context), *map(self.sizes.__getitem__, step.made), 0))
        self._places.setdefault(op.id, len(self.steps))
        self.steps.append(step)
        return True

    def backward(self, context: OpContext) -> None:
        """Called in an analysis of a backward operator: what it reads was kept for it."""
        place = self._places.get(context.get_op_id())
        if place is None:
            return
        known = [self._known(tensor) for tensor in context.get_grad_outputs() or ()]
        step = self.steps[place]
        step.saved |= {piece for piece in known if piece is not None}

    def _known(self, tensor: Any) -> int | None:
        reference, piece = self._pieces.get(id(tensor), (None, None))
        return piece if reference is not None and reference() is tensor else None

    def _piece(self, tensor: Any) -> int | None:
        """The memory of a tensor; None if it is a variable's, or of unknown size."""
        reference, piece = self._pieces.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return piece
        size = byte_size(tensor)
        piece = None if size is None else len(self.sizes)
        if piece is not None and size is not None:
            self.sizes[piece] = size
        self._pieces[id(tensor)] = weakref.ref(tensor), piece
        return piece


def _obstacle(name: str, context: OpContext) -> str:
    if "Random" in name and not name.startswith("Stateless"):
        return "it draws random numbers"
    return "" if context.get_inputs() else "it has no inputs"


def _operations(context: OpContext) -> int:
    """Twice the multiply-accumulates, 0 where no formula knows."""
    op = describe(context)
    formula = FORMULAS.get(op.type)
    if formula is None:
        return 0
    signature = Signature.of(context, op.type)
    try:
        shapes = [_shape(tensor) for tensor in context.get_inputs()]
        outputs = [_shape(tensor) for tensor in context.get_outputs() or ()]
        return 2 * math.ceil(formula.macs(CallShapes(signature, shapes, outputs)))
    except (LookupError, TypeError, ValueError, StopIteration):
        return 0


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(int(size) for size in tensor.shape)
