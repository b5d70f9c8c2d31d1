"""The benchmark of the TensorFlow drivers runs; times are asserted nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import cases_tensorflow
from tests.running import run_python

ROOT = Path(__file__).parents[2]


ROWS = [
    "amanda, nothing instrumented",
    "amanda, Python counter on convolutions",
    "mask written into the model",
    "amanda, traced mask (to the hand-written)",
]


@pytest.mark.slow
def test_overhead_reports_every_comparison(tmp_path: Path) -> None:
    """The table and the file have a row for each comparison."""
    file = tmp_path / "tensorflow.json"
    # A process of its own: the number of threads is set before TensorFlow starts.
    options = f"--case function-infer --batch 1 --size 32 --quick -o {file}"
    done = run_python("-m", "tests.benchmarks.overhead_tensorflow", *options.split(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [row["name"] for row in report["rows"]] == ROWS
    assert all(name in done.stdout for name in ROWS)


def test_tools_do_what_they_are_compared_for() -> None:
    """The masks of the tool and of the model that has them written into it give one result."""
    import amanda

    mode = cases_tensorflow.Eager(batch=1, size=32, training=True)
    by_hand = mode.step(by_hand=True)
    step = mode.step()
    expected = [float(by_hand()) for _ in range(2)]
    with amanda.apply(cases_tensorflow.Mask()):
        found = [float(step()) for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-5)
    counter = cases_tensorflow.Count()
    with amanda.apply(counter):
        step()
    assert counter.counted in (53 + 53 + 52, 53 + 53 + 53)
