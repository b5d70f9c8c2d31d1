"""Amanda's speed as one table: its interceptors and tools beside their peers, and their goals.

    python -m tests.benchmarks.speed --case gpt2-4x64-infer
    python -m tests.benchmarks.speed --write      # all cases, and amanda-torch/docs/speed.md
    python -m tests.benchmarks.speed --write -o rows.json --resume   # go on after an interruption

All with one thread, TensorFlow in a process of its own; :mod:`tests.benchmarks.timing` says how. A
row of an interceptor is the workload's step under a tool, with the interceptor that its name begins
with; its bound is the goal that the project has set itself. Rows of torchlens and nnsight are there
where these are installed (``tests/benchmarks/peers.txt``), those of the gate where that is.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amanda
from amanda.results import Chart
from tests import models
from tests.benchmarks import command
from tests.benchmarks.architectures import ARCHITECTURES
from tests.benchmarks.cases_torch import PEERS, WORKLOADS, Scope, Workload, tool
from tests.benchmarks.growth import growth
from tests.benchmarks.memory import peaks
from tests.benchmarks.timing import Comparison, Program
from tests.benchmarks.watching import Touch, Watch

VARIABLE = "AMANDA_TORCH_INTERCEPTOR"
"""The environment variable by which the driver ``torch-eager`` chooses, when it attaches."""

COMPILER = "AMANDA_TORCH_COMPILER"
"""That by which it chooses who compiles functions of the program."""

_MODULE = "tests.benchmarks.speed"

PAGE = Path("amanda-torch/docs/speed.md")
CHART = PAGE.with_suffix(".png")
"""Its picture, which ``tests/browser/pictures.py`` takes."""

TABLES = {
    "TensorFlow": "tensorflow", "GPT-2": "gpt2", "ResNet and BERT": ("resnet", "bert"),
    "Compiled functions": "compiled",
}  # fmt: skip
"""The tables of the page, and what the names of their cases begin with."""

LONGEST_BAR = 20.0
"""Larger ratios are in the tables only: beside them nobody could compare the others."""

Goals = Mapping[str, float]
"""Ratios to vanilla, by interceptor."""


def _tools(gate: Sequence[float]) -> Mapping[str, tuple[Scope, Goals]]:
    names = ("count", "trace", "flops", "nan")
    return {name: (tool(name), {"gate": goal}) for name, goal in zip(names, gate, strict=True)}


def _watched(gate: float) -> tuple[Scope, Goals]:
    return lambda model: amanda.apply(Watch(backward=True)), {"gate": gate}


def _touched(gate: float) -> tuple[Scope, Goals]:
    return lambda model: amanda.apply(Touch()), {"gate": gate}


ROUTINE = "empty routine before every operator"

SCOPES: Mapping[str, Mapping[str, tuple[Scope, Goals]]] = {
    "gpt2-4x64-infer": {"watched": _watched(1.08), ROUTINE: _touched(1.30)},
    "gpt2-4x64-train": {"watched": _watched(1.12), ROUTINE: _touched(1.25)},
    "gpt2-12x64-infer": _tools((1.15, 1.25, 1.20, 1.6)),
    "gpt2-12x64-train": _tools((1.25, 1.45, 1.25, 1.7)),
    "resnet18-b1-32-infer": {"watched": _watched(1.02), "count": (tool("count"), {"gate": 1.02})},
    "resnet50-b1-224-infer": {"watched": _watched(1.02), "count": (tool("count"), {"gate": 1.02})},
    "bert-base-b2-64-train": {
        **{
            name: (tool(name), {"gate": 1.06})
            for name in ("count", "flops", "trace", "profile", "nan")
        },
        "stats": (tool("stats"), {"gate": 1.6}),
    },
}
"""By workload: what is compared with vanilla, and the goals."""

MEDIAN, WORST = {"gate": 1.22}, {"gate": 1.40}
"""The goals of a routine on every operator of the 25 architectures."""

SLOW = "bert-base-b2-64-train"
"""Takes a second a step, in which the way to an operator is lost: no mode, no peers."""


def through(choice: str, scope: Scope, variable: str = VARIABLE) -> Scope:
    """The scope, with the driver's interceptor, or another variable, set as long as it is open."""

    @contextmanager
    def entered(model: nn.Module) -> Iterator[None]:
        before = os.environ.get(variable)
        os.environ[variable] = choice
        try:
            with scope(model):
                yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before

    return entered


