"""``dump``: selected activations, weights and gradients as safetensors, with an index."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda.tools.reporting import type_names
from amanda_tools._bases.phases import other_phases
from amanda_tools._bases.repetitions import Repetitions
from amanda_tools._bases.watching import WatchingOptions, WatchingRoutine, WatchingTool, check_kinds
from amanda_tools._output.units import format_short
from amanda_tools._values.recordings import Recording
from amanda_tools._values.shapes import HANDLES, byte_size
from amanda_tools._values.tensor_files import WRITABLE
from amanda_tools._values.tensors import Array, reader_of
from amanda_tools.dump.files import Entry, TensorFiles

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
        default=("activations", "gradients"), converter=type_names, validator=check_kinds
    )
    bytes: int = attrs.field(default=10_000_000_000, validator=attrs.validators.ge(0))
    shard: int = attrs.field(default=256_000_000, validator=attrs.validators.ge(1))


class DumpTool(WatchingTool[DumpOptions]):
    """Writes activations, weights and gradients to safetensors.

    Full files go to a temporary folder at once, so that at most one is in memory. If the process
    is killed they stay there, in ``$TMPDIR/amanda-dump-*``, with an index.

    Example: ``amanda run -t dump:every=10,limit=1000 -o out -- train.py``

    Attributes:
        files: the recorded tensors.
        described: their operators by id.
    """

    name = "dump"
    group = "compare"
    Options = DumpOptions
    only_watches = True
    by_parameter = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Read by `amanda run`: without a folder what is recorded is lost.
        self.needs_folder = True
        self.files = TensorFiles(self.name, self.options.shard)
        self.described: dict[str, OpDescription] = {}
        self._beyond = 0
        self._repetitions = Repetitions(self)

    @property
    def entries(self) -> Sequence[Entry]:
        """Recorded tensors, in order."""
        return self.files.entries

    @property
    def dropped(self) -> int:
        """Number of tensors not recorded: beyond the limits, lost, or of a type that the format
        lacks."""
        return self._beyond + self.files.lost + sum(self.not_looked_at.by_kind().values())

    def has_activations(self, op: OpDescription) -> bool:
        """True: recordings are compared by all values that a program computes."""
        return True

    def is_selected(self, op: OpDescription) -> bool:
        """True if the options select this operator; with ``phases=model`` no optimizer's are."""
        return super().is_selected(op) and (op.phase != "optimizer" or self.options.phases == "all")

    # -- taking -----------------------------------------------------------

    def is_repeated(self, place: tuple[str, str, str]) -> bool:
        """True where a checkpoint runs an operator again: it has the values of the first run."""
        return self._repetitions.is_one(place, self.steps_overlap)

    def observe(self, routine: WatchingRoutine, tensors: Sequence[Any]) -> None:
        """Instrumentation routine: keep the values."""
        for position, tensor in enumerate(tensors):
            if tensor is not None:
                self._take(routine, position, tensor)

    def _take(self, routine: WatchingRoutine, position: int, tensor: Any) -> None:
        name, (parameter, _) = routine.tensor_name(position), routine.parameter(position)
        reader, op, files = reader_of(tensor), routine.op, self.files
        dtype = reader.dtype(tensor)
        is_writable = dtype in WRITABLE and reader.is_readable(tensor)
        if not is_writable:
            # A handle, as of a variable, has no values.
            self.not_looked_at.note(tensor, dtype, unless=dtype in HANDLES)
            return
        remaining = self.options.bytes - files.bytes
        # Tensors that are too large are not copied.
        is_small = (byte_size(tensor) or 0) <= remaining and len(files.entries) < self.options.limit
        stored = reader.storable(tensor) if is_small and not files.problem else None
        if not files.problem and (stored is None or stored.nbytes > remaining):
            self._beyond += 1
        elif files.add(
            stored,
            key=f"{op.id} {name} {routine.step}",
            row={**op.identity(), "phase": op.phase, "parameter": parameter},
            kind=routine.kind,
            tensor=name,
            step=routine.step,
            dtype=dtype,
            order=routine.order,
        ):
            self.described[op.id] = op

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """Return the index, one row per tensor.

        ``key``, ``file``, ``kind``, ``tensor``, ``parameter``, ``step``, ``shape`` and ``dtype``.
        """
        # The last tensors may be lost while they are written.
        self.files.write_waiting()
        facts = {op_id: op.facts() for op_id, op in self.described.items()}
        return [{**e.plain(self.name), **facts[e.row["id"]]} for e in self.entries]

    def summary(self) -> dict[str, Any]:
        """Number of recorded tensors, bytes and operators, and of tensors not recorded."""
        kinds = {entry.kind for entry in self.entries}
        return {
            "tensors": len(self.entries),
            "bytes": self.files.bytes,
            "not_taken": self.dropped,
            "ops": len({entry.row["id"] for entry in self.entries}),
            "kinds": {kind: sum(e.kind == kind for e in self.entries) for kind in sorted(kinds)},
            "not_looked_at": self.not_looked_at.by_kind(),
            **({"problem": self.files.problem} if self.files.problem else {}),
        }

    def tables(self) -> Iterable[Table]:
        """Recorded tensors by kind, and why others were not."""
        found = self.summary()
        size = format_short(found["bytes"], "B")
        title = f"{self.name}: {found['tensors']} tensors recorded, {size}"
        taken = [entry for entry in self.entries if self.is_shown(entry.row["phase"])]
        kinds = collections.Counter(entry.kind for entry in taken)
        yield Table(title, ("kind", "tensors"), sorted(kinds.items()))
        if len(taken) < len(self.entries):
            rows = [{**entry.row, "tensors": 1} for entry in self.entries]
            yield from other_phases(self.name, rows, self.options, ("tensors",))
        if self._beyond:
            title = f"{self.name}: {self._beyond} tensors beyond a limit were not taken"
            limits = [(name, getattr(self.options, name)) for name in ("limit", "bytes")]
            yield Table(title, ("limit", "value"), limits)
        if self.files.problem:
            yield Table(f"{self.name}: {self.files.problem}", (), ())
        yield from self.not_looked_at.tables(self.name)

    def load(self, entry: Entry) -> Array:
        """Return the values of a recorded tensor; types that NumPy lacks as float32."""
        return self.files.load(entry)

    def recording(self) -> Recording:
        """Return the recorded tensors as a recording that is read from files has them."""
        files = self.files
        return Recording.of((e.plain(self.name), partial(files.load, e)) for e in files.entries)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>-00000.safetensors``, ... and ``<stem>.index.json``."""
        return self.files.copy_to(folder, stem)
