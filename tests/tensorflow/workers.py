"""One of two workers of MultiWorkerMirroredStrategy, as a program: ``TF_CONFIG`` says which.

It trains plainly, under tools, and plainly again, and prints what is equal, and the collectives.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import tensorflow as tf

import amanda
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from tests.identity import Identity


class Collectives(amanda.Tool):
    """Notes types and attributes of the operators that have a group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op().type.startswith("Collective"):
            given = canonical.attributes(context)
            self.found.setdefault(context["op_type"], {**given, "group": "group" in given})


def trained(strategy: tf.distribute.Strategy, *tools: amanda.Tool) -> list[Any]:
    """Weights and gradients after two steps, each worker with other data."""
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        weight = tf.Variable(tf.reshape(tf.linspace(-1.0, 1.0, 12), [4, 3]))
    x = tf.reshape(tf.linspace(-1.0, 1.0 + index, 8), [2, 4])

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.nn.relu(x @ weight)))
        gradient = tape.gradient(loss, weight)
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
        weight.assign_sub(0.01 * summed)
        return summed

    function = tf.function(lambda: strategy.run(step))
    found = []
    with amanda.apply(*tools) if tools else contextlib.nullcontext():
        for _ in range(2):
            found += [function().numpy(), weight.numpy()]
    return found


def main() -> None:
    """Print a line of JSON."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    plain, tool = trained(strategy), Collectives()
    runs = [trained(strategy, Identity()), trained(strategy, tool), trained(strategy)]
    equal = [all(map(np.array_equal, plain, run)) for run in runs]
    print(json.dumps({"equal": equal, "collectives": tool.found, "weight": plain[-1].tolist()}))


if __name__ == "__main__":
    main()
