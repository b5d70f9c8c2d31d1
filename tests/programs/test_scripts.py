"""The figures of unusual programs beside independent ones; ``nox -s programs`` runs all of them.

A program is a script of ``scripts``, which runs plainly and under ``amanda run``: what it prints,
digests of its results among it, has to be equal. Its figures are compared with those of
:mod:`tests.programs.oracle`, and with formulas of what it computes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import attrs
import pytest

from tests.programs.processes import ENVIRONMENT
from tests.running import run_python

ROOT = Path(__file__).parents[2]
SAMPLE = ("fourier_network", "forward_called", "saves_on_signal")
WATCHING = "count,flops,summary,trace,profile,stats,sparsity,nan:action=record"
DERIVATIVES = "derivatives of gradients under a transform"
CHILDREN = "what child processes run, such as workers that load data"
TANGENTS = "tangents of operators in forward-mode differentiation"
SCRIPTS = "TorchScript modules: their operators run in C++"
SCRIPTED_GRADIENTS = "backward operators of TorchScript"
REMAT = "remat:budget=0.5"


@attrs.frozen(kw_only=True)
class Expected:
    """What the results of a program hold.

    Attributes:
        framework: what the program needs; only programs of PyTorch have an oracle.
        params, batch: those of ``flops``; None for those that the test says nothing of.
        forward, backward: operations of the last step; None likewise.
        flops: operations of the run; None for those of the oracle.
        more: place of a figure, ``flops/bound`` in the summary of a tool or ``Net:one/calls`` in
            the row of a module, to the value.
        not_seen: reasons of executions that were not seen, to their number.
        first: type of the first operator with a NaN or an infinity, the line of the script, 0 of
            other code, and the fate; None without any.
        also: tools under which the program gives the same in a run of its own.
        ranks: how many processes run it together.
    """

    framework: str = "torch"
    params: int | None = None
    batch: int | None = None
    forward: int | None = None
    backward: int | None = None
    flops: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    not_seen: Mapping[str, int] = attrs.field(factory=dict)
    first: tuple[str, int, str] | None = None
    also: str = ""
    ranks: int = 1

    def figures(self) -> dict[str, Any]:
        """Place of each figure to its value."""
        known = {
            "flops/params": self.params,
            "flops/batch": self.batch,
            "flops/per_step/flops": self.forward,
            "flops/per_step/flops_backward": self.backward,
        }
        return {
            **{place: value for place, value in known.items() if value is not None},
            **self.more,
        }


def attention(items: int, queries: int, width: int) -> int:
    """Two products, for each item and head."""
    return 2 * items * queries * queries * 2 * width


def gpt(batch: int, length: int) -> int:
    """A forward pass of ``nano_gpt_evaluates``."""
    return 2 * batch * length * 16 * (48 + 16 + 50) + attention(2 * batch, length, 8)


ITEMS = sum(attention(2, length, 8) for length in (3, 7, 5))
LLAMA, WIDE = 4 * 2 * 32 * 64 * 64 + attention(8, 16, 16), 2 * 32 * 64 * 96
CONV, LSTM = 2 * 3 * 8 * 8 * 4, 2 * 3 * 8 * (4 * 8) * (8 + 8)
KERAS = 2 * 24 * (4 * 8 * 8 + 8 * 16) + attention(8, 6, 4) + 2 * 4 * 96 * 2

PROGRAMS: Mapping[str, Expected] = {
    "pinn": Expected(params=16 + 16 + 16 + 1, batch=20, forward=2 * 20 * (16 + 16), also=REMAT),
    "second_derivative_nan": Expected(first=("pow_backward", 8, "reached")),
    # Passes of two networks with different batches have no one number of samples.
    "wgan_gp": Expected(params=5 * 16 + 17 * 2 + 3 * 16 + 17, more={"flops/per_sample": None}),
    "maml": Expected(params=25, more={"Sequential:2/flops": 2 * 10 * 8}),
    # The five networks' own parameters, and the stacked copies that are trained.
    "vmap_ensemble": Expected(
        params=2 * 5 * (7 * 12 + 13 * 3),
        batch=7,
        forward=2 * 5 * 7 * (6 * 12 + 12 * 3),
        backward=2 * 5 * 7 * (6 * 12 + 2 * 12 * 3),
        more={"Sequential:/output": [5, 7, 3], "flops/weight_bytes": 4 * 10 * (7 * 12 + 13 * 3)},
    ),
    # One pass of the values in each of four calls, and one of gradients.
    "forward_jacobian": Expected(
        flops=5 * 2 * (3 * 5 + 5 * 2),
        more={"flops/unknown_ops": {}, "flops/bound": "lower"},
        not_seen={TANGENTS: 13, DERIVATIVES: 1},
        also=REMAT,
    ),
    # A sum over modes and inputs; transforms have no formula.
    "fourier_network": Expected(
        params=8 + 4 * 4 * 5 + 5,
        more={
            "flops/weight_bytes": 4 * 13 + 8 * 4 * 4 * 5,
            "flops/bound": "lower",
            "Sequential:1/flops": 2 * 3 * 4 * 4 * 5,
            "Sequential:1/bound": "lower",
            "Sequential:0/bound": None,
        },
        first=("div", 30, "reached"),
    ),
    # The oracle counts a sparse product as a dense one; here it has no formula.
    "sparse_graph": Expected(
        params=9 * 16 + 17 * 2,
        batch=5,
        flops=2 * 2 * 5 * ((8 * 16 + 16 * 2) + (8 * 16 + 2 * 16 * 2)),
        more={"flops/unknown_ops": {"_sparse_mm": 4, "sparse_addmm_backward": 4}},
        first=("log1p", 23, ""),
    ),
    # Items of 3, 7 and 5 rows.
    "nested_batch": Expected(
        flops=2 * (2 * 15 * 16 * (6 * 16 + 3 * 4) + 3 * ITEMS),
        forward=2 * 15 * 16 * (3 * 16 + 4) + ITEMS,
        backward=2 * 15 * 16 * (3 * 16 + 2 * 4) + 2 * ITEMS,
        more={"Linear:/flops": 2 * 15 * 16 * 16, "Linear:/activation_bytes": 4 * 15 * 16},
    ),
    "fused_adamw": Expected(params=5 * 8 + 9 * 2, batch=6, first=("_fused_adamw", 14, "reached")),
    # The step whose gradients overflow is skipped, which is what a scaler is for.
    "grad_scaler": Expected(params=58, batch=6, first=("to_copy_backward", 13, "skipped")),
    # Blocks of 8 and 12 squares of 32 with norms, two tables of positions and norms, the embedding.
    "t5": Expected(
        params=2 * (8 * 1024 + 64) + 2 * (12 * 1024 + 96) + 2 * (128 + 32) + 50 * 32,
        batch=2,
        first=("log", 0, "masked"),
    ),
    # A block runs again up to its last product, which is down_proj.
    "llama_checkpointed": Expected(
        params=2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64,
        more={
            "flops/per_step/flops_recomputed": 2 * (LLAMA + 2 * WIDE),
            "LlamaForCausalLM:model.layers.0.mlp.down_proj/flops": WIDE,
            "LlamaForCausalLM:/flops": 2 * (LLAMA + 3 * WIDE) + 2 * 32 * 64 * 100,
        },
    ),
    # A rank has half of each weight, of the first bias, and the second bias.
    "tensor_parallel": Expected(
        params=16 * 16 + 16 + 16 * 16 + 16,
        batch=8,
        forward=2 * 8 * 2 * 16 * 16,
        backward=2 * 8 * 3 * 16 * 16,
        more={"flops/unknown_ops": {}},
        ranks=2,
    ),
    # The oracle also counts the sums of clipped gradients, which are none of the model.
    "per_sample_gradients": Expected(
        params=70 + 33,
        batch=9,
        forward=2 * 9 * (60 + 30),
        backward=2 * 9 * (60 + 2 * 30),
        flops=2 * 2 * 9 * (60 + 30 + 60 + 2 * 30),
        more={"flops/bound": None, "Sequential:0/output": [9, 10]},
    ),
    # The oracle knows no LSTM. The data needs no gradient.
    "audio_layers": Expected(
        params=40 + 576 + 33,
        forward=2 * CONV + LSTM,
        backward=3 * CONV + 2 * LSTM,
        flops=3 * (5 * CONV + 3 * LSTM),
        more={"Net:lstm/flops": LSTM, "Net:up/flops": CONV, "stats/tensors/weights": 8},
    ),
    # Nor the attention of the CPU, whose gradient has five products. Four steps, two evaluations,
    # and two tokens generated for each.
    "nano_gpt_evaluates": Expected(
        params=50 * 16 + 17 * 48 + 17 * 16,
        batch=4,
        forward=gpt(4, 8),
        flops=12 * gpt(4, 8) + 2 * attention(8, 8, 8) + 2 * (gpt(12, 8) + gpt(1, 2) + gpt(1, 3)),
        more={"GPT:/output": [4, 8, 50], "GPT:head/flops": 2 * 32 * 16 * 50},
        also=REMAT,
    ),
    "forward_called": Expected(
        more={
            "Net:/flops": 2 * 5 * (6 * 8 + 8 * 2),
            "Net:one/calls": 0,
            "Net:one/flops": None,
            "profile/saved_bytes": 4 * 5 * (6 + 8 + 2),
        }
    ),
    # Without the scripted product and its gradients: three nodes in the first step, then one, with
    # two accumulations in each.
    "scripted_part": Expected(
        flops=2 * 2 * 5 * (6 * 8 + 8 * 2 + 6 * 8 + 2 * 8 * 2),
        more={"Sequential:1/flops": None, "Sequential:/bound": "lower"},
        not_seen={SCRIPTS: 2, SCRIPTED_GRADIENTS: 3 + 2 + 1 + 2},
    ),
    # Four steps and the evaluation of the handler.
    "saves_on_signal": Expected(forward=480, more={"flops/flops": 5 * 2 * 6 * (4 * 8 + 8)}),
    "forks": Expected(not_seen={CHILDREN: 1}, more={"flops/flops": 3 * 2 * 6 * (4 * 8 + 8)}),
    "keras_bfloat16": Expected(
        framework="tensorflow",
        params=16 + 288 + 1 + 144 + 194,
        forward=KERAS,
        backward=2 * KERAS - 3 * 2 * 24 * 8 * 8,
        more={"stats/tensors/weights": 15, "stats/not_looked_at": {}, "flops/bound": None},
    ),
    # Two epochs of 40 samples and 5 of validation, and 3 predictions; the last step has 8 samples.
    "keras_last_batch": Expected(
        framework="tensorflow",
        params=65 * 32 + 33 * 10,
        batch=16,
        forward=2 * 8 * (64 * 32 + 32 * 10),
        more={
            "flops/flops": (2 * 45 + 3) * 2 * (64 * 32 + 32 * 10),
            "flops/flops_backward": 2 * 40 * 2 * (64 * 32 + 2 * 32 * 10),
            "flops/steps": 6,
            # The outputs of two products, their biases and a function.
            "net:net/activation_bytes": 4 * 8 * (3 * 32 + 2 * 10),
        },
    ),
    "queue_runners": Expected(
        framework="tensorflow", params=3, flops=6 * 3 * 2 * 2 * 3, more={"flops/steps": 6}
    ),
}
"""Programs by the names of their scripts."""

CHOSEN = PROGRAMS if os.environ.get("AMANDA_PROGRAMS") == "all" else SAMPLE


def run(script: str, folder: Path, *words: str, ranks: int = 1) -> list[CompletedProcess[str]]:
    """Run a script after the words, in a process of its own for each rank."""
    path = str(Path(__file__).parent / "scripts" / f"{script}.py")
    modules = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "no_torchvision")))
    environment = {**ENVIRONMENT, "PYTHONPATH": modules}

    def process(rank: int) -> CompletedProcess[str]:
        group = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "STORE": store} if ranks > 1 else {}
        return run_python(*words, path, cwd=folder, env={**environment, **group}, check=True)

    with ThreadPoolExecutor(ranks) as pool, tempfile.TemporaryDirectory() as store:
        store += "/store"
        return list(pool.map(process, range(ranks)))


def watch(script: str, folder: Path, tools: str, ranks: int = 1) -> tuple[dict[str, Any], str]:
    """Run a script plainly and under tools, and compare; the figures, and what the tools print.

    Figures are the summaries of the tools by name, and the rows of modules by their paths.
    """
    plain = run(script, folder, ranks=ranks)
    command = ("-m", "amanda", "run", "-t", tools, "-o", "out", "--")
    watched = run(script, folder, *command, ranks=ranks)
    for one, other in zip(plain, watched, strict=True):
        assert other.stdout.startswith(one.stdout)
        assert messages(other.stderr) == messages(one.stderr)
    figures = [read(folder / "out", f"-rank{rank}" if ranks > 1 else "") for rank in range(ranks)]
    works = [(of["flops"]["params"], of["flops"]["per_step"]) for of in figures if "flops" in of]
    assert all(work == works[0] for work in works)
    return figures[0], watched[0].stdout.removeprefix(plain[0].stdout)


def read(folder: Path, rank: str) -> dict[str, Any]:
    """The figures in the results of a run."""
    paths = (path for path in folder.glob(f"*{rank}.json") if ".timeline" not in path.name)
    results = {p.stem.removesuffix(rank): json.loads(p.read_text("utf-8")) for p in paths}
    rows = {f"{row['model']}:{row['path']}": row for row in results["summary"]["modules"]}
    return {**{name: result["summary"] for name, result in results.items()}, **rows}


def messages(text: str) -> str:
    """The messages on stderr without times and numbers of processes."""
    return re.sub(r"(?m)^[IWE]\d{4} \S+ +\d+ ", "", text)


def figure(figures: Mapping[str, Any], place: str) -> Any:
    """The figure at a place."""
    found: Any = figures
    for key in place.split("/"):
        found = found.get(key)
    return found


def check_last_line(printed: str, not_seen: Mapping[str, int]) -> None:
    """The last line says that all operators were seen only where no other is known."""
    line = printed.splitlines()[-1]
    assert ("all seen as far as is known" in line) == (not not_seen)
    for reason, number in not_seen.items():
        assert f"{reason} ({number})" in line


def check_oracle(figures: Mapping[str, Any], found: Mapping[str, Any], expected: Expected) -> None:
    """Operations, backward operators and the producers of NaNs are those of PyTorch's own means."""
    flops, nan = figures["flops"], figures["nan"]
    if expected.flops is None:
        assert flops["flops"] + flops["flops_backward"] == found["flops"]
    unseen = expected.not_seen.get(SCRIPTED_GRADIENTS, 0)
    assert figures["count"]["backward"] + unseen == found["nodes"]
    assert bool(nan["producers"]) == bool(found["producers"])
    if (first := nan["first"]) and first["direction"] == "forward":
        assert first["name"].strip("_") == found["producers"][0].strip("_")
    elif first and first["kind"] == "nan":
        assert f"'{first['name']}' returned nan" in found["anomaly"]


