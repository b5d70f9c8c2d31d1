"""Programs in processes of their own: the frameworks begin anew, on one thread, without network."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import attrs

from tests.programs.comparison import Program, Result, compare
from tests.programs.registry import collect

_MARK = "amanda-programs-result "

_LIMIT = 1200
"""Seconds after which a program has failed."""

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}


@attrs.define
class Row:
    """One line of the table.

    Attributes:
        program: the program.
        result: what all of its processes found; None if one failed.
        error: the end of what the failed process wrote.
    """

    program: Program
    result: Result | None = None
    error: str = ""

    def versions(self) -> dict[str, str]:
        """The versions of the packages, as they are installed here."""
        return {name: importlib.metadata.version(name) for name in self.program.packages}

    def problems(self) -> list[str]:
        """What is not as it should be, for people."""
        if self.result is None:
            return [f"{self.program.name} failed:\n{self.error}"]
        return [
            f"{run}: {len(places)} of {self.result.values} values differ: {', '.join(places[:5])}"
            for run, places in self.result.differing.items()
        ]


def compared(program: Program) -> Row:
    """Compare a program in its processes, one per rank."""
    with tempfile.TemporaryDirectory() as store:
        started = [_start(program, rank, store) for rank in range(program.ranks)]
        written = []
        for process in started:
            try:
                written.append(process.communicate(timeout=_LIMIT)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                written.append(process.communicate()[0] + f"\nno end after {_LIMIT} seconds")
    row = Row(program)
    for process, text in zip(started, written, strict=True):
        lines = [line for line in text.splitlines() if line.startswith(_MARK)]
        if process.returncode or not lines:
            row.error = "\n".join(text.splitlines()[-25:])
            row.result = None
            break
        found = Result(**json.loads(lines[-1].removeprefix(_MARK)))
        row.result = _together(row.result, found)
    return row


def _start(program: Program, rank: int, store: str) -> subprocess.Popen[str]:
    """Start one process of a program."""
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(program.ranks), "AMANDA_PROGRAMS_STORE": store}
    ranks["TMPDIR"] = store
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs", program.framework, program.name, "--one"],
        env={**os.environ, **ENVIRONMENT, **program.environment, **ranks},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _together(one: Result | None, other: Result) -> Result:
    """The results of two ranks: operators are added up, and all differences are kept."""
    if one is None:
        return other
    differing = {
        run: [*one.differing.get(run, []), *other.differing.get(run, [])]
        for run in {**one.differing, **other.differing}
    }
    return Result(
        values=one.values + other.values,
        forward=one.forward + other.forward,
        backward=one.backward + other.backward,
        not_seen={**one.not_seen, **other.not_seen},
        differing=differing,
        warned=[*one.warned, *other.warned],
        fused=one.fused + other.fused,
        fused_error=max(one.fused_error, other.fused_error),
    )


def report(framework: str, name: str) -> None:
    """Compare a program in this process, and write the result for :func:`compared`."""
    _use_one_thread(framework)
    result: dict[str, Any] = attrs.asdict(compare(collect(framework)[name]))
    print("\n" + _MARK + json.dumps(result), flush=True)


def compared_here(program: Program) -> Row:
    """Compare a program in this process."""
    _use_one_thread(program.framework)
    try:
        return Row(program, compare(program))
    except Exception:
        return Row(program, error=traceback.format_exc())


def _use_one_thread(framework: str) -> None:
    """What the variables of the environment do not say."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
