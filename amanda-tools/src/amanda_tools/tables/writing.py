"""Tables that grow while a program runs: ``DIR/<tool>/rank=<R>/part-<N>.parquet``."""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from amanda import OpContext, Tool
from amanda.errors import AmandaError
from amanda.files import read_json, write_json
from amanda.interface.points import PointContext
from amanda.registry.distributions import amanda_versions
from amanda.tools.reporting import ReportingTool
from amanda_tools.tables.rows import Sums, rows_of, write_rows

SCHEMA = 1
"""Version of headers and of the columns."""

PART = re.compile(r"(?:.*/)?rank=(?P<rank>\d{1,9})/part-(?P<number>\d{1,12})\.parquet")
"""The path of a part."""

_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


_NEW_OPS = (16 << 20) // (8 * 160)
"""Operators whose rows, 8 in each table, are 16 MB."""


class TablesLostError(AmandaError):
    """Rows have not been written."""


class TableRecorder(Tool):
    """Writes the rows of tools at the end of each `every` steps, and at the end of the run.

    They are also written when about 16 MB are of operators that have come since.

    Args:
        tools: the tools by their names in the run.
        folder: of the results.
        place: gives what is known of the rank.
        every: steps between two parts.

    Attributes:
        has_ended: whether the program has come to its end, once it has ended.
    """

    only_watches = True

    def __init__(
        self,
        tools: Mapping[str, Tool],
        folder: Path,
        place: Callable[[], Mapping[str, Any]],
        every: int,
    ) -> None:
        super().__init__()
        self._every = every
        self.has_ended = True
        self._written = 0
        self._ended = 0
        self._first = 0
        self._new_ops = 0
        self._tables = [
            RankTable(folder / name, tool, place)
            for name, tool in tools.items()
            if isinstance(tool, ReportingTool)
        ]
        self.add_inst_for_op(self._count_op)
        self.add_inst_for_iteration(self._end_step, end=True)

    def begin(self, step: int) -> None:
        """Note that the scope begins after steps of the run."""
        self._first = self._written = self._ended = step

    def _count_op(self, context: OpContext) -> None:
        self._new_ops += 1

    def _end_step(self, point: PointContext) -> None:
        self._ended = self._first + point.iteration + 1
        is_large = self._new_ops * len(self._tables) >= _NEW_OPS
        if is_large or self._ended - self._written >= self._every:
            self._write()

    def _write(self, *, is_last: bool = False) -> None:
        steps, self._written, self._new_ops = self._ended - self._written, self._ended, 0
        for table in self._tables:
            table.add(self._ended, steps, self._first, is_last=is_last)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write the rows since the last part; the folders of the tables.

        Raises:
            TablesLostError: rows of this window or an earlier one are lost.
        """
        self._write(is_last=self.has_ended)
        if lost := [table.lost for table in self._tables if table.lost]:
            raise TablesLostError("; ".join(lost))
        return [table.folder.parent for table in self._tables]


class RankTable:
    """The table of one tool on this rank.

    Args:
        folder: of the tool, made where it is missing.
        tool: the tool.
        place: gives what is known of the rank.

    Attributes:
        folder: of the rank.
        lost: why rows were not written, "" if all were.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, tool: ReportingTool[Any], place: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._place = place
        now = place()
        self.folder, self._host = folder / f"rank={now['number']}", now["host"]
        self.lost = ""
        self._tool, self._before = tool, Sums()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Of a process that was killed.
        for partial in self.folder.glob(".amanda-*.partial"):
            partial.unlink(missing_ok=True)
        names = [PART.fullmatch(path.as_posix()) for path in self.folder.iterdir()]
        self._next = 1 + max((int(found["number"]) for found in names if found), default=-1)
        self.header = {
            "schema": SCHEMA,
            "tool": tool.name,
            "tool_schema": tool.schema,
            **self._job(),
            "versions": {"Python": platform.python_version(), **amanda_versions()},
            "began": time.time(),
            "first_step": None,
            "last_step": None,
            "parts": 0,
            "rows": 0,
            "rows_dropped": 0,
            "has_ended": False,
        }
        self._write_header()
        # What a file system says of the time of a file is what all ranks of a folder can compare.
        seconds = os.stat(self._header).st_mtime - time.time()
        self.header["clock_offset"] = round(seconds, 2)

    @property
    def _header(self) -> Path:
        return self.folder / "header.json"

    def _job(self) -> dict[str, Any]:
        """The run, the attempt and the first part of the run.

        A run has the name of the launcher's job, if it gives one. A process is a further attempt of
        an earlier one in the folder that has the same job, or has failed.
        """
        try:
            earlier = read_json(self._header)
            run, attempt, first = earlier["run"], int(earlier["attempt"]), earlier["first_part"]
            has_failed = not earlier["has_ended"]
        except (AmandaError, KeyError, TypeError, ValueError):
            run, attempt, first, has_failed = "", 0 if self._next else -1, 0, bool(self._next)
        told = [os.environ.get(name, "") for name in _RESTARTS]
        restarts = max(int(number) if number.isdecimal() else 0 for number in told)
        # "none" is torchrun's default.
        jobs = {os.environ.get(name, "") for name in _JOBS} - {"", "none"}
        goes_on = has_failed or restarts > 0
        job = min(jobs, default="") or (goes_on and run) or secrets.token_hex(4)
        is_first = not (goes_on or job == run)
        return {
            "run": job,
            "attempt": max(restarts, attempt + 1),
            "first_part": self._next if is_first else first,
        }

    def add(self, step: int, steps: int, began: int, *, is_last: bool) -> None:
        """Write a part with the rows since the last one, and the header; never raises.

        Args:
            step: the steps that have ended.
            steps: those since the last part.
            began: those that had ended when the tools began.
            is_last: whether the run has ended.
        """
        header, rows = self.header, []
        common = {"run": header["run"], "host": self._host, "attempt": header["attempt"]}
        try:
            given = self._tool.window_rows()
            rows = list(rows_of(given, self._tool.figures, step, self._before, began))
            if rows:
                part = self.folder / f"part-{self._next}.parquet"
                write_rows(part, rows, {**common, "step": step})
                self._next += 1
                header["parts"] += 1
                header["rows"] += len(rows)
                rows = []
                header["last_step"] = step
                if header["first_step"] is None:
                    header["first_step"] = step - steps
            header["has_ended"] = is_last
            self._write_header()
        # A full disk ends no training.
        except (Exception, duckdb.Error) as error:
            header["rows_dropped"] += len(rows)
            about = " ".join(str(error).split())
            self.lost = self.lost or f"{header['tool']}: {type(error).__name__}: {about}"

    def _write_header(self) -> None:
        write_json(self._header, {**self.header, "rank": self._place()})
