"""The place of a process in a distributed run, as launchers and drivers tell it: :class:`Rank`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import warnings
from collections.abc import Mapping

import attrs

from amanda.errors import AmandaWarning
from amanda.registry.drivers import registered_drivers

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables by which launchers number processes, tell how many there are, and number those of a
machine: ``torchrun`` and Ray Train, Open MPI, MPICH and Intel MPI, ``srun``."""


@attrs.frozen
class Rank:
    """The place of this process in a distributed run.

    Attributes:
        number: from 0 on.
        count: how many processes there are; None if that is not known.
        local: the number on its machine; None if that is not known.
        host: the name of its machine.
        mesh: the coordinate in each named axis of the program's meshes, ``{"dp": 0, "tp": 1}``;
            :meth:`located` fills it.
    """

    number: int = 0
    count: int | None = 1
    local: int | None = None
    host: str = attrs.field(factory=socket.gethostname, eq=False)
    mesh: Mapping[str, int] = attrs.field(factory=dict, eq=False)

    @classmethod
    def of_environment(cls) -> Rank:
        """Read what launchers set: :data:`_LAUNCHERS`, ``TF_CONFIG``, or ``PMIX_RANK`` alone."""
        given = [names for names in _LAUNCHERS if all(map(os.environ.get, names[:2]))]
        told = [cls._told_by(*names) for names in given]
        told.append(cls._of_cluster(os.environ.get("TF_CONFIG", "")))
        if not given and os.environ.get("PMIX_RANK", "").isdecimal():
            told.append(cls(int(os.environ["PMIX_RANK"]), None))
        return next((place for place in told if place.count != 1), cls())

    @classmethod
    def _told_by(cls, name: str, size: str, local: str) -> Rank:
        number, count, on_host = os.environ[name], os.environ[size], os.environ.get(local, "")
        is_given = number.isdecimal() and count.isdecimal() and max(len(number), len(count)) < 10
        if is_given and int(number) < int(count):
            return cls(int(number), int(count), int(on_host) if on_host.isdecimal() else None)
        warnings.warn(
            f"{name}={number} and {size}={count} do not name a process of a distributed run: the "
            "results are written as those of a single process",
            AmandaWarning,
            stacklevel=3,
        )
        return cls()

    @classmethod
    def _of_cluster(cls, config: str) -> Rank:
        """The place among all tasks of a cluster of TensorFlow; an evaluator is beside them."""
        try:
            found = json.loads(config or "{}")
            kinds = sorted(found["cluster"], key=_place_of_kind)
            sizes = {kind: len(found["cluster"][kind]) for kind in kinds}
            kind, index = str(found["task"]["type"]), int(found["task"]["index"])
        except (KeyError, TypeError, ValueError):
            return cls()
        before = sum(sizes[other] for other in itertools.takewhile(kind.__ne__, sizes))
        count = sum(sizes.values())
        return cls(before + index, count if before + index < count else None)

    def located(self) -> Rank:
        """The rank with its coordinates in the meshes that drivers have seen until now."""
        meshes = [cls.mesh for cls, _ in registered_drivers()]
        return attrs.evolve(self, mesh={axis: n for mesh in meshes for axis, n in mesh.items()})

    @property
    def suffix(self) -> str:
        """The end of the names of this rank's files; "" if there is only one process."""
        return "" if self.count == 1 else f"-rank{self.number}"

    def __str__(self) -> str:
        axes = "".join(f", {axis} {n}" for axis, n in self.mesh.items())
        return f"{self.number} of {self.count or 'an unknown number'}{axes}"


def _place_of_kind(kind: str) -> tuple[bool, bool, bool, str]:
    """The sort key of a kind of task: the first rank is one that runs operators, and prints."""
    return kind == "evaluator", kind not in ("chief", "master"), kind != "worker", kind
