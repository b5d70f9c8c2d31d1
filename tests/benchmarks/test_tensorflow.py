"""The benchmark of the TensorFlow drivers runs; what it measures of time is asserted nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import tensorflow_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tensorflow_reports_every_contestant(tmp_path: Path) -> None:
    """The table has a row, and the file an entry, for each contestant."""
    file = tmp_path / "tensorflow.json"
    # A process of its own: the number of threads is set before TensorFlow starts.
    options = "--mode function --forward --batch 1 --size 32 --rounds 1 --repetitions 1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.tensorflow", *options.split(), f"--json={file}"],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    contestants = [result["contestant"] for result in report["results"]]
    assert contestants == list(tensorflow_cases.CONTESTANTS)
    assert all(contestant in done.stdout for contestant in contestants)
    assert report["first_use"]
    assert all(name in done.stdout for name in report["first_use"])


def test_tools_do_what_they_are_compared_for() -> None:
    """The masks of the tool and of the model that has them written into it give one result."""
    import amanda

    mode = tensorflow_cases.Eager(batch=1, size=32, training=True)
    by_hand = mode.step(by_hand=True)
    step = mode.step()
    expected = [float(by_hand()) for _ in range(2)]
    with amanda.apply(tensorflow_cases.Mask()):
        found = [float(step()) for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-5)
    counter = tensorflow_cases.Count()
    with amanda.apply(counter):
        step()
    assert counter.counted in (53 + 53 + 52, 53 + 53 + 53)
