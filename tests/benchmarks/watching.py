"""A tool that analyses every operator and instruments none, for either framework."""

from __future__ import annotations

import amanda


class Watch(amanda.Tool):
    """Analyses forward operators, and optionally backward operators."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Record no action."""


class Touch(Watch):
    """Inserts an empty Python routine before every forward operator, and takes its tensors."""

    def __init__(self) -> None:
        super().__init__(backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the routine; backward operators are watched."""
        if not context.is_backward():
            context.insert_before_op(self.touch)

    def touch(self, *tensors: object) -> None:
        """Do nothing."""
