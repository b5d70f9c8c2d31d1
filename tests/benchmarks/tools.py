"""Time of a PyTorch step under the tools that analyse, and under their peers, as ratios to vanilla.

    python -m tests.benchmarks.tools
    python -m tests.benchmarks.tools --case gpt2-12x64-infer --tool flops --only amanda

The cases are a GPT-2 of twelve layers of width 64, bound by launches, and ResNet-50 in training on
eight images. All in one process with one thread; :mod:`tests.benchmarks.timing` says how. No ratio
is asserted anywhere: the bounds are those that the project wants to keep.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from tests.benchmarks import command
from tests.benchmarks.cases_torch import CHECKERS, comparisons, tool
from tests.benchmarks.timing import Comparison

TOOLS = ("count", "flops", "nan", "trace")
"""Those that are measured if no other is asked for, with their default options."""

BOUNDS: Mapping[str, Mapping[str, float]] = {
    "gpt2-12x64-infer": {"flops": 2.0, "trace": 2.0, "nan": 2.8},
    "gpt2-12x64-train": {},
    "resnet50-b8-32-train": {},
    "resnet50-b8-224-train": {"flops": 1.02, "trace": 1.02},
}
"""Workloads, with the ratios that some tools are to keep."""


def cases(names: Sequence[str]) -> command.Cases:
    """Each workload, under the tools called `names` and under the peers."""

    def made(workload: str) -> list[Comparison]:
        scopes = {_row(name): tool(name) for name in names} | dict(CHECKERS)
        bounds = {_row(name): bound for name, bound in BOUNDS[workload].items()}
        return comparisons(workload, scopes, bounds)

    return {workload: lambda workload=workload: made(workload) for workload in BOUNDS}


def _row(name: str) -> str:
    return f"amanda, {name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = command.parser(__doc__, BOUNDS)
    parser.add_argument(
        "--tool", action="append", help=f"this instead of {', '.join(TOOLS)}; repeatable"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = command.run(cases(options.tool or TOOLS), options)
    return command.exit_code(rows, options)


if __name__ == "__main__":
    sys.exit(main())
