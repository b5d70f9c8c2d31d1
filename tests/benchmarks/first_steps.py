"""What the first step under a tool costs, and how that and later steps grow.

    python -m tests.benchmarks.first_steps
    python -m tests.benchmarks.first_steps --case path --processes 7
    python -m tests.benchmarks.first_steps --case keras

Each figure is the median of processor times of several fresh processes, since much is made once for
each process and the garbage collector's part depends on what the process holds. With PyTorch
vanilla and later steps are the fastest of five. With Keras the first step traces the model: the
vanilla one is the first of a process of its own, the memory is the most that the processes had, and
later steps are compared with steps in between in which the tool is disabled.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import amanda
from tests.benchmarks.timing import Step
from tests.benchmarks.watching import Watch

PROCESSES = 5
"""Fresh processes of each case."""

LATER = 5
"""Steps that are measured after the first, vanilla and under the tool."""


class Everywhere(Watch):
    """Inserts an empty Python routine at all four points, and takes all tensors."""

    def __init__(self) -> None:
        super().__init__(backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines."""
        if context.is_backward():
            context.insert_before_backward_op(self.touch)
            context.insert_after_backward_op(self.touch)
        else:
            context.insert_before_op(self.touch)
            context.insert_after_op(self.touch)

    def touch(self, *tensors: object) -> None:
        """Do nothing."""


TOOLS: Mapping[str, Callable[[], amanda.Tool]] = {
    "no action": lambda: Watch(backward=True),
    "4 routines": Everywhere,
}
"""Those that have no short name."""


@attrs.frozen
class Case:
    """A program and the tool that it runs under.

    Attributes:
        program: the function that gives a step, as module and name.
        tool: the short name of a tool, or one of :data:`TOOLS`.
    """

    program: str
    tool: str

    @property
    def is_traced(self) -> bool:
        """Whether the first step makes a graph, which later ones use."""
        return self.program.startswith("keras.")

    def start(self) -> Step:
        """The step."""
        module, _, name = self.program.partition(".")
        found = importlib.import_module(f"tests.benchmarks.first_steps_{module}")
        step: Step = getattr(found, name)()
        return step

    def applied(self) -> amanda.Tool:
        """The tool."""
        make = TOOLS.get(self.tool) or amanda.tools.load(self.tool)
        tool: amanda.Tool = make()
        return tool


CASES: Mapping[str, Case] = {
    "densenet121-64px": Case("torch.densenet", "flops"),
    "densenet121-64px-remat": Case("torch.densenet", "remat"),
    "densenet121-64px-stats": Case("torch.densenet", "stats"),
    "densenet121-64px-path": Case("torch.densenet", "path"),
    "keras-mobilenetv2-64px-nothing": Case("keras.mobilenet", "no action"),
    "keras-mobilenetv2-64px": Case("keras.mobilenet", "count"),
    "keras-mobilenetv2-64px-routines": Case("keras.mobilenet", "4 routines"),
    "keras-resnet50-64px-nothing": Case("keras.resnet", "no action"),
    "keras-resnet50-64px": Case("keras.resnet", "count"),
    "keras-resnet50-64px-routines": Case("keras.resnet", "4 routines"),
    "keras-densenet201-64px": Case("keras.densenet", "count"),
    "keras-mobilenetv2-32px-fit": Case("keras.mobilenet_fit", "count"),
    "keras-resnet50-64px-fit": Case("keras.resnet_fit", "count"),
}
"""By name. Steps of densenet121 train on one image, those of Keras models on two."""


def measure(case: Case, vanilla: bool) -> dict[str, float]:
    """Seconds of processor time in this process, and bytes.

    Args:
        vanilla: of a program that is traced, measure the vanilla first step.
    """
    step = case.start()
    if case.is_traced and vanilla:
        return {"vanilla": _timed(step), "vanilla_memory": _memory()}
    if case.is_traced:
        with amanda.apply(case.applied()):
            first, memory = _timed(step), _memory()
            later = statistics.median(_beside_disabled(step) for _ in range(LATER))
        return {"first": first, "memory": memory, "later": later}
    step()
    usual = min(_timed(step) for _ in range(LATER))
    with amanda.apply(case.applied()):
        first = _timed(step)
        later = min(_timed(step) for _ in range(LATER))
    return {"vanilla": usual, "first": first, "later": later / usual}


def _beside_disabled(step: Step) -> float:
    """The time of a step in ratio to that of a vanilla one, which uses the graph that is there."""
    under = _timed(step)
    with amanda.disabled():
        return under / _timed(step)


def _timed(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _memory() -> float:
    """The most bytes that the process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def medians(name: str, processes: int) -> dict[str, float]:
    """The medians over fresh processes; vanilla ones and others take turns."""
    command = [sys.executable, "-m", __spec__.name, "--inside", name]
    commands = [[*command, "--vanilla"], command] if CASES[name].is_traced else [command]
    runs: dict[str, list[float]] = {}
    for _ in range(processes):
        for each in commands:
            done = subprocess.run(each, check=True, capture_output=True, text=True)
            for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                runs.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in runs.items()}


def line(name: str, row: Mapping[str, float]) -> str:
    """A row as Markdown."""
    memory = ""
    if "vanilla_memory" in row:
        memory = f"{row['memory'] / 2**30:.2f} over {row['vanilla_memory'] / 2**30:.2f}"
    figures = f"{row['vanilla']:.3g} | {row['first']:.3g} | x{row['later']:.2f} | {memory}"
    return f"| {name} | {CASES[name].tool} | {figures} |"


HEAD = (
    "| program | tool | vanilla step, s | first step, s | later steps over vanilla | GB |\n"
    "|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--vanilla", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(measure(CASES[options.inside], options.vanilla)))
        return 0
    print(HEAD)
    for name in CASES:
        if options.case in name:
            print(line(name, medians(name, options.processes)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
