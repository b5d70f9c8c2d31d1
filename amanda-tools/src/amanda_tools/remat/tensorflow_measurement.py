"""Finds what TensorFlow's backward operators read of the forward pass, which is kept so long.

Nothing is timed: an operator costs as many operations as its formula says, and at least one per
byte that it makes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from amanda import OpContext
from amanda.tools.description import describe
from amanda_tools._operators.flop_registry import formula_of
from amanda_tools._operators.op_table import is_view, row_of
from amanda_tools._operators.signature import CallShapes, OpSignature
from amanda_tools._values.shapes import byte_size, shape_of
from amanda_tools.remat.measurement import MeasuredOp, Measurement


class TensorFlowMeasurement(Measurement):
    """Collects the operators of one iteration; costs are their numbers of operations."""

    unit = "ops"

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[int, tuple[Callable[[], Any], int | None]] = {}
        self._places: dict[str, int] = {}

    def after(self, context: OpContext, reason: str) -> bool:
        op = describe(context)
        inputs, outputs = context.get_inputs(), context.get_outputs() or ()
        step = MeasuredOp(op, obstacle=reason)
        pieces = [self._piece_read(context, index, tensor) for index, tensor in enumerate(inputs)]
        step.inputs = [piece for piece in pieces if piece is not None]
        if is_view(op.type) or "allocates_nothing" in row_of(op.type).traits:
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
        self._places.setdefault(op.id, len(self.ops))
        self.ops.append(step)
        return True

    def _piece_read(self, context: OpContext, index: int, tensor: Any) -> int | None:
        """Return the piece of an input; None for an absent one, and for a variable."""
        is_other = tensor is None or context.get_value(index) is not None
        return None if is_other else self._piece(tensor)

    def backward(self, context: OpContext) -> None:
        place = self._places.get(context.get_op_id())
        if place is None:
            return
        known = [self._known(tensor) for tensor in context.get_grad_outputs() or ()]
        step = self.ops[place]
        step.saved |= {piece for piece in known if piece is not None}

    def _known(self, tensor: Any) -> int | None:
        reference, piece = self._pieces.get(id(tensor), (None, None))
        return piece if reference is not None and reference() is tensor else None

    def _piece(self, tensor: Any) -> int | None:
        """Return the piece of a tensor; None for variables' and for unknown sizes."""
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
    """Return the FLOPs of an operator, 0 where they are not known."""
    op = describe(context)
    formula = formula_of(op.type, op.name)
    if formula is None:
        return 0
    signature = OpSignature.of(context, op.type, op.attributes)
    try:
        shapes = [None if t is None else shape_of(t) for t in context.get_inputs()]
        outputs = [None if t is None else shape_of(t) for t in context.get_outputs() or ()]
    except (TypeError, ValueError):
        return 0
    return formula.flops(CallShapes(signature, shapes, outputs)) or 0


MEASUREMENT = TensorFlowMeasurement
