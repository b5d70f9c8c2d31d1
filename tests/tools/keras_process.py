"""Processes in which Keras runs on PyTorch: the backend is chosen when Keras is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.tutorial.documents import ROOT


def run_on_pytorch(*arguments: str) -> str:
    """Run Python with arguments, from the root of the repository; what it has printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