@pytest.mark.parametrize("name", list(CHOSEN))
def test_figures_of_unusual_programs(name: str, tmp_path: Path) -> None:
    """Figures are those of formulas and of an independent oracle, gaps are counted where they are
    shown, and the program runs as without the tools."""
    expected = PROGRAMS[name]
    if find_spec(expected.framework) is None:
        pytest.skip(f"{expected.framework} is not installed")
    figures, printed = watch(name, tmp_path, WATCHING, expected.ranks)
    wanted = expected.figures()
    assert {place: figure(figures, place) for place in wanted} == wanted
    flops, first = figures["flops"], figures["nan"]["first"]
    assert expected.flops in (None, flops["flops"] + flops["flops_backward"])
    # Of child processes the last line tells alone.
    by_tools = {reason: n for reason, n in expected.not_seen.items() if reason != CHILDREN}
    assert flops["not_seen"] == by_tools
    check_last_line(printed, expected.not_seen)
    if first is not None:
        source, _, line = first["source"].rpartition(":")
        first = first["type"], int(line) * (Path(source).name == f"{name}.py"), first["fate"]
    assert first == expected.first
    if expected.framework == "torch" and expected.ranks == 1:
        [oracle] = run(name, tmp_path, "-m", "tests.programs.oracle")
        check_oracle(figures, json.loads(oracle.stdout.splitlines()[-1]), expected)
    if expected.also:
        watch(name, tmp_path, f"{expected.also},summary")


@pytest.mark.skipif(CHOSEN is SAMPLE, reason="nox -s programs runs it")
def test_recurrent_and_transposed_layers_are_pruned_or_named(tmp_path: Path) -> None:
    """Half of the weights of convolutions of one axis, transposed or not; a recurrent layer is
    listed with the reason."""
    run("audio_layers", tmp_path, "-m", "amanda", "run", "-t", "prune", "-o", "out", "--")
    result = json.loads((tmp_path / "out" / "prune.json").read_text("utf-8"))
    zeros = {row["type"]: (row["weights"], row["zeros"]) for row in result["ops"]}
    assert zeros == {"conv1d": (32, 16), "conv_transpose1d": (32, 16)}
    assert [(row["type"], bool(row["reason"])) for row in result["summary"]["skipped"]] == [
        ("lstm", True)
    ]
