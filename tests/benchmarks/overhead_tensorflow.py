"""Time of ResNet-50 under the TensorFlow drivers, as ratios to vanilla.

    python -m tests.benchmarks.overhead_tensorflow
    python -m tests.benchmarks.overhead_tensorflow --case function-train --batch 8 --size 64

All in one process with one thread; :mod:`tests.benchmarks.timing` says how. The runs in which
graphs are instrumented are not among them. No ratio is asserted anywhere: the bounds are those that
the project wants to keep.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import tensorflow as tf

from tests.benchmarks import command
from tests.benchmarks.cases_tensorflow import MODES, Mode, comparisons

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = command.parser(__doc__, CASES)
    parser.add_argument("--batch", type=int, default=8, help="images per step (default 8)")
    parser.add_argument("--size", type=int, default=64, help="pixels per side (default 64)")
    options = parser.parse_args(arguments)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rows = command.run(cases(options), options)
    return command.exit_code(rows, options)


if __name__ == "__main__":
    sys.exit(main())
