"""The README's table of missing capabilities is what the drivers declare and the contract skips.

``python -m tests.tensorflow.test_capabilities`` prints it, for amanda-tensorflow/README.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from amanda.interface.driver import Capability
from amanda_tensorflow.plugin import (
    TensorFlowEagerDriver,
    TensorFlowFunctionDriver,
    TensorFlowGraphDriver,
)

README = Path(__file__).parents[2] / "amanda-tensorflow" / "README.md"
DRIVERS = (TensorFlowEagerDriver, TensorFlowFunctionDriver, TensorFlowGraphDriver)

REASONS = {
    Capability.IN_PLACE: "TensorFlow's tensors never change; variables are resources",
    Capability.STATIC_GRAPH: "there is no graph before the operators run",
    Capability.COMPILED: "there is nothing to compile",
}
"""Why a mode lacks what it lacks."""


def table() -> str:
    """The capabilities that a mode lacks, as Markdown."""
    lines = ["| capability | eager | `tf.function` | session | why |", "|---|---|---|---|---|"]
    for capability in Capability:
        marks = ["yes" if capability in driver.capabilities else "no" for driver in DRIVERS]
        if "no" in marks:
            cells = [capability.value, *marks, REASONS[capability]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_readme_has_the_table() -> None:
    """The README's table is the one that is made of the drivers' declarations."""
    text = README.read_text(encoding="utf-8")
    found = re.search(r"<!-- capabilities -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert found, "no table between <!-- capabilities --> and <!-- end --> in the README"
    assert found[1] == table()


if __name__ == "__main__":
    print(table())
