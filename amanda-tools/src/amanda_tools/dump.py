"""``dump``: selected activations, weights and gradients as safetensors, with an index."""

from __future__ import annotations

import collections
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.files import new_beside, write_json
from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda.tools.reporting import type_names
from amanda_tools._bases.phases import other_phases
from amanda_tools._bases.watching import WatchingOptions, WatchingRoutine, WatchingTool, check_kinds
from amanda_tools._output.units import format_quantity
from amanda_tools._values.shapes import byte_size
from amanda_tools._values.tensor_files import RECORDING, WRITABLE, read_tensor, write_tensors
from amanda_tools._values.tensors import Array, reader_of

__all__ = ["DumpOptions", "DumpTool", "Entry"]


@attrs.frozen(kw_only=True)
class DumpOptions(WatchingOptions):
    """The options of ``dump``.

    Attributes:
        every: write each N-th execution of an operator only.
        limit: number of tensors to write; later ones are counted only.
        bytes: number of bytes to write; tensors beyond it are counted only.
        shard: bytes of a file after which the next one begins.
    """

    tensors: Sequence[str] = attrs.field(
        default=("activations",), converter=type_names, validator=check_kinds
    )
    bytes: int = attrs.field(default=10_000_000_000, validator=attrs.validators.ge(0))
    shard: int = attrs.field(default=256_000_000, validator=attrs.validators.ge(1))


@attrs.frozen
class Entry:
    """One recorded tensor.

    Attributes:
        key: name in its file: operator id, tensor and step.
        file: number of the file that holds it.
        row: the operator, as in the rows of all tools.
        kind, tensor: kind and name of the tensor among those of the operator.
        step: number of the operator's execution, from 0.
        shape, dtype: sizes and element type of the tensor.
        order: number of its routine in the order of analyses; executors of graphs run operators in
            any order.
    """

    key: str
    file: int
    row: dict[str, Any]
    kind: str
    tensor: str
    step: int
    shape: list[int]
    dtype: str
    order: int

    def plain(self, stem: str) -> dict[str, Any]:
        """Return the entry of the index, for files named after `stem`."""
        found = attrs.asdict(self, recurse=False)
        return {**found.pop("row"), **found, "file": _shard(Path(), stem, self.file).name}


