"""The files of ``dump``: recorded tensors in files of safetensors, and an index of them.

::

    files = TensorFiles("dump", shard=256_000_000)
    files.add(stored, key="Net.fc/linear:0 output 0", row=row, kind="activations", ...)
    files.copy_to(Path("out"), "dump")  # dump-00000.safetensors, ... and dump.index.json

Full files go to a temporary folder at once, so that at most one is in memory: the folder of the
results is known only when the run ends.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.files import TemporaryFolder, new_beside, write_json
from amanda_tools._values.tensor_files import RECORDING, read_tensor, write_tensors
from amanda_tools._values.tensors import Array


@attrs.frozen(kw_only=True)
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
        return {**found.pop("row"), **found, "file": _path(Path(), stem, self.file).name}


class TensorFiles:
    """Tensors in numbered files of a temporary folder; those of the last file are in memory.

    Attributes:
        entries: recorded tensors, in order.
        bytes: their number of bytes.
        waiting_bytes: bytes of tensors in memory that are in no file yet.
        lost: number of tensors that could not be written.
        problem: reason why tensors were lost, such as a full disk, after which nothing is recorded;
            "" without a loss.
    """

    def __init__(self, stem: str, shard: int) -> None:
        """Begin with no files.

        Args:
            stem: beginning of the names in the temporary folder.
            shard: bytes of a file after which the next one begins.
        """
        self.entries: list[Entry] = []
        self.bytes = self.waiting_bytes = self.lost = 0
        self.problem = ""
        self._stem = stem
        self._shard = shard
        self._waiting: dict[str, Any] = {}
        self._folder: TemporaryFolder | None = None
        self._files = 0
        self._id = secrets.token_hex(8)

    def add(self, stored: Any, key: str, **about: Any) -> bool:
        """Record a tensor; return False if it is lost.

        Args:
            stored: its values, as the readers' ``storable()`` gives them.
            key: its name in the files.
            about: the other attributes of its :class:`Entry`.
        """
        # The format's writers take tensors of one framework: the first tensor decides for its file.
        if any(type(first) is not type(stored) for first in self._waiting.values()):
            self.write_waiting()
        if self.problem:
            self.lost += 1
            return False
        shape = [int(size) for size in stored.shape]
        self.bytes += stored.nbytes
        self.waiting_bytes += stored.nbytes
        self._waiting[key] = stored
        self.entries.append(Entry(key=key, file=self._files, shape=shape, **about))
        if self.waiting_bytes >= self._shard:
            self.write_waiting()
        return True

    def write_waiting(self) -> None:
        """Write the tensors that are in memory as the next file."""
        if not self._waiting:
            return
        try:
            self._folder = self._folder or TemporaryFolder("dump")
            folder = self._folder.path
            path = _path(folder, self._stem, self._files)
            write_tensors(path, self._waiting, {RECORDING: self._id})
            # With an index: nothing else is left of a process that is killed.
            self._write_index(folder, self._stem)
            self._files += 1
        except OSError as error:
            self.problem = f"temporary files cannot be written: {error}"
            self.bytes -= self.waiting_bytes
            self.lost += len(self._waiting)
            self.entries = [entry for entry in self.entries if entry.file != self._files]
        self._waiting = {}
        self.waiting_bytes = 0

    def _write_index(self, folder: Path, stem: str) -> Path:
        """Write the index of the files in a folder; return its path."""
        index = folder / f"{stem}.index.json"
        entries = [entry.plain(stem) for entry in self.entries]
        # Another run into the same folder, at once or later, may replace some of the files.
        write_json(index, {RECORDING: self._id, "tensors": entries})
        return index

    def load(self, entry: Entry) -> Array:
        """Return the values of a recorded tensor; types that NumPy lacks as float32."""
        self.write_waiting()
        assert self._folder is not None
        return read_tensor(_path(self._folder.path, self._stem, entry.file), entry.key)

    def copy_to(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>-00000.safetensors``, ... and ``<stem>.index.json``; return their paths.

        Raises:
            OSError: they cannot be written; none of them is left.
        """
        self.write_waiting()
        written: list[Path] = []
        try:
            for number in range(self._files):
                assert self._folder is not None
                path = _path(folder, stem, number)
                # Copied, not moved: results may be written again.
                with new_beside(path) as partial:
                    shutil.copyfile(_path(self._folder.path, self._stem, number), partial)
                written.append(path)
            return [*written, self._write_index(folder, stem)]
        except OSError:
            # Without an index they are of no use.
            for path in written:
                path.unlink(missing_ok=True)
            raise


def _path(folder: Path, stem: str, number: int) -> Path:
    """Return the path of a file of tensors."""
    return folder / f"{stem}-{number:05}.safetensors"