def tools_on(workload: str, interceptors: Sequence[str]) -> list[Comparison]:
    """The rows of a workload: each interceptor with each scope, and the peers."""
    model, step = WORKLOADS[workload].start()
    vanilla = Program(step)
    rows = [
        Comparison(
            f"{interceptor}: {name}",
            Program(step, functools.partial(through(interceptor, scope), model)),
            vanilla,
            goals.get(interceptor),
        )
        for name, (scope, goals) in SCOPES[workload].items()
        for interceptor in interceptors
        if (workload, interceptor) != (SLOW, "mode")
    ]
    if workload == SLOW:
        return rows
    rows += [
        Comparison(name, Program(step, functools.partial(scope, model)), vanilla)
        for name, scope in PEERS.items()
    ]
    if not WORKLOADS[workload].training:
        rows += [Comparison(*row, vanilla) for row in _whole_steps(workload)]
    return rows


def _whole_steps(workload: str) -> Iterator[tuple[str, Program]]:
    """The peers that run the model themselves, as far as they are installed.

    Each has a model of its own: nnsight (0.8.1) sets a `forward` on every module, for good, and
    the other rows would measure that.
    """
    _, inputs = WORKLOADS[workload].build()
    if importlib.util.find_spec("torchlens"):
        import torchlens

        model, _ = WORKLOADS[workload].start()
        # By keyword, torchlens (2.36) gives the only parameter of a forward a second value.
        values = list(inputs.values())
        yield "peer: torchlens.trace", Program(lambda: torchlens.trace(model, values), _unwrapped)
    if importlib.util.find_spec("nnsight"):
        import nnsight

        traced = nnsight.NNsight(WORKLOADS[workload].start()[0])

        def trace() -> None:
            with torch.no_grad(), traced.trace(**inputs):
                pass

        yield "peer: nnsight, an empty trace", Program(trace)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """torchlens (2.36) wraps PyTorch's functions at its first use, and leaves them so for all."""
    from torchlens.backends.torch.wrappers import unwrap_torch

    try:
        yield
    finally:
        unwrap_torch()


def routine_on(architecture: str, interceptors: Sequence[str]) -> list[Comparison]:
    """An empty routine on every operator of an architecture: inference."""
    model, step = Workload(ARCHITECTURES[architecture], training=False).start()
    vanilla, scope = Program(step), _touched(1)[0]
    return [
        Comparison(
            f"{interceptor}: {ROUTINE}",
            Program(step, functools.partial(through(interceptor, scope), model)),
            vanilla,
            WORST.get(interceptor),
        )
        for interceptor in interceptors
    ]


def compiled_by_inductor(
    build: Callable[[], models.Built], training: bool = False
) -> list[Comparison]:
    """A model that ``torch.compile`` has compiled, under tools with which it stays compiled."""
    torch.manual_seed(0)
    model, inputs = build()
    function: Any = torch.compile(model.train(training))

    def step() -> None:
        with torch.set_grad_enabled(training):
            outputs = function(**inputs)
        if training:
            model.zero_grad(set_to_none=True)
            models.loss(outputs).backward()

    vanilla = Program(step)

    def within(applied: Scope) -> Program:
        return Program(step, functools.partial(through("auto", applied, COMPILER), model))

    return [
        Comparison("watched", within(lambda _: amanda.apply(Watch(backward=training))), vanilla, 1),
        Comparison("count", within(tool("count")), vanilla, 1.00),
        Comparison("flops", within(tool("flops")), vanilla, 1.00),
        Comparison(
            "traced mask on every weight", within(lambda _: amanda.apply(_Masks())), vanilla, 1.05
        ),
    ]


def compiled_eagerly(workload: str) -> list[Comparison]:
    """A model that the program compiles with ``backend="eager"``, over the uncompiled program."""
    vanilla = Program(WORKLOADS[workload].start()[1])
    model, step = WORKLOADS[workload].start()
    model.compile(backend="eager")
    bound = 1.10 if WORKLOADS[workload].training else 0.90

    def within(name: str) -> Program:
        return Program(step, functools.partial(through("auto", tool(name), COMPILER), model))

    names = ("count", "flops")
    return [
        Comparison("without tools", Program(step), vanilla),
        *(Comparison(name, within(name), vanilla, bound) for name in names),
    ]


