"""What the first step of a scope costs, as a ratio to a later one, on GPT-2 of four layers.

    python -m tests.benchmarks.first_steps

Each figure is the median of processor times of fresh processes, since much is made once for each
process. The first step analyses every operator.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import amanda
from tests.benchmarks.watching import Watch

TOOLS = {"watched": 12, "count": 15, "trace": 20}
"""Tools, and the project's goals."""

PROCESSES = 7
STEPS = 9


def measure(name: str, workload: str) -> float:
    """The first step over the fastest later one, in this process."""
    import torch

    from tests.benchmarks.cases_torch import WORKLOADS

    torch.set_num_threads(1)
    _, step = WORKLOADS[workload].start()
    step()
    tool = Watch(backward=True) if name == "watched" else amanda.tools.load(name)()
    times = []
    with amanda.apply(tool):
        for _ in range(STEPS):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    return times[0] / min(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="gpt2-4x64-infer")
    parser.add_argument("--inside", choices=TOOLS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        print(measure(options.inside, options.workload))
        return 0
    inside = [sys.executable, "-m", "tests.benchmarks.first_steps", "--workload", options.workload]
    for name, goal in TOOLS.items():
        command = [*inside, "--inside", name]
        runs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for _ in range(PROCESSES)
        ]
        found = sorted(float(text.splitlines()[-1]) for text in runs)
        print(f"{name:8} {statistics.median(found):5.1f} ({found[0]:.1f}-{found[-1]:.1f}), {goal=}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
