"""The tool with which both graph drivers test themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda


class Doubler(amanda.Tool):
    """Doubles the second factor of the product of two 2 x 2 matrices of ones, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Analysis routine: insert `double` before each product."""
        if context.get_op().type == "MatMul":
            context.insert_before_op(self.double, inputs=[1])

    def double(self, weight: Any) -> Any:
        """Instrumentation routine: twice the factor."""
        self.count += 1
        return weight * 2.0

    def problems(self, where: str, values: Sequence[Any]) -> list[str]:
        """The differences from the expected results.

        Args:
            where: the mode, for messages.
            values: the product, and the gradients of its factors.
        """
        found = []
        if self.count != 1:
            found.append(f"a product in {where} was counted {self.count} times instead of once")
        for name, value, expected in zip(("output", "dx", "dw"), values, (4, 4, 2), strict=True):
            if float(value[0, 0]) != expected:
                found.append(f"{name} of a doubled weight is {float(value[0, 0])}, not {expected}")
        return found
