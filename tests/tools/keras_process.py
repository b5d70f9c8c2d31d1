"""Processes in which Keras runs on PyTorch: the backend is chosen when Keras is imported."""

from __future__ import annotations

from tests.running import run_python
from tests.tutorial.documents import ROOT


def run_on_pytorch(*arguments: str) -> str:
    """Run Python with arguments, from the root of the repository; what it has printed."""
    done = run_python(*arguments, cwd=ROOT, env={"KERAS_BACKEND": "torch"})
    assert done.returncode == 0, done.stderr
    return done.stdout
