"""Runs of ``amanda sweep`` as tasks of a cluster of Ray: :class:`RayCluster`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import ray
import ray.exceptions

from amanda.cli.sweep import run_here
from amanda.errors import AmandaError


class RayCluster:
    """A :class:`~amanda.registry.hookspecs.Cluster`; a task has a CPU, and a GPU if there are any.

    Args:
        address: as in ``RAY_ADDRESS``; "local" for one of this machine.

    Raises:
        AmandaError: it does not answer.
    """

    def __init__(self, address: str) -> None:
        try:
            ray.init(address=address, log_to_driver=False)
            has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            about = " ".join(str(error).split())
            raise AmandaError(f"RAY_ADDRESS={address}: {about}") from None
        # Without GPUs of its own a task does not see any. Who sweeps tells of a lost task, and runs
        # it again.
        self._run = ray.remote(num_cpus=1, num_gpus=int(has_gpus), max_retries=0)(_run)

    async def run(self, words: Sequence[str], folder: Path) -> int:
        """Run Python, see :class:`~amanda.registry.hookspecs.Cluster`.

        Raises:
            AmandaError: the task is lost.
        """
        task = self._run.remote([*words], str(folder), os.getcwd())
        future: asyncio.Future[int] = asyncio.wrap_future(task.future())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Without force the task would wait for its process, which Ray ends with it so.
            ray.cancel(task, force=True)
            with contextlib.suppress(ray.exceptions.RayError):
                await future
            raise
        except ray.exceptions.RayError as error:
            raise AmandaError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()


def _run(words: Sequence[str], folder: str, current: str) -> int:
    """Run Python on a machine of the cluster."""
    os.chdir(current)
    return asyncio.run(run_here(words, Path(folder)))
