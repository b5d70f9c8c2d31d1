"""The README's main job: unmodified programs, under tools, from the command line."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.running import run_python

ROOT = Path(__file__).parents[2]
TORCH = "amanda-torch/examples/resnet50_bert.py"
TENSORFLOW = "amanda-tensorflow/examples/resnet50.py"


def run(*arguments: str) -> list[str]:
    """What a Python process prints, on a machine without torchvision and network."""
    path = os.pathsep.join([str(ROOT / "tests/no_torchvision"), os.environ.get("PYTHONPATH", "")])
    done = run_python(*arguments, cwd=ROOT, env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("example", [TORCH, TENSORFLOW])
def test_example_knows_nothing_of_amanda(example: str) -> None:
    """It is a plain program, without a word about instrumentation."""
    code = (ROOT / example).read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code
    assert "amanda" not in code.lower()


def under_count_and_trace(example: str, folder: Path) -> tuple[list[str], list[Any], Counter[str]]:
    """What an example prints, and the rows and executions by type that ``count`` writes."""
    printed = run("-m", "amanda", "run", "-t", "count,trace", "-o", str(folder), "--", example)
    assert json.loads((folder / "trace.json").read_text(encoding="utf-8"))["tool"] == "trace"
    rows = json.loads((folder / "count.json").read_text(encoding="utf-8"))["ops"]
    executions: Counter[str] = Counter()
    for row in rows:
        executions[row["type"]] += row["executions"]
    return printed, rows, executions


@pytest.mark.slow
def test_example_of_pytorch_under_count_and_trace(tmp_path: Path) -> None:
    """It trains as it would without us; the tables and files hold all operators."""
    vanilla = run(TORCH)
    assert len(vanilla) == 2
    printed, rows, executions = under_count_and_trace(TORCH, tmp_path)
    assert [line for line in printed if ": loss " in line] == vanilla
    assert executions["conv2d"] == executions["conv2d_backward"] == 53
    assert executions["linear"] == executions["linear_backward"] == 1 + 12 * 6 + 2
    assert executions["attention"] == 12
    assert {"resnet.embedder.embedder.convolution", "bert.pooler.dense"} <= {
        row["module"] for row in rows
    }


@pytest.mark.slow
def test_example_of_tensorflow_under_count_and_trace(tmp_path: Path) -> None:
    """It trains as it would without us; the files hold the convolutions of both passes."""
    vanilla = run(TENSORFLOW)
    assert len(vanilla) == 2
    printed, _, executions = under_count_and_trace(TENSORFLOW, tmp_path)
    # Routines between operators that the graph optimizer would have fused cost the fusion, and so
    # the last bits (contract rule 11): on an AMD EPYC 3.0127 was printed for 3.0126.
    loss, shape = vanilla
    assert printed[1] == shape
    assert printed[0].rpartition(" ")[0] == loss.rpartition(" ")[0]
    told, expected = (float(line.rpartition(" ")[2]) for line in (printed[0], loss))
    assert told == pytest.approx(expected, abs=2e-4)
    # One step of training and one prediction. The images' gradient is not wanted.
    assert executions["conv2d"] == 2 * 53
    assert executions["conv2d_backward"] in (53 + 52, 53 + 53)
