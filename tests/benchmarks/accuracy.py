"""Accuracy on real data under pruning and quantization.

    python -m tests.benchmarks.accuracy
    python -m tests.benchmarks.accuracy --framework torch --model transformer
    python -m tests.benchmarks.accuracy --output accuracy

Scikit-learn's handwritten digits, a small residual net and a small transformer, on PyTorch and
on TensorFlow: dense, under each method of ``prune`` and ``quantize`` at once, and after some
epochs of training under the tool. The table is printed; ``--output NAME`` writes ``NAME.md`` and
``NAME.json``. A network and a seed give the same figures on one machine with one thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

import amanda

MODELS = ("residual net", "transformer")
FRAMEWORKS = {"torch": "accuracy_torch", "tensorflow": "accuracy_tensorflow"}


@attrs.frozen
class Method:
    """A tool with its options.

    Attributes:
        name: as the table calls it.
        tool: its short name.
        options: of the tool.
        models: the models that have operators for it.
    """

    name: str
    tool: str
    options: dict[str, Any]
    models: Sequence[str] = MODELS


_NET, _TRANSFORMER = ("residual net",), ("transformer",)

METHODS = (
    Method("prune: magnitude, 80 %", "prune", {"method": "magnitude", "sparsity": 0.8}),
    Method("prune: 2:4", "prune", {"method": "nm"}),
    Method(
        "prune: tile-wise, 60 %",
        "prune",
        # Whole outputs are pruned: in the last layer they would be classes.
        {"method": "tile", "sparsity": 0.6, "tile": 16, "exclude": ["*head*"]},
    ),
    Method("prune: channels, 50 %", "prune", {"method": "channel"}, _NET),
    Method(
        "prune: positions, 30 %",
        "prune",
        {"method": "activation", "sparsity": 0.3, "exclude": ["*stem*"]},
        _NET,
    ),
    Method("prune: attention, 50 %", "prune", {"method": "attention"}, _TRANSFORMER),
    Method("quantize: static, int8", "quantize", {"method": "static"}),
    Method("quantize: static, int3 weights", "quantize", {"method": "static", "weight_bits": 3}),
    Method("quantize: dynamic, int8", "quantize", {"method": "dynamic"}),
    Method(
        "quantize: qat, int3 weights, int4",
        "quantize",
        {"method": "qat", "weight_bits": 3, "activation_bits": 4},
    ),
)


@attrs.frozen
class Result:
    """Accuracies of one network under one method.

    Attributes:
        framework, model, method: their names in the table.
        ops: how many operators the method acts on.
        before: with the weights of the dense network; None for the dense network.
        after: after training under the tool, of the dense network after training.
    """

    framework: str
    model: str
    method: str
    ops: int
    before: float | None
    after: float


def measure(network: Any, method: Method, dense: Any, *, epochs: int, rate: float = 1e-3) -> Result:
    """Measure one method on a copy of a trained network.

    Args:
        network: the module of a framework's networks.
        dense: the trained network.
        epochs: of training under the tool.
        rate: the learning rate of that training.
    """
    subject = dense.copy()
    tool = amanda.tools.load(method.tool)(**method.options)
    parameters: Callable[[], Iterable[Any]] = getattr(tool, "parameters", list)
    with amanda.apply(tool):
        subject.warm_up()
        before = subject.accuracy()
        subject.train(epochs, rate, parameters)
        after = subject.accuracy()
    ops = len(tool.result()["ops"])
    return Result(network.Network.framework, dense.name, method.name, ops, before, after)


def run(
    framework: str, model: str, methods: Sequence[Method], *, epochs: int, tuning: int
) -> Iterable[Result]:
    """Train the dense network, and measure all methods on copies of it."""
    network = importlib.import_module(f"tests.benchmarks.{FRAMEWORKS[framework]}")
    dense = network.Network(model)
    dense.train(epochs, 3e-3)
    yield Result(dense.framework, model, "dense", 0, None, dense.accuracy())
    for method in methods:
        if model in method.models:
            yield measure(network, method, dense, epochs=tuning)


def markdown(results: Sequence[Result]) -> str:
    """Format the table: methods by networks, accuracy in percent before and after training."""
    networks = list(dict.fromkeys((r.framework, r.model) for r in results))
    order = ["dense", *[method.name for method in METHODS]]
    methods = sorted({result.method for result in results}, key=order.index)
    found = {(r.framework, r.model, r.method): r for r in results}
    head = ["method", *[f"{model}, {framework}" for framework, model in networks]]
    lines = [head, ["---"] * len(head)]
    for method in methods:
        cells = [found.get((*network, method)) for network in networks]
        lines.append([method, *map(_cell, cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    after = f"{100 * result.after:.1f}"
    return after if result.before is None else f"{100 * result.before:.1f} → {after}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.accuracy", description="Accuracy on scikit-learn's digits."
    )
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this")
    parser.add_argument("--method", action="append", help="only methods with this in their name")
    parser.add_argument("--epochs", type=int, default=30, help="of the dense networks")
    parser.add_argument("--tuning", type=int, default=6, help="epochs under a tool")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table and write it."""
    options = parsed(arguments)
    wanted = options.method or [""]
    methods = [m for m in METHODS if any(part in m.name for part in wanted)]
    results: list[Result] = []
    for model in options.model or MODELS:
        for framework in options.framework or FRAMEWORKS:
            for result in run(
                framework, model, methods, epochs=options.epochs, tuning=options.tuning
            ):
                results.append(result)
                print(result.framework, result.model, result.method, _cell(result), flush=True)
    table = markdown(results)
    print(f"\n{table}")
    if options.output is not None:
        options.output.with_suffix(".md").write_text(table, encoding="utf-8")
        rows = [attrs.asdict(result) for result in results]
        text = json.dumps({"options": vars(options), "results": rows}, indent=1, default=str)
        options.output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
