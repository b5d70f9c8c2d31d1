"""How many Python functions of Amanda's one operator runs through, from the fourth step on.

    python -m tests.benchmarks.frames

Counts of calls do not depend on the machine. Steps of two sizes run under each tool; the figure is
what one more operator costs. Nothing is asserted. PyTorch is measured with the mode and with the
interceptor that is used by default, TensorFlow in eager mode and in a ``tf.function``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import amanda
from tests.benchmarks.watching import Watch
from tests.counting import called, sources

SIZES = (2, 6)
"""Layers of a step; the difference is the cost of four of them."""

WARM_UP = 4
"""Steps until no analysis runs any more."""

Step = Callable[[int], Any]
Row = tuple[str, amanda.Tool, Step, int]
"""Name, tool, step of so many layers, and operators of a layer."""


class Routines(amanda.Tool):
    """Empty routines before and after each forward or each backward operator."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse, backward=backward)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert both."""
        if context.is_forward():
            context.insert_before_op(self.ignore)
            context.insert_after_op(self.ignore)
        else:
            context.insert_before_backward_op(self.ignore)
            context.insert_after_backward_op(self.ignore)

    def ignore(self, *tensors: object) -> None:
        """Do nothing."""


def per_operator(tool: amanda.Tool, step: Step, operators: int, drivers: Sequence[str]) -> float:
    """Calls of functions that one more operator costs."""
    counts: list[int] = []
    for size in SIZES:
        with amanda.apply(tool, drivers=drivers):
            for _ in range(WARM_UP):
                step(size)
                amanda.new_iteration()
            with called(sources()) as codes:
                step(size)
        counts.append(len(codes))
    return (counts[1] - counts[0]) / ((SIZES[1] - SIZES[0]) * operators)


def torch_rows() -> Iterator[Row]:
    """PyTorch, one linear operator a layer."""
    import torch
    from torch import nn

    x = torch.ones(2, 4)

    models = {size: nn.Sequential(*(nn.Linear(4, 4) for _ in range(size))) for size in SIZES}

    def forward(layers: int) -> Any:
        return models[layers](x)

    def training(layers: int) -> None:
        forward(layers).sum().backward()

    yield "forward, watched", Watch(backward=False), forward, 1
    yield "forward, routines before and after", Routines(backward=False), forward, 1
    yield "forward and backward, watched", Watch(backward=True), training, 1
    # A linear layer has two nodes, and two accumulations of its parameters.
    yield "backward node, routines before and after", Routines(backward=True), training, 4


def tensorflow_rows() -> Iterator[Row]:
    """TensorFlow, one product a layer."""
    import tensorflow as tf

    x = tf.ones([2, 2])
    product = tf.function(lambda y: tf.linalg.matmul(y, x))

    def forward(layers: int) -> Any:
        y = x
        for _ in range(layers):
            y = tf.linalg.matmul(y, x)
        return y

    def training(layers: int) -> None:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(layers)
        tape.gradient(y, x)

    def function(layers: int) -> None:
        for _ in range(layers):
            product(x)

    yield "eager, watched", Watch(backward=False), forward, 1
    yield "eager, routines before and after", Routines(backward=False), forward, 1
    yield "eager, forward and backward, watched", Watch(backward=True), training, 1
    yield "call of a tf.function, watched", Watch(backward=False), function, 1
    yield "call of a tf.function, routines before and after", Routines(backward=False), function, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.frames",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    for interceptor in ("mode", "auto"):
        os.environ["AMANDA_TORCH_INTERCEPTOR"] = interceptor
        _print(f"PyTorch, interceptor {interceptor}", ["torch-eager"], torch_rows())
    drivers = ["tensorflow-eager", "tensorflow-function"]
    _print("TensorFlow", drivers, tensorflow_rows())
    return 0


def _print(title: str, drivers: Sequence[str], rows: Iterator[Row]) -> None:
    print(f"{title}: functions per operator")
    for name, tool, step, operators in rows:
        print(f"{per_operator(tool, step, operators, drivers):8.2f}  {name}")


if __name__ == "__main__":
    sys.exit(main())
