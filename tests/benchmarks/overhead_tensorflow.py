"""Time of ResNet-50 under the TensorFlow drivers and their peers, as ratios to vanilla.

    python -m tests.benchmarks.overhead_tensorflow
    python -m tests.benchmarks.overhead_tensorflow --case function-train --batch 8 --size 64

All in one process with one thread; :mod:`tests.benchmarks.timing` says how. The runs in which
graphs are instrumented are not among them, but timed on their own by "first use": a training
function is traced, and then run for the first time, once vanilla and once under the counter. No
ratio is asserted anywhere: the bounds are those that the project wants to keep.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

import amanda
from tests.benchmarks import command
from tests.benchmarks.cases_tensorflow import MODES, Count, Function, Mode, comparisons

STEPS = {"infer": False, "train": True}
"""Kinds of step, and whether they train."""

CASES = {f"{mode}-{kind}": (mode, STEPS[kind]) for mode in MODES for kind in STEPS}


def cases(options: argparse.Namespace) -> command.Cases:
    """Each mode with each kind of step, on images of the size that the options give."""

    def program(mode: str, training: bool) -> Mode:
        return MODES[mode](options.batch, options.size, training)

    return {
        name: functools.partial(
            lambda mode, training: comparisons(program(mode, training), eager=mode == "eager"),
            *case,
        )
        for name, case in CASES.items()
    }


def first_use(options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of tracing a training function, and of its first run."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = command.parser(__doc__, CASES)
    parser.add_argument("--batch", type=int, default=8, help="images per step (default 8)")
    parser.add_argument("--size", type=int, default=64, help="pixels per side (default 64)")
    parser.add_argument("--no-first-use", action="store_true", help="leave out the first runs")
    options = parser.parse_args(arguments)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    seconds = {} if options.no_first_use else first_use(options)
    if seconds:
        print("first use of a training function, processor seconds, one run of each")
        print(*(f"  {name:42} {value:>8.2f}" for name, value in seconds.items()), sep="\n")
    rows = command.run(cases(options), options, first_use=seconds)
    return command.exit_code(rows, options)


if __name__ == "__main__":
    sys.exit(main())
