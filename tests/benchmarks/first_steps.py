"""What the first step under a tool costs, and how that and later steps grow.

    python -m tests.benchmarks.first_steps
    python -m tests.benchmarks.first_steps --case pairs --processes 7

Each figure is the median of processor times of several fresh processes, since much is made once for
each process and the garbage collector's part depends on what the process holds. The vanilla step
runs in the same process before. ``later`` is the fastest of three later steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

import amanda
from tests.benchmarks.timing import Step

PROCESSES = 5
"""Fresh processes of each case."""


class _Deep(nn.Module):
    """A module that calls one module, to the given depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = _Deep(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if self.inner is None else self.inner(x)


def _forward(model: nn.Module) -> Step:
    x = torch.ones(2, 8)
    return lambda: model(x)


def _pairs() -> Step:
    return _forward(nn.Sequential(*[m for _ in range(800) for m in (nn.Linear(8, 8), nn.ReLU())]))


def _children() -> Step:
    return _forward(nn.Sequential(*[nn.ReLU() for _ in range(4_000)]))


def _depth() -> Step:
    sys.setrecursionlimit(20_000)
    return _forward(_Deep(800))


def _densenet() -> Step:
    import tests.torchvision_ops  # noqa: F401 - timm needs it, and before it is imported

    model = importlib.import_module("timm").create_model("densenet121")
    x = torch.rand(1, 3, 64, 64)

    def step() -> None:
        loss: Any = model(x).sum()
        loss.backward()

    return step


def _cells(*, training: bool) -> Step:
    cell, x = nn.LSTMCell(32, 32), torch.rand(4, 32)

    def step() -> None:
        state: Any = (torch.zeros(4, 32), torch.zeros(4, 32))
        with torch.set_grad_enabled(training):
            for _ in range(300):
                state = cell(x, state)
            if training:
                state[0].sum().backward()

    return step


@attrs.frozen
class Case:
    """A program and the tool that it runs under.

    Attributes:
        start: gives a step.
        tool: the short name of the tool.
    """

    start: Callable[[], Step]
    tool: str


CASES: Mapping[str, Case] = {
    "depth-800": Case(_depth, "flops"),
    "children-4000": Case(_children, "flops"),
    "pairs-800": Case(_pairs, "flops"),
    "densenet121-64px": Case(_densenet, "flops"),
    "densenet121-64px-remat": Case(_densenet, "remat"),
    "densenet121-64px-stats": Case(_densenet, "stats"),
    "densenet121-64px-path": Case(_densenet, "path"),
    "lstm-cells-train": Case(lambda: _cells(training=True), "count"),
    "lstm-cells-infer": Case(lambda: _cells(training=False), "count"),
}
"""By name. Steps of densenet121 train on one image."""


def measure(case: Case) -> dict[str, float]:
    """Seconds of processor time in this process: vanilla, first step, later step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = case.start()
    step()
    vanilla = min(_timed(step) for _ in range(3))
    with amanda.apply(amanda.tools.load(case.tool)()):
        first = _timed(step)
        later = min(_timed(step) for _ in range(3))
    return {"vanilla": vanilla, "first": first, "later": later}


def _timed(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def medians(name: str, processes: int) -> dict[str, float]:
    """The medians over fresh processes."""
    command = [sys.executable, "-m", __spec__.name, "--inside", name]
    runs: list[dict[str, float]] = []
    for _ in range(processes):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| program | tool | vanilla step, s | first step, s | later steps over vanilla |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ratio = row["later"] / row["vanilla"]
        figures = f"{row['vanilla']:.3f} | {row['first']:.2f} | x{ratio:.1f}"
        lines.append(f"| {name} | {CASES[name].tool} | {figures} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(measure(CASES[options.inside])))
        return 0
    names = [name for name in CASES if options.case in name]
    print(table({name: medians(name, options.processes) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
