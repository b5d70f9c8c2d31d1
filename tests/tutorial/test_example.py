"""The README's main job: an unmodified program, under tools, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = "amanda-torch/examples/resnet50_bert.py"


def run(*arguments: str) -> list[str]:
    """What a Python process prints, on a machine without torchvision and network."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "tests/no_torchvision"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_example_knows_nothing_of_amanda() -> None:
    """It is a plain program, without a word about instrumentation."""
    code = (ROOT / EXAMPLE).read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert "amanda" not in code.lower()


@pytest.mark.slow
def test_example_under_count_and_trace(tmp_path: Path) -> None:
    """It trains as it would without us; the tables and files hold all operators."""
    vanilla = run(EXAMPLE)
    assert len(vanilla) == 2
    instrumented = run(
        "-m", "amanda", "run", "-t", "count,trace", "-o", str(tmp_path), "--", EXAMPLE
    )
    assert [line for line in instrumented if ": loss " in line] == vanilla

    rows = json.loads((tmp_path / "count.json").read_text(encoding="utf-8"))["ops"]
    executions: Counter[str] = Counter()
    for row in rows:
        executions[row["type"]] += row["executions"]
    assert executions["conv2d"] == executions["conv2d_backward"] == 53
    assert executions["linear"] == executions["linear_backward"] == 1 + 12 * 6 + 2
    assert executions["attention"] == 12
    assert {"resnet.embedder.embedder.convolution", "bert.pooler.dense"} <= {
        row["module"] for row in rows
    }
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["tool"] == "trace"
