"""``stats`` logs to Weights & Biases and MLflow, by their own libraries (``nox -s trackers``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda_tools.stats import trackers


def watched(**options: Any) -> Any:
    tool = amanda.tools.load("stats")(tensors="activations", csv=False, **options)
    x = lb.tensor([1.0, -2.0])
    with amanda.apply(tool):
        for _ in range(3):
            x = lb.relu(lb.add(x, x))
    return tool


def name_of(look: Any) -> str:
    return f"{look.key.replace(' ', '/').lstrip('/')}/mean"


def metrics_of(tool: Any) -> dict[str, float]:
    """The last mean of each tensor, by the name that the metric has."""
    return {name_of(look): look.mean for look in tool.series}


def test_series_become_a_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client reads every metric at every step."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tool = watched(mlflow="networks")
    tool.write_files(tmp_path, "stats")
    client = tracking.MlflowClient()
    experiment = client.get_experiment_by_name("networks")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    expected = metrics_of(tool)
    assert {name: run.data.metrics[name] for name in expected} == expected
    name = next(iter(expected))
    looks = [look for look in tool.series if name_of(look) == name]
    history = client.get_metric_history(run.info.run_id, name)
    assert [(m.step, m.value) for m in history] == [(look.step, look.mean) for look in looks]


def test_series_become_a_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the run is in a file; the program's process does not import the library."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sys.modules.pop("wandb", None)
    tool = watched(wandb="networks")
    tool.write_files(tmp_path, "stats")
    assert "wandb" not in sys.modules
    [log] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert b"networks" in content
    for name in metrics_of(tool):
        assert name.encode() in content


def test_a_failure_of_a_tracker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's last line stands in the error, and files written before it stay."""
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "entities.py").write_text("raise RuntimeError('the server is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    tool = watched(mlflow="networks")
    with pytest.raises(OSError, match="mlflow has failed: RuntimeError: the server is not there"):
        tool.write_files(tmp_path, "stats")


def test_a_missing_tracker_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'amanda-tools\[wandb\]'"):
        watched(wandb="networks")