_WEIGHTS = {"conv2d": 1, "linear": 1, "addmm": 2}
"""Operators with a weight, and its place among their inputs."""


class _Masks(amanda.Tool):
    """Multiplies the weight of every convolution and product by a mask of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the mask before an operator with a weight."""
        index = _WEIGHTS.get(context.get_op().__name__)
        if index is not None:
            mask = torch.ones(tuple(context.get_inputs()[index].shape))
            context.insert_before_op(_mask, inputs=[index], mask=mask)


@amanda.traceable
def _mask(weight: Any, mask: Any) -> Any:
    return weight * mask


def tensorflow_eager(training: bool) -> list[Comparison]:
    """A multilayer perceptron of twelve layers of width 64 in TensorFlow's eager mode."""
    import tensorflow as tf

    from tests.benchmarks.cases_tensorflow import check_numerics, perceptron

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    step = perceptron(layers=12, width=64, training=training)
    vanilla = Program(step)
    watched = Program(step, lambda: amanda.apply(Watch(backward=True)))

    def under(name: str) -> Program:
        return Program(step, lambda: amanda.apply(amanda.tools.load(name)()))

    checked = Program(step, check_numerics)
    return [
        Comparison("watched", watched, vanilla, 1.20),
        Comparison("trace", under("trace"), vanilla),
        Comparison("nan", under("nan"), vanilla),
        Comparison("peer: tf.debugging.enable_check_numerics", checked, vanilla),
    ]


def cases(interceptors: Sequence[str]) -> command.Cases:
    """Every case, with the rows of these interceptors."""
    made: dict[str, Callable[[], Sequence[Comparison]]] = {
        "tensorflow-eager-infer": lambda: tensorflow_eager(training=False),
        "tensorflow-eager-train": lambda: tensorflow_eager(training=True),
    }
    for workload in SCOPES:
        made[workload] = functools.partial(tools_on, workload, interceptors)
    for name in ARCHITECTURES:
        made[f"architecture-{name}"] = functools.partial(routine_on, name, interceptors)
    for training in ("infer", "train"):
        made[f"compiled-eagerly-gpt2-12x64-{training}"] = functools.partial(
            compiled_eagerly, f"gpt2-12x64-{training}"
        )
    # The small one shows what each call of a compiled function costs.
    compiled = {"resnet18": models.resnet18, "gpt2": models.gpt2, "gpt2-base": models.gpt2_base}
    for name, build in compiled.items():
        for training in (False, True):
            made[f"compiled-{name}-{'train' if training else 'infer'}"] = functools.partial(
                compiled_by_inductor, build, training
            )
    return made