class DumpTool(WatchingTool[DumpOptions]):
    """Writes activations, weights and gradients to safetensors while the program runs.

    Full files go to a temporary folder at once, so that at most one is in memory. If the process
    is killed they stay there, in ``$TMPDIR/amanda-dump-*``, with an index.

    Example: ``amanda run -t dump:every=10,limit=1000 -o out -- train.py``

    Attributes:
        entries: recorded tensors, in order.
        described: the operators of the entries by id.
        dropped: number of tensors not recorded: beyond the limits, or of a type that the format
            lacks.
        waiting_bytes: bytes of tensors in memory that are in no file yet.
        problem: reason why tensors were lost, such as a full disk, after which nothing is recorded;
            "" without a loss.
    """

    name = "dump"
    Options = DumpOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entries: list[Entry] = []
        self.dropped = 0
        self.described: dict[str, OpDescription] = {}
        self._waiting: dict[str, Any] = {}
        self.waiting_bytes = 0
        self.problem = ""
        self._bytes = 0
        self._folder: Path | None = None
        self._files = 0
        self._stem = self.name
        self._id = secrets.token_hex(8)

    def has_activations(self, op: OpDescription) -> bool:
        """True: recordings are compared by all values that a program computes."""
        return True

    # -- taking -----------------------------------------------------------

    def observe(self, routine: WatchingRoutine, tensors: Sequence[Any]) -> None:
        """Instrumentation routine: keep the values."""
        for position, tensor in enumerate(tensors):
            if tensor is not None:
                self._take(routine, routine.tensor_name(position), tensor)

    def _take(self, routine: WatchingRoutine, name: str, tensor: Any) -> None:
        reader = reader_of(tensor)
        dtype = reader.dtype(tensor)
        is_writable = dtype in WRITABLE and reader.is_readable(tensor)
        self.not_looked_at.note(tensor, unless=is_writable)
        if self.problem or len(self.entries) >= self.options.limit or not is_writable:
            self.dropped += 1
            return
        remaining = self.options.bytes - self._bytes
        # Tensors that are too large are not copied.
        stored = None if (byte_size(tensor) or 0) > remaining else reader.storable(tensor)
        if stored is None or stored.nbytes > remaining:
            self.dropped += 1
            return
        shape = [int(size) for size in stored.shape]
        key = f"{routine.op.id} {name} {routine.step}"
        if key in self._waiting:
            # Counters of executions restart in a second scope.
            self.dropped += 1
            return
        # The format's writers take tensors of one framework: the first tensor decides for its file.
        first = next(iter(self._waiting.values()), stored)
        if type(first) is not type(stored):
            self._write_shard()
            if self.problem:
                self.dropped += 1
                return
        self._bytes += stored.nbytes
        self._waiting[key] = stored
        self.waiting_bytes += stored.nbytes
        row = {**routine.op.identity(), "phase": routine.op.phase}
        place = (routine.kind, name, routine.step)
        self.described[routine.op.id] = routine.op
        self.entries.append(Entry(key, self._files, row, *place, shape, dtype, routine.order))
        if self.waiting_bytes >= self.options.shard:
            self._write_shard()

    def _write_shard(self) -> None:
        if not self._waiting:
            return
        try:
            # In a temporary folder: the folder of the results is known only when the run ends.
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="amanda-dump-"))
                weakref.finalize(self, _remove, self._folder, os.getpid())
            about = {RECORDING: self._id}
            write_tensors(_shard(self._folder, self.name, self._files), self._waiting, about)
            # With an index: nothing else is left of a process that is killed.
            self._write_index(self._folder, self.name)
            self._files += 1
        except OSError as error:
            self._lose_waiting(f"temporary files cannot be written: {error}")
        self._waiting = {}
        self.waiting_bytes = 0

    def _write_index(self, folder: Path, stem: str) -> Path:
        """Write the index of the files in a folder; return its path."""
        index = folder / f"{stem}.index.json"
        entries = [entry.plain(stem) for entry in self.entries]
        # Another run into the same folder, at once or later, may replace some of the files.
        write_json(index, {RECORDING: self._id, "tensors": entries})
        return index

    def _lose_waiting(self, problem: str) -> None:
        """Count the tensors of a file that cannot be written; the program continues."""
        self.problem = problem
        self._bytes -= self.waiting_bytes
        self.dropped += len(self._waiting)
        self.entries = [entry for entry in self.entries if entry.file != self._files]

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """Return the index, one row per tensor.

        ``key``, ``file``, ``kind``, ``tensor``, ``step``, ``shape`` and ``dtype``.
        """
        # The last tensors may be lost while they are written.
        self._write_shard()
        facts = {op_id: op.facts() for op_id, op in self.described.items()}
        return [{**e.plain(self._stem), **facts[e.row["id"]]} for e in self.entries]

    def summary(self) -> dict[str, Any]:
        """Number of recorded tensors, bytes and operators, and of tensors not recorded."""
        kinds = {entry.kind for entry in self.entries}
        return {
            "tensors": len(self.entries),
            "bytes": self._bytes,
            "not_taken": self.dropped,
            "ops": len({entry.row["id"] for entry in self.entries}),
            "kinds": {kind: sum(e.kind == kind for e in self.entries) for kind in sorted(kinds)},
            **self.gaps(),
            **({"problem": self.problem} if self.problem else {}),
        }

    def tables(self) -> Iterable[Table]:
        """Recorded tensors by kind; the limits if tensors were not recorded."""
        found = self.summary()
        title = f"dump: {found['tensors']} tensors, {format_quantity(found['bytes'], 'B')}"
        taken = [entry for entry in self.entries if self.is_shown(entry.row["phase"])]
        kinds = collections.Counter(entry.kind for entry in taken)
        yield Table(title, ("kind", "tensors"), sorted(kinds.items()))
        if len(taken) < len(self.entries):
            rows = [{**entry.row, "tensors": 1} for entry in self.entries]
            yield from other_phases(self.name, rows, self.options, ("tensors",))
        if found["not_taken"]:
            title = f"dump: {found['not_taken']} tensors were not taken"
            limits = [(name, getattr(self.options, name)) for name in ("limit", "bytes")]
            yield Table(title, ("limit", "value"), limits)
        if self.problem:
            yield Table(f"dump: {self.problem}", (), ())
        yield from self.gap_tables()

    def load(self, entry: Entry) -> Array:
        """Return the values of a recorded tensor; types that NumPy lacks as float32."""
        self._write_shard()
        assert self._folder is not None
        return read_tensor(_shard(self._folder, self.name, entry.file), entry.key)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>-00000.safetensors``, ... and ``<stem>.index.json``."""
        self._write_shard()
        written: list[Path] = []
        try:
            for number in range(self._files):
                assert self._folder is not None
                path = _shard(folder, stem, number)
                # Copied, not moved: results may be written again.
                with new_beside(path) as partial:
                    shutil.copyfile(_shard(self._folder, self.name, number), partial)
                written.append(path)
            return [*written, self._write_index(folder, stem)]
        except OSError:
            # Without an index they are of no use.
            for path in written:
                path.unlink(missing_ok=True)
            raise


def _shard(folder: Path, stem: str, number: int) -> Path:
    """Return the path of a file of tensors."""
    return folder / f"{stem}-{number:05}.safetensors"


def _remove(folder: Path, process: int) -> None:
    """Remove the tool's folder, unless this is a forked child of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
