"""Time under the analysis tools and beside their peers, as ratios to vanilla.

    python -m tests.benchmarks.tools
    python -m tests.benchmarks.tools --case gpt2-12x64-infer --tool flops --rounds 15
    python -m tests.benchmarks.tools --no-peers --processor

The cases are those that the project holds its tools to: a GPT-2 of twelve layers of
width 64, bound by launches, and ResNet-50 in training on eight images. Blocks of vanilla
and of a contestant alternate in one process with one thread, and a scope's first
runs, in which operators are analysed, are not timed. Nothing is asserted; the bounds
printed are what the project wants of the tool in the case. Processor time leaves out
what else the machine does, and is the better measure on a busy one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda
from tests import models
from tests.benchmarks.cases import VANILLA, Case
from tests.benchmarks.overhead import measure

# isort: split
import transformers


def _gpt2() -> models.Built:
    config = transformers.GPT2Config(
        n_layer=12, n_head=4, n_embd=64, vocab_size=200, n_positions=128, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 200, (1, 8))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids}


def _resnet50() -> models.Built:
    return models.resnet50(size=224, batch=8)


def _small_resnet50() -> models.Built:
    # The same operators in less time: what a tool adds is the same, in milliseconds.
    return models.resnet50(size=32, batch=8)


CASES = {
    "gpt2-12x64-infer": Case(_gpt2, training=False, bound=2.0, repetitions=30),
    "gpt2-12x64-train": Case(_gpt2, training=True, bound=2.0, repetitions=15),
    "resnet50-b8-32-train": Case(_small_resnet50, training=True, bound=2.0, repetitions=6),
    "resnet50-b8-224-train": Case(_resnet50, training=True, bound=1.02, repetitions=2),
}

BOUNDS = {
    ("gpt2-12x64-infer", "flops"): 2.0,
    ("gpt2-12x64-infer", "trace"): 2.0,
    ("gpt2-12x64-infer", "nan"): 2.8,
    ("resnet50-b8-224-train", "flops"): 1.02,
    ("resnet50-b8-224-train", "trace"): 1.02,
}
"""What is wanted of a tool in a case; of the others nothing is."""


class _NanCheck(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                bool(torch.isfinite(tensor).all())
        return result


@contextmanager
def _anomalies(model: nn.Module) -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield


Contestant = Callable[[nn.Module], AbstractContextManager[Any]]

_OURS = "amanda, "


def _tool(name: str, **options: Any) -> Contestant:
    cls: Callable[..., amanda.Tool] = amanda.tools.load(name)
    return lambda model: amanda.apply(cls(**options))


PEERS: dict[str, Contestant] = {
    "peer: FlopCounterMode": lambda model: FlopCounterMode(display=False),
    "peer: NaN check in a DispatchMode": lambda model: _NanCheck(),
    "peer: detect_anomaly": _anomalies,
}


def contestants(names: Sequence[str], *, with_peers: bool) -> dict[str, Contestant]:
    """Vanilla, the named tools with their default options, and the peers."""
    found: dict[str, Contestant] = {VANILLA: lambda model: nullcontext()}
    found.update((_OURS + name, _tool(name)) for name in names)
    return {**found, **PEERS} if with_peers else found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tools")
    parser.add_argument("--case", action="append", choices=CASES, help="only this; repeatable")
    parser.add_argument("--tool", action="append", help="only this; repeatable")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of blocks (default 7)")
    parser.add_argument("--no-peers", action="store_true", help="only Amanda")
    parser.add_argument("--processor", action="store_true", help="processor time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = options.tool or ["count", "flops", "nan", "trace"]
    found = contestants(names, with_peers=not options.no_peers)
    clock = time.process_time if options.processor else time.perf_counter
    for case in options.case or CASES:
        print(f"\n{case:35} {'median':>8} {'minimum':>8} {'bound':>8}   {'median run':>13}")
        for result in measure(case, CASES[case], options.rounds, found, clock):
            bound = BOUNDS.get((case, result.contestant.removeprefix(_OURS)))
            print(attrs.evolve(result, bound=bound).row(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
