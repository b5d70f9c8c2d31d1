"""The series of ``stats`` as a run of Weights & Biases or MLflow, by their own libraries.

Both start threads, draw random numbers and keep a current run per process, which may be the
program's own. Therefore a process of its own talks to them::

    python -m amanda_tools.stats.trackers wandb PROJECT RUN < samples.json

The libraries take their settings from the environment, which that process inherits
(``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda_tools._bases.watching import Sample
from amanda_tools.stats.writers import FIGURES

TIMEOUT = 300
"""Seconds to wait for a library."""

BATCH = 1000
"""Largest number of metrics in one call of MLflow."""

Points = Mapping[int, Mapping[str, float]]
"""Values by name, by step."""


def require(library: str) -> None:
    """Check that a library is installed, and do not import it.

    Raises:
        ValueError: it is not installed; the message says how to install it.
    """
    found = importlib.util.find_spec(library)
    # The folder that wandb writes into is a package without origin, if it is on the path.
    if found is None or found.origin is None:
        raise ValueError(f"{library}= needs {library}; try: pip install 'amanda-tools[{library}]'")


def send(library: str, project: str, run: str, series: Sequence[Sample]) -> None:
    """Log a series as one run of a project (of an experiment, in MLflow's words).

    Args:
        library: ``wandb`` or ``mlflow``.
        project: the name of the project, which is created where it does not exist.
        run: the name of the run.
        series: the samples; a metric is ``<operator>/<tensor>/<figure>``.

    Raises:
        OSError: the library has failed, or has not ended in time.
    """
    command = [sys.executable, "-m", __name__, library, project, run]
    samples = json.dumps([attrs.asdict(sample) for sample in series])
    try:
        done = subprocess.run(
            command, input=samples, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{library} has not answered in {TIMEOUT} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise OSError(f"{library} has failed: {lines[-1]}")


def _points(samples: Sequence[Mapping[str, Any]]) -> Points:
    points: dict[int, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        for figure in FIGURES:
            if sample[figure] is not None:
                name = f"{sample['key'].replace(' ', '/').lstrip('/')}/{figure}"
                points[sample["step"]][name] = sample[figure]
    return dict(sorted(points.items()))


def _log_to_wandb(project: str, run: str, points: Points) -> None:
    wandb = importlib.import_module("wandb")
    with wandb.init(project=project, name=run, job_type="amanda") as logged:
        for step, values in points.items():
            logged.log(dict(values), step=step)


def _log_to_mlflow(project: str, run: str, points: Points) -> None:
    entities, tracking = map(importlib.import_module, ("mlflow.entities", "mlflow.tracking"))
    client = tracking.MlflowClient()
    experiment = client.get_experiment_by_name(project)
    number = experiment.experiment_id if experiment else client.create_experiment(project)
    logged = client.create_run(number, run_name=run).info.run_id
    now = int(time.time() * 1000)
    # MLflow refuses other characters in names.
    metrics = [
        entities.Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
        for step, values in points.items()
        for name, value in values.items()
    ]
    for start in range(0, len(metrics), BATCH):
        client.log_batch(logged, metrics=metrics[start : start + BATCH])
    client.set_terminated(logged)


_LOGGERS: Mapping[str, Callable[[str, str, Points], None]] = {
    "wandb": _log_to_wandb,
    "mlflow": _log_to_mlflow,
}

if __name__ == "__main__":
    _library, _project, _run = sys.argv[1:]
    _LOGGERS[_library](_project, _run, _points(json.load(sys.stdin)))
