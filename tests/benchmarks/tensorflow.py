"""Time under the TensorFlow drivers, as ratios to vanilla, on ResNet-50.

    python -m tests.benchmarks.tensorflow
    python -m tests.benchmarks.tensorflow --mode function --train --batch 8 --size 64 --rounds 9

Everything runs in one process with one thread, in rounds: vanilla, first contestant,
vanilla, second contestant, ... so that a change of the machine's speed meets both
sides. A contestant's scope stays open over its block; the first runs in it, in which
graphs are instrumented, are not timed. They are timed on their own by "first use":
a training function is traced, and then run for the first time, once vanilla and once
under the counter. Nothing is asserted: times depend on the machine, and the bounds
printed beside them are what the project wants to keep. The row "vanilla" compares
vanilla runs with each other: it shows how much the figures are worth. "cpu" is the
same ratio for the time that the processor has spent on this process, which other
processes disturb less. A "!" says that all three figures are above the bound.
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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import tensorflow as tf

import amanda
from tests.benchmarks.tensorflow_cases import CONTESTANTS, MODES, Count, Function, Step, programs

WARM_UP = 2
"""Runs in a new scope that are not timed."""


@attrs.frozen
class Result:
    """One contestant in one case.

    Attributes:
        case: mode, and whether it trains.
        contestant: its name.
        bound: what the project wants to keep, if anything.
        median: median over the rounds of the ratio of the blocks' medians.
        minimum: ratio of the fastest runs.
        cpu: median over the rounds of the ratio of the blocks' processor times.
        milliseconds: of the contestant's median run.
    """

    case: str
    contestant: str
    bound: float | None
    median: float
    minimum: float
    cpu: float
    milliseconds: float

    def row(self) -> str:
        """A line of the table."""
        bound = f"{self.bound:>8.3f}" if self.bound is not None else " " * 8
        ratios = self.median, self.minimum, self.cpu
        is_above = self.bound is not None and min(ratios) > self.bound
        shown = " ".join(f"{ratio:>8.3f}" for ratio in ratios)
        return (
            f"  {self.contestant:42} {shown} {bound} {'!' if is_above else ' '} "
            f"{self.milliseconds:>10.2f} ms"
        )


@attrs.frozen
class Block:
    """Runs of one program.

    Attributes:
        seconds: of each run.
        cpu: seconds of the processor, of all of them.
    """

    seconds: Sequence[float]
    cpu: float


def _block(step: Step, repetitions: int) -> Block:
    """Some runs, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    seconds = []
    began = time.process_time()
    for _ in range(repetitions):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Block(seconds, time.process_time() - began)


def measure(mode: str, options: argparse.Namespace, training: bool) -> list[Result]:
    """All contestants in one case, each beside runs of its baseline."""
    case = f"{mode}, {'training' if training else 'forward'}"
    names = [c for c in CONTESTANTS if not options.only or any(o in c for o in options.only)]
    made = programs(MODES[mode](options.batch, options.size, training), names)
    blocks: dict[str, list[tuple[Block, Block]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, pairs in blocks.items():
            contestant = CONTESTANTS[name]
            gc.collect()
            baseline = _block(made[contestant.baseline], options.repetitions)
            with contestant.scope():
                pairs.append((baseline, _block(made[contestant.program], options.repetitions)))
    return [_result(case, mode, name, pairs) for name, pairs in blocks.items()]


def _result(case: str, mode: str, name: str, pairs: Sequence[tuple[Block, Block]]) -> Result:
    fastest = [min(min(block.seconds) for block in side) for side in zip(*pairs, strict=True)]
    median = statistics.median
    return Result(
        case=case,
        contestant=name,
        bound=CONTESTANTS[name].bound(mode),
        median=median(median(b.seconds) / median(a.seconds) for a, b in pairs),
        minimum=fastest[1] / fastest[0],
        cpu=median(b.cpu / a.cpu for a, b in pairs),
        milliseconds=1000 * median(second for _, b in pairs for second in b.seconds),
    )


def first_use(options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds that a training function takes at first: to be traced, and to run."""
    seconds = {}
    scopes: dict[str, AbstractContextManager[Any]] = {
        "first run, vanilla": nullcontext(),
        "first run, under the counter": amanda.apply(Count()),
    }
    for name, scope in scopes.items():
        function: Any = Function(options.batch, options.size, training=True).step()
        start = time.process_time()
        function.get_concrete_function()
        traced = time.process_time()
        with scope:
            function()
            seconds[name] = time.process_time() - traced
        seconds["tracing"] = min(seconds.get("tracing", float("inf")), traced - start)
    return seconds


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tensorflow", description="Ratios to vanilla."
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="only this; repeatable")
    parser.add_argument("--forward", action="store_true", help="only inference")
    parser.add_argument("--train", action="store_true", help="only training")
    parser.add_argument("--only", action="append", help="contestants whose name has this")
    parser.add_argument("--batch", type=int, default=8, help="images per step (default 8)")
    parser.add_argument("--size", type=int, default=64, help="pixels per side (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks (default 5)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs per block (default 5)")
    parser.add_argument("--no-first-use", action="store_true", help="leave out the first runs")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args(arguments)


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "load": round(os.getloadavg()[0], 2),
        "batch": options.batch,
        "size": options.size,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    options = _parsed(arguments)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print(" · ".join(f"{key} {value}" for key, value in environment(options).items()))
    results = []
    for mode in options.mode or MODES:
        for training in (False, True):
            if (options.train and not training) or (options.forward and training):
                continue
            found = measure(mode, options, training)
            print(f"\n{found[0].case:44} {'median':>8} {'minimum':>8} {'cpu':>8} {'bound':>8}")
            print(*(result.row() for result in found), sep="\n", flush=True)
            results += found
    seconds = {} if options.no_first_use else first_use(options)
    if seconds:
        print("\nfirst use of a training function, processor seconds")
        print(*(f"  {name:42} {value:>8.2f}" for name, value in seconds.items()), sep="\n")
    if options.json is not None:
        report = {
            "environment": environment(options),
            "results": [attrs.asdict(result) for result in results],
            "first_use": seconds,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
