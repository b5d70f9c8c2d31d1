"""The result of a framework's measurement of one iteration: operators, memory, costs."""

from __future__ import annotations

import importlib
from typing import ClassVar

import attrs

from amanda import OpContext
from amanda.tools.description import OpDescription


@attrs.define(eq=False)
class MeasuredOp:
    """One operator of the measured iteration. Memory is numbered: a *piece* is one allocation.

    Attributes:
        op: the operator.
        cost: cost of running it again, in the measurement's :attr:`~Measurement.unit`.
        inputs: pieces that it reads, those of parameters aside.
        made: pieces that it allocates: outputs, and tensors that only its backward pass reads.
        saved: pieces kept for its backward operators.
        obstacle: why it cannot be run again; "" if it can.
        is_random: it draws random numbers.
        changes: ids of the operators that change its outputs in place, in order.
    """

    op: OpDescription
    cost: float = 0.0
    inputs: list[int] = attrs.field(factory=list)
    made: list[int] = attrs.field(factory=list)
    saved: frozenset[int] = frozenset()
    obstacle: str = ""
    is_random: bool = False
    changes: list[str] = attrs.field(factory=list)


class Measurement:
    """Base class for the measurement of one iteration; it collects no operator itself.

    Attributes:
        unit: unit of costs: ``us`` or ``ops``.
        ops: the operators, in order.
        sizes: bytes by piece of memory.
        unknown: number of operators that allocate memory of unknown size.
    """

    unit: ClassVar[str] = "us"

    def __init__(self) -> None:
        self.ops: list[MeasuredOp] = []
        self.sizes: dict[int, int] = {}
        self.unknown = 0

    def before(self, context: OpContext) -> None:
        """Look at an operator in an analysis before it."""

    def after(self, context: OpContext, reason: str) -> bool:
        """Measure an operator in an analysis that sees its outputs.

        Args:
            context: of the operator.
            reason: why it must not be run again, "" if it may.

        Returns:
            True if it is one of :attr:`ops`; operators that are not differentiated are not.
        """
        return False

    def backward(self, context: OpContext) -> None:
        """Look at a backward operator in an analysis before it."""

    def is_own(self, context: OpContext) -> bool:
        """True for operators of the framework itself, False for custom ones."""
        return True

    def starts_with_gradients(self) -> bool:
        """True if gradients are recorded now, and were not in what was measured so far."""
        return False


def measurement_of(framework: str) -> Measurement:
    """Make the measurement for a framework, by the first tag of its namespaces."""
    module = importlib.import_module(f"amanda_tools.remat.{framework}_measurement")
    found: Measurement = module.MEASUREMENT()
    return found
