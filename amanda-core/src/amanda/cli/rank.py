"""The place of a process in a distributed run, as launchers tell it: :class:`Rank`."""

from __future__ import annotations

import itertools
import json
import os
import warnings

import attrs

from amanda.errors import AmandaWarning

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables by which launchers number processes, and tell how many there are: ``torchrun``, Open
MPI, MPICH and Intel MPI, ``srun``."""


@attrs.frozen
class Rank:
    """The place of this process in a distributed run.

    Attributes:
        number: from 0 on.
        count: how many processes there are; None if that is not known.
    """

    number: int = 0
    count: int | None = 1

    @classmethod
    def of_environment(cls) -> Rank:
        """Read what launchers set: :data:`_LAUNCHERS`, ``TF_CONFIG``, or ``PMIX_RANK`` alone."""
        given = [pair for pair in _LAUNCHERS if all(map(os.environ.get, pair))]
        told = [cls._told_by(*pair) for pair in given]
        told.append(cls._of_cluster(os.environ.get("TF_CONFIG", "")))
        if not given and os.environ.get("PMIX_RANK", "").isdecimal():
            told.append(cls(int(os.environ["PMIX_RANK"]), None))
        return next((place for place in told if place.count != 1), cls())

    @classmethod
    def _told_by(cls, name: str, size: str) -> Rank:
        number, count = os.environ[name], os.environ[size]
        is_given = number.isdecimal() and count.isdecimal() and max(len(number), len(count)) < 10
        if is_given and int(number) < int(count):
            return cls(int(number), int(count))
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

    @property
    def suffix(self) -> str:
        """The end of the names of this rank's files; "" if there is only one process."""
        return "" if self.count == 1 else f"-rank{self.number}"

    def __str__(self) -> str:
        return f"{self.number} of {self.count or 'an unknown number'}"


def _place_of_kind(kind: str) -> tuple[bool, bool, bool, str]:
    """The sort key of a kind of task: the first rank is one that runs operators, and prints."""
    return kind == "evaluator", kind not in ("chief", "master"), kind != "worker", kind
