"""What the action cache is worth: the time of each tool without it, as a ratio to its time with it.

    python -m tests.benchmarks.cache
    python -m tests.benchmarks.cache --case eager --only prune

The paper's Figure 12. Without the cache (``amanda.cache_disabled()``) the analysis routines run at
every execution, and a graph is instrumented at every run. With it, both happen in the first run of
a scope, which is not timed. The program is a small residual net, in eager PyTorch and in a
``tf.function``, in one thread; :mod:`tests.benchmarks.timing` says how it is timed.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import amanda
from tests.benchmarks import command
from tests.benchmarks.timing import Comparison, Program, Step

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


def eager() -> Step:
    """The net in PyTorch."""
    torch = importlib.import_module("torch")
    network = importlib.import_module("tests.benchmarks.accuracy_torch")
    torch.set_num_threads(1)
    model, images = network.ResidualNet().eval(), torch.rand(8, 8, 8)

    def step() -> Any:
        with torch.no_grad():
            return model(images)

    return step


def function() -> Step:
    """The net in a ``tf.function``."""
    tf = importlib.import_module("tensorflow")
    network = importlib.import_module("tests.benchmarks.accuracy_tensorflow")
    model, images = network.residual_net(), tf.random.uniform((8, 8, 8))
    run = tf.function(lambda x: model(x, training=False))
    return lambda: run(images)


def comparisons(start: Callable[[], Step]) -> list[Comparison]:
    """A row for each tool: without the cache to with it."""
    step = start()
    return [
        Comparison(
            name,
            subject=Program(step, functools.partial(_without_cache, name)),
            baseline=Program(step, functools.partial(_applied, name)),
        )
        for name in TOOLS
    ]


def _applied(name: str) -> Any:
    return amanda.apply(amanda.tools.load(name)(**TOOLS[name]))


@contextmanager
def _without_cache(name: str) -> Iterator[None]:
    with _applied(name), amanda.cache_disabled():
        yield


CASES: command.Cases = {
    start.__name__: functools.partial(comparisons, start) for start in (eager, function)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, and print the mean over all tools."""
    parser = command.parser(__doc__, CASES)
    # A run without the cache takes up to a second, and the ratios are large.
    parser.set_defaults(rounds=7)
    options = parser.parse_args(arguments)
    # Read when the frameworks start.
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    rows = command.run(CASES, options)
    ratios = [row["median"] for row in rows]
    if ratios:
        mean, most = statistics.mean(ratios), max(ratios)
        print(f"\nwithout the cache: {mean:.1f} on average, {most:.1f} at most")
    return command.exit_code(rows, options)


if __name__ == "__main__":
    sys.exit(main())
