"""What the action cache is worth: each tool without it, as a ratio to the same tool with it.

    python -m tests.benchmarks.cache
    python -m tests.benchmarks.cache --mode eager --tool prune --rounds 9

The paper's Figure 12. Without the cache (``amanda.cache_disabled()``) the analysis routines run
at every execution, and in a graph mode the graph is instrumented at every run. With it, both
happen in the first run, which is not timed. Blocks of both alternate in one process with one
thread; "cpu" is the ratio of the times that the processor has spent. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs

import amanda

Step = Callable[[], Any]

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "count": {},
    "trace": {},
    "flops": {},
    "profile": {},
    "nan": {},
    "stats": {},
    "sparsity": {},
    "prune": {"method": "magnitude"},
    "quantize": {"method": "static"},
    "path": {},
}
"""Short names of the tools that are compared, and their options."""


@attrs.frozen
class Result:
    """One tool in one mode.

    Attributes:
        mode, tool: what was compared.
        median: of the ratios of the rounds.
        minimum: ratio of the fastest runs.
        cpu: median of the ratios of processor times.
        cached, uncached: milliseconds of a median run.
    """

    mode: str
    tool: str
    median: float
    minimum: float
    cpu: float
    cached: float
    uncached: float

    def row(self) -> str:
        """A line of the table."""
        return (
            f"  {self.tool:12} {self.median:>9.2f} {self.minimum:>9.2f} {self.cpu:>9.2f}"
            f" {self.cached:>12.2f} ms {self.uncached:>12.2f} ms"
        )


@attrs.frozen
class Block:
    """Some runs: seconds of each, by the clock and of the processor."""

    seconds: Sequence[float]
    cpu: float


def eager() -> Step:
    """A small residual net in PyTorch."""
    torch = importlib.import_module("torch")
    network = importlib.import_module("tests.benchmarks.accuracy_torch")
    torch.set_num_threads(1)
    model, images = network.ResidualNet().eval(), torch.rand(8, 8, 8)

    def step() -> Any:
        with torch.no_grad():
            return model(images)

    return step


def function() -> Step:
    """The same net in a ``tf.function``."""
    tf = importlib.import_module("tensorflow")
    network = importlib.import_module("tests.benchmarks.accuracy_tensorflow")
    model, images = network.residual_net(), tf.random.uniform((8, 8, 8))
    run = tf.function(lambda x: model(x, training=False))
    return lambda: run(images)


MODES: Mapping[str, Callable[[], Step]] = {"eager": eager, "function": function}


def block(step: Step, *, cached: bool, runs: int) -> Block:
    """Time some runs after one that is not timed."""
    step()
    seconds = []
    with nullcontext() if cached else amanda.cache_disabled():
        if not cached:
            step()
        processor = time.process_time()
        for _ in range(runs):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return Block(seconds, (time.process_time() - processor) / runs)


def measure(mode: str, name: str, step: Step, *, rounds: int, runs: int) -> Result:
    """One tool with and without the cache."""
    pairs: list[tuple[Block, Block]] = []
    for _ in range(rounds):
        found = []
        for cached in (True, False):
            gc.collect()
            tool = amanda.tools.load(name)(**TOOLS[name])
            with amanda.apply(tool):
                found.append(block(step, cached=cached, runs=10 * runs if cached else runs))
        pairs.append((found[0], found[1]))
    medians = [[statistics.median(b.seconds) for b in pair] for pair in pairs]
    fastest = [min(min(pair[i].seconds) for pair in pairs) for i in (0, 1)]
    return Result(
        mode=mode,
        tool=name,
        median=statistics.median(without / with_ for with_, without in medians),
        minimum=fastest[1] / fastest[0],
        cpu=statistics.median(without.cpu / with_.cpu for with_, without in pairs),
        cached=1000 * statistics.median(with_ for with_, _ in medians),
        uncached=1000 * statistics.median(without for _, without in medians),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.cache", description="Ratios of runs without the cache."
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="only this; repeatable")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this; repeatable")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="without cache, per block (default 3)")
    options = parser.parse_args(arguments)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    results = []
    for mode in options.mode or MODES:
        step = MODES[mode]()
        print(f"\n{mode:14} {'median':>9} {'minimum':>9} {'cpu':>9} {'cached':>15} {'without':>15}")
        for name in options.tool or TOOLS:
            result = measure(mode, name, step, rounds=options.rounds, runs=options.runs)
            print(result.row(), flush=True)
            results.append(result)
    ratios = [result.median for result in results]
    print(
        f"\nwithout the cache: {statistics.mean(ratios):.1f} on average, {max(ratios):.1f} at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
