"""Recordings of runs, read from files or a tool in this process.

``Recording.read(Path("out")).records`` are the tensors of a run; ``record.load()`` reads one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.errors import FileError
from amanda.files import read_json
from amanda_tools._values.tensor_files import RECORDING, check_tensors, read_tensor
from amanda_tools._values.tensors import Array


@attrs.frozen
class TensorRecord:
    """One tensor of a recording.

    Attributes:
        id, type, module, direction: description of its operator.
        forward: id of the forward operator of a backward operator, else "".
        kind, tensor, step: kind and name of the tensor, and number of the execution.
        order: number of the operator in the order of analyses.
        is_ordered: True if operators ran in the program's order, as outside of graphs.
        load: reads the values.
        phase: phase of its operator; ``forward`` in recordings without phases.
        piece: what the id has after that of the operator, of a piece of its tensor.
    """

    id: str
    type: str
    module: str
    direction: str
    forward: str
    kind: str
    tensor: str
    step: int
    order: int
    is_ordered: bool
    load: Callable[[], Array]
    phase: str = "forward"
    piece: str = ""

    @property
    def op_id(self) -> str:
        """Id of the operator."""
        return self.id.removesuffix(self.piece)

    @property
    def place(self) -> tuple[str, int]:
        """Name and step, which identify the tensor among those of the operator."""
        return self.tensor, self.step


@attrs.frozen
class Recording:
    """The tensors of a run, in the order in which the program computes them."""

    records: Sequence[TensorRecord]

    @classmethod
    def of(cls, entries: Iterable[tuple[dict[str, Any], Callable[[], Array]]]) -> Recording:
        """Return the recording of entries of an index, each with what reads its values."""
        return cls(_in_order(_record(*entry) for entry in entries))

    @classmethod
    def read(cls, path: Path, tool: str = "diff") -> Recording:
        """Read a recording of ``amanda run -t diff`` or ``-t dump``.

        Args:
            path: the folder, or an index in it.
            tool: the tool that reads it, for messages.

        Raises:
            FileError: there is no recording, more than one, or a damaged one.
        """
        index = path
        if path.is_dir():
            found = sorted(path.glob("diff*.index.json")) or sorted(path.glob("dump*.index.json"))
            if len(found) != 1:
                raise FileError(
                    f"{tool}: {path} has {len(found)} recordings (*.index.json), not one; name the "
                    "index, or a folder that a run under -t diff or -t dump has written"
                )
            [index] = found
        content, folder = read_json(index), index.parent
        try:
            entries = _entries(content, folder)
        except FileError as error:
            raise FileError(f"{tool}: {index} is not a recording: {error}") from error
        return cls.of(
            (entry, functools.partial(read_tensor, folder / entry["file"], entry["key"]))
            for entry in entries
        )

    def ops(self) -> dict[str, TensorRecord]:
        """Return the first record of each operator by id, in order."""
        found: dict[str, TensorRecord] = {}
        for record in self.records:
            found.setdefault(record.id, record)
        return found


_TEXTS = ("id", "type", "module", "direction", "kind", "tensor", "namespace", "key", "file")
_NUMBERS = ("step", "order")
_FOLDERS = ("", "..")


def _entries(content: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the entries of an index, and check them and the files of their tensors.

    Raises:
        FileError: a file is missing or damaged, or an entry is not as ``dump`` writes it.
    """
    entries = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise FileError("it has no list of tensors")
    recording = content.get(RECORDING, "")
    if not isinstance(recording, str):
        raise FileError(f"its {RECORDING!r} is not text")
    keys: dict[str, list[str]] = {}
    for number, entry in enumerate(entries):
        about = entry if isinstance(entry, dict) else {}
        wrong = [name for name in _TEXTS if not isinstance(about.get(name), str)]
        wrong += [name for name in _NUMBERS if type(about.get(name)) is not int]
        # Files are beside the index; a path could point to any file of the machine.
        if not wrong and (Path(about["file"]).name != about["file"] or about["file"] in _FOLDERS):
            wrong = ["file"]
        if wrong:
            raise FileError(f"{wrong[0]!r} of its tensor {number} is missing or wrong")
        keys.setdefault(about["file"], []).append(about["key"])
    for file, found in keys.items():
        check_tensors(folder / file, found, recording)
    return entries


def _record(about: dict[str, Any], load: Callable[[], Array]) -> TensorRecord:
    names = ("id", "type", "module", "direction", "kind", "tensor", "step", "order")
    namespace = str(about["namespace"])
    is_ordered = namespace.endswith("/eager") or namespace.startswith("pytorch/")
    values = {name: about[name] for name in names}
    forward = str(about.get("forward", ""))
    phase = str(about.get("phase", "forward"))
    return TensorRecord(**values, forward=forward, is_ordered=is_ordered, load=load, phase=phase)


def _in_order(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Sort records into the program's order; executors of graphs run operators in any order."""
    found = list(records)
    if all(record.is_ordered for record in found):
        return found
    return sorted(found, key=lambda record: (record.step, record.order))
