"""Trains with Keras, which is imported inside of the scope: run as a program."""

from __future__ import annotations

import importlib
import sys

import amanda
from amanda.interface.points import PointContext


class Steps(amanda.Tool):
    """The phases of operators, and the iterations that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: set[tuple[str, str]] = set()
        self.ended: list[int] = []
        self.add_inst_for_op(self.note)
        self.add_inst_for_iteration(self.end, end=True)

    def note(self, context: amanda.OpContext) -> None:
        self.phases.add((context.get_phase(), context.get_op().type))

    def end(self, context: PointContext) -> None:
        self.ended.append(context.iteration)


def main(before: list[str]) -> None:
    """Train eagerly, and by a function.

    Args:
        before: modules that are imported before the scope.
    """
    for name in before:
        importlib.import_module(name)
    with amanda.apply(tool := Steps()):
        import keras
        import numpy as np

        layers = keras.layers
        for is_eager in (True, False):
            net = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
            net.compile("sgd", "mse", run_eagerly=is_eager, steps_per_execution=3)
            net.fit(np.ones((12, 8), "float32"), np.ones((12, 3), "float32"), 4, verbose=0)
    assert tool.ended == list(range(6)), tool.ended
    assert ("forward", "MatMul") in tool.phases
    assert ("optimizer", "AssignSubVariableOp") in tool.phases
    assert not any(phase == "forward" and "Random" in kind for phase, kind in tool.phases)


if __name__ == "__main__":
    main(sys.argv[1:])
