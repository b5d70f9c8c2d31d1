"""Time of a PyTorch step under Amanda and under its peers, as ratios to vanilla.

    python -m tests.benchmarks.overhead
    python -m tests.benchmarks.overhead --case gpt2-4x64-infer --only amanda -o rows.json

All in one process with one thread; :mod:`tests.benchmarks.timing` says how. No ratio is asserted
anywhere: the bounds are those that the project wants to keep.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

import torch

import amanda
from tests.benchmarks import command
from tests.benchmarks.cases_torch import INTERCEPTORS, Scope, comparisons, tool
from tests.benchmarks.watching import Watch

AMANDA: Mapping[str, Scope] = {
    "amanda, nothing instrumented": lambda model: amanda.apply(Watch(backward=False)),
    "amanda, backward analysed too": lambda model: amanda.apply(Watch(backward=True)),
    "amanda, count:ops=conv2d+linear": tool("count", ops=["conv2d", "linear"]),
}

SCOPES: Mapping[str, Scope] = {**AMANDA, **INTERCEPTORS}

BOUNDS: Mapping[str, float] = {
    "resnet50-b1-224-infer": 1.015,
    "resnet50-b1-224-train": 1.015,
    "resnet18-b1-32-infer": 1.12,
    "gpt2-4x64-infer": 1.75,
    "gpt2-4x64-train": 1.45,
}
"""Workloads, with the ratio that Amanda's own rows are to keep."""

CASES: command.Cases = {
    workload: functools.partial(comparisons, workload, SCOPES, dict.fromkeys(AMANDA, bound))
    for workload, bound in BOUNDS.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = command.parser(__doc__, CASES).parse_args(arguments)
    torch.set_num_threads(1)
    return command.exit_code(command.run(CASES, options), options)


if __name__ == "__main__":
    sys.exit(main())
