"""What the self-tests of both graph modes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda


class Doubler(amanda.Tool):
    """Counts the products of ones(2, 2) with itself, and doubles the second factor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Put the routine before each product."""
        if context.get_op().type == "MatMul":
            context.insert_before_op(self.double, inputs=[1])

    def double(self, weight: Any) -> Any:
        """Instrumentation routine: twice the factor."""
        self.count += 1
        return weight * 2.0

    def problems(self, where: str, values: Sequence[Any]) -> list[str]:
        """What is wrong with the product and the gradients of its factors, if anything."""
        found = []
        if self.count != 1:
            found.append(f"a product in {where} was counted {self.count} times instead of once")
        for name, value, expected in zip(("output", "dx", "dw"), values, (4, 4, 2), strict=True):
            if float(value[0, 0]) != expected:
                found.append(f"{name} of a doubled weight is {float(value[0, 0])}, not {expected}")
        return found
