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
