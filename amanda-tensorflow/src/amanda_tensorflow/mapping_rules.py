"""The standard mapping rules for TensorFlow (design rule 15). They import no TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda.context import OpContext


def standard(context: OpContext) -> None:
    """Set the canonical type of one operator."""
    context["op_type"] = context.get_op().type.lower()
