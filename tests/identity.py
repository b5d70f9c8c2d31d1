"""A tool that instruments every operator and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda


class Identity(amanda.Tool):
    """Routines before and after each operator and backward operator that return what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.same)
        context.insert_after_op(self.same)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.same)
        context.insert_after_backward_op(self.same)

    def same(self, *tensors: Any) -> Sequence[Any]:
        self.calls += 1
        return tensors
