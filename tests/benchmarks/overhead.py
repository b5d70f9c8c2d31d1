"""Time under Amanda and under its peers, as ratios to vanilla.

    python -m tests.benchmarks.overhead
    python -m tests.benchmarks.overhead --case gpt2-4x64-infer --rounds 15 --json out.json

Everything runs in one process with one thread, in rounds: vanilla, first contestant,
vanilla, second contestant, ... so that a change of the machine's speed meets both
sides. A contestant's scope stays open over its block; the first runs in it, in which
operators are analysed, are not timed. Nothing is asserted: times depend on the
machine, and the bounds printed beside them are what the project wants to keep. The
row "vanilla" compares vanilla runs with each other: it shows how much the figures are
worth. A "!" says that both figures, median and minimum, are above the bound.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from tests.benchmarks.cases import CASES, CONTESTANTS, Case, Step

Contestant = Callable[[nn.Module], AbstractContextManager[Any]]

WARM_UP = 3
"""Runs in a new scope that are not timed."""


@attrs.frozen
class Result:
    """One contestant on one case.

    Attributes:
        case, contestant: their names.
        bound: the case's bound, for Amanda's own contestants; else None.
        median: median over the rounds of the ratio of the blocks' medians.
        minimum: ratio of the fastest runs.
        milliseconds: of the contestant's median run.
    """

    case: str
    contestant: str
    bound: float | None
    median: float
    minimum: float
    milliseconds: float

    def row(self) -> str:
        """A line of the table."""
        bound = f"{self.bound:>8.3f}" if self.bound is not None else " " * 8
        is_above = self.bound is not None and min(self.median, self.minimum) > self.bound
        mark = "!" if is_above else " "
        return (
            f"  {self.contestant:33} {self.median:>8.3f} {self.minimum:>8.3f} {bound} {mark}"
            f" {self.milliseconds:>10.3f} ms"
        )


def _block(step: Step, repetitions: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each of some runs, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(repetitions):
        start = clock()
        step()
        seconds.append(clock() - start)
    return seconds


def measure(
    name: str,
    case: Case,
    rounds: int,
    contestants: Mapping[str, Contestant],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """All contestants on one case, each beside vanilla runs of its own."""
    model, step = case.step()
    blocks: dict[str, list[tuple[list[float], list[float]]]] = {c: [] for c in contestants}
    for _ in range(rounds):
        for contestant, pairs in blocks.items():
            gc.collect()
            vanilla = _block(step, case.repetitions, clock)
            with contestants[contestant](model):
                pairs.append((vanilla, _block(step, case.repetitions, clock)))
    return [_result(name, case, contestant, pairs) for contestant, pairs in blocks.items()]


def _result(
    name: str, case: Case, contestant: str, pairs: Sequence[tuple[list[float], list[float]]]
) -> Result:
    ratios = [statistics.median(b) / statistics.median(a) for a, b in pairs]
    fastest_vanilla = min(min(a) for a, _ in pairs)
    return Result(
        case=name,
        contestant=contestant,
        bound=case.bound if contestant.startswith("amanda") else None,
        median=statistics.median(ratios),
        minimum=min(min(b) for _, b in pairs) / fastest_vanilla,
        milliseconds=1000 * statistics.median(s for _, b in pairs for s in b),
    )


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.overhead", description="Ratios to vanilla."
    )
    parser.add_argument("--case", action="append", choices=CASES, help="only this; repeatable")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of blocks (default 9)")
    parser.add_argument("--no-peers", action="store_true", help="only Amanda")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args(arguments)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    options = _parsed(arguments)
    torch.set_num_threads(1)
    print(" · ".join(f"{key} {value}" for key, value in environment().items()))
    contestants = {
        c: scope
        for c, scope in CONTESTANTS.items()
        if not (options.no_peers and c.startswith("peer"))
    }
    results = []
    for name in options.case or CASES:
        print(f"\n{name:35} {'median':>8} {'minimum':>8} {'bound':>8}   {'median run':>13}")
        for result in measure(name, CASES[name], options.rounds, contestants):
            print(result.row(), flush=True)
            results.append(result)
    if options.json is not None:
        report = {"environment": environment(), "results": [attrs.asdict(r) for r in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
