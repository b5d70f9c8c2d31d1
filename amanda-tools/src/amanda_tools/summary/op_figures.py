"""FLOPs and bytes of the outputs of each execution of an operator.

::

    figures = OpFigures.of(context)                 # in an analysis
    if figures is not None:
        figures.insert(context, add=lambda flops, size: ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from amanda import OpContext, deferrable
from amanda.tools.description import op_name, plain_attributes
from amanda_tools._operators.call_shapes import (
    Shapes,
    is_nested,
    item_shapes_of,
    plain,
    shapes_of,
    sum_of_parts,
)
from amanda_tools._operators.flop_registry import formula_in
from amanda_tools._operators.op_table import FlopFormula, has_activation, is_free, updates_a_value
from amanda_tools._operators.routines import Handover
from amanda_tools._operators.signature import CallShapes, OpSignature
from amanda_tools._values.shapes import byte_size

Add = Callable[[int | None, int], None]
"""Called with the FLOPs of one execution, None where they are not known, and its bytes."""


@attrs.define(eq=False)
class OpFigures:
    """Computes the figures of an operator's executions from the shapes of each.

    Attributes:
        signature: facts that all executions share.
        formula: computes its FLOPs; None for an operator without a formula.
        is_free: True if it counts no FLOPs by convention.
        is_view: True if its outputs are views, which are no activations.
    """

    signature: OpSignature
    formula: FlopFormula | None
    is_free: bool
    is_view: bool
    _inputs: Handover[Any] = attrs.field(factory=Handover)
    _shapes_of: Callable[[Sequence[Any]], tuple[Any, ...]] = attrs.field(default=shapes_of)
    _add: Add = attrs.field(default=lambda flops, size: None)
    _see: Callable[[Sequence[Any]], None] | None = None

    @classmethod
    def of(cls, context: OpContext) -> OpFigures | None:
        """Return the figures of an operator; None for one that adds nothing."""
        kind = str(context["op_type"] or "")
        name = op_name(context.get_op())
        has_none = is_free(kind)
        formula = formula_in(context, kind, name)
        updates = updates_a_value(context, name)
        is_view = updates or not has_activation(kind)
        if formula is None and has_none and is_view:
            return None
        attributes = None if formula is None else plain_attributes(context)
        return cls(OpSignature.of(context, kind, attributes), formula, has_none, is_view)

    def insert(
        self, context: OpContext, add: Add, see: Callable[[Sequence[Any]], None] | None = None
    ) -> None:
        """Insert the routines that call `add` with the figures of each execution.

        Args:
            see: called with the outputs of each execution.
        """
        self._add, self._see = add, see
        if self.formula is not None:
            context.insert_before_op(self.begin)
        if context.runs_at_once and any(map(is_nested, context.get_inputs())):
            self._shapes_of = item_shapes_of
        context.insert_after_op(self.end)

    @deferrable
    def begin(self, *inputs: Any) -> None:
        """Instrumentation routine before an execution."""
        self._inputs.leave(self._shapes_of(inputs))

    @deferrable
    def end(self, *outputs: Any) -> None:
        """Instrumentation routine after an execution."""
        size = 0
        if self._see is not None:
            self._see(outputs)
        if not self.is_view:
            size = sum(byte_size(tensor) or 0 for tensor in outputs if tensor is not None)
        flops = 0 if self.is_free else None
        if self.formula is not None:
            calls = [(self._inputs.take() or (), self._shapes_of(outputs))]
            flops = sum_of_parts(calls, self._flops)
        self._add(flops, size)

    def _flops(self, call: Shapes) -> int | None:
        """Return the FLOPs of one call."""
        inputs, outputs = map(plain, call)
        shapes = CallShapes(self.signature, inputs, outputs)
        return None if self.formula is None else self.formula.flops(shapes)
