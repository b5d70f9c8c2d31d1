"""A tool that counts, and an op for it to count, for tests of scopes."""

from __future__ import annotations

from typing import Any

import amanda
from amanda.testing import loopback as lb


class Counter(amanda.Tool):
    """Counts executions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.count))

    def count(self, *tensors: Any) -> None:
        """Count one execution."""
        self.calls += 1


def work() -> None:
    """Run one op."""
    lb.add(lb.tensor(1.0), 2.0)