def run(interceptors: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the chosen cases, those of TensorFlow in a process of their own.

    Where it is imported, its drivers are attached as well, and each routine pays for them. And
    nnsight 0.8 gives every object a method save, by which TensorFlow 2.21 cannot be imported.
    """
    chosen = options.case or list(cases(interceptors))
    options.case = [name for name in chosen if not name.startswith("tensorflow-")]
    apart = [name for name in chosen if name not in options.case]
    if not options.case:
        options.case = apart
        return command.run(cases(interceptors), options)
    apart = command.missing(apart, command.measured(options))
    known = _run_apart(apart, options) if apart else ()
    return command.run(cases(interceptors), options, known)


def _run_apart(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        arguments = [f"--case={name}" for name in names]
        arguments += [f"--rounds={options.rounds}", f"--seconds={options.seconds}"]
        arguments += [f"--output={file}"]
        arguments += [f"--only={text}" for text in options.only or ()]
        arguments += ["--quick"] * options.quick
        subprocess.run([sys.executable, "-m", _MODULE, *arguments], check=True)
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return rows


# -- the page ------------------------------------------------------------------


def page(rows: Sequence[Mapping[str, Any]], others: Sequence[str]) -> str:
    """The page of the documentation, as Markdown.

    Args:
        rows: of :func:`command.run`.
        others: paragraphs and tables that follow.
    """
    about = command.environment()
    if any(row["case"].startswith("tensorflow-") for row in rows):
        # It goes by several names, and is not imported here.
        (name, *_) = metadata.packages_distributions()["tensorflow"]
        about["tensorflow"] = metadata.version(name)
    parts = [
        "# Speed",
        "Ratios of processor time to the same step without Amanda, with one thread: medians, 95 % "
        "intervals and, where there is one, the project's goal and whether it is kept. Written by "
        "`python -m tests.benchmarks.speed --write` on " + date(about) + ".",
        f"![GPT-2 of twelve layers of width 64]({CHART.name})",
    ]
    singles = [row for row in rows if not row["case"].startswith("architecture-")]
    for title, begin in TABLES.items():
        if chosen := [row for row in singles if row["case"].startswith(begin)]:
            parts += [f"## {title}", table(chosen)]
    if len(singles) < len(rows):
        parts += ["## 25 architectures", *architectures(rows)]
    return "\n\n".join([*parts, *others]) + "\n"


def date(about: Mapping[str, Any]) -> str:
    """When and on what: the day, versions and the machine."""
    import datetime

    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return ", ".join([day, *(f"{key} {value}" for key, value in about.items())])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table: a line for each name, a column for each case."""
    cases = dict.fromkeys(row["case"] for row in rows)
    cells = {(row["name"], row["case"]): cell(row) for row in rows}
    lines = [f"| | {' | '.join(cases)} |", "|---|" + "---|" * len(cases)]
    names = dict.fromkeys(row["name"] for row in rows)
    for name in sorted(names, key=lambda name: name.startswith("peer:")):
        found = [cells.get((name, case), "") for case in cases]
        lines += [f"| {name} | {' | '.join(found)} |"]
    return "\n".join(lines)


def cell(row: Mapping[str, Any]) -> str:
    """Ratio and interval, and the goal if there is one; ``unsure`` if nothing can be concluded."""
    ratio = f"{row['median']:.2f} ({row['interval']['low']:.2f}-{row['interval']['high']:.2f})"
    if row["bound"] is None:
        return f"{ratio} unsure" if row["doubt"] else ratio
    kept = "kept" if row["conclusion"] == "within the bound" else "missed"
    return f"{ratio}; {row['bound']:.2f} {'unsure' if row['doubt'] else kept}"


def architectures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The ratios of all architectures, and their median and worst."""
    chosen = [row for row in rows if row["case"].startswith("architecture-")]
    for name in dict.fromkeys(row["name"] for row in chosen):
        found = {
            row["case"].removeprefix("architecture-"): row["median"]
            for row in chosen
            if row["name"] == name
        }
        interceptor = name.partition(":")[0]
        worst = max(found, key=lambda case: found[case])
        goals = ""
        if interceptor in MEDIAN:
            goals = f" (goals: {MEDIAN[interceptor]:.2f} and {WORST[interceptor]:.2f})"
        yield (
            f"{name}, inference: median {statistics.median(found.values()):.2f}, worst "
            f"{found[worst]:.2f} on {worst}{goals}. "
            + ", ".join(f"{case} {ratio:.2f}" for case, ratio in found.items())
            + "."
        )


def charts(text: str) -> Iterator[Chart]:
    """Yield charts of the ratios on GPT-2 of twelve layers, read from the tables of the page."""
    gpt2 = text.partition("\n## GPT-2\n\n")[2].partition("\n\n")[0]
    head, _, *lines = [line.strip("|").split("|") for line in gpt2.splitlines()]
    for column, case in enumerate(name.strip() for name in head):
        if case.startswith("gpt2-12x64-"):
            cells = {line[0].strip(): line[column].split() for line in lines}
            ratios = {name: float(found[0]) for name, found in cells.items() if found}
            bars = {name: ratio for name, ratio in ratios.items() if ratio <= LONGEST_BAR}
            kind = {"infer": "inference", "train": "training"}[case.rpartition("-")[2]]
            yield Chart(
                title=f"GPT-2, 12 layers of width 64, {kind}: time as a ratio to vanilla",
                kind="bar",
                labels=list(bars),
                values={"ratio": list(bars.values())},
            )


def write(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Write the page."""
    others = ["## Growth", growth(quick=options.quick), "## Memory", peaks()]
    PAGE.write_text(page(rows, others), encoding="utf-8")


def _installed() -> Sequence[str]:
    has_gate = importlib.util.find_spec("amanda_torch_accel") is not None
    return ("mode", "gate") if has_gate else ("mode",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = command.parser(__doc__, cases(()))
    parser.add_argument(
        "--interceptor", action="append", choices=("mode", "gate"),
        help="only this; repeatable",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = run(options.interceptor or (_installed() if options.write else ("mode",)), options)
    if options.write:
        write(rows, options)
    return command.exit_code(rows, options)


if __name__ == "__main__":
    sys.exit(main())
