"""Recordings of runs, read from files or taken from a tool of this process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda_tools._values.tensor_files import read_tensor
from amanda_tools._values.tensors import Array
from amanda_tools.dump import DumpTool


@attrs.frozen
class Record:
    """One tensor of a recording.

    Attributes:
        id, type, module, direction: of its operator.
        kind, tensor, step: which tensor of which execution.
        order: number of the operator, in the order of analyses.
        is_ordered: operators ran in the program's order, as they do outside of graphs.
        load: reads the values.
    """

    id: str
    type: str
    module: str
    direction: str
    kind: str
    tensor: str
    step: int
    order: int
    is_ordered: bool
    load: Callable[[], Array]

    @property
    def place(self) -> tuple[str, int]:
        """Which of the operator's tensors it is: name and step."""
        return self.tensor, self.step


@attrs.frozen
class Recording:
    """The tensors of a run, in the order in which the program computes them."""

    records: Sequence[Record]

    @classmethod
    def of(cls, tool: DumpTool) -> Recording:
        """Take the tensors that a tool holds in this process."""
        return cls(
            _in_order(
                _record({**entry.row, **_place(entry)}, functools.partial(tool.load, entry))
                for entry in tool.entries
            )
        )

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read what ``amanda run -t diff`` or ``-t dump`` has written.

        Args:
            path: the folder, or an index in it.

        Raises:
            ValueError: there is no recording, or more than one.
        """
        index = path
        if path.is_dir():
            found = sorted(path.glob("diff*.index.json")) or sorted(path.glob("dump*.index.json"))
            if len(found) != 1:
                raise ValueError(f"{path} has {len(found)} recordings (*.index.json), not one")
            [index] = found
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))["tensors"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no recording: {error}") from error
        folder = index.parent
        return cls(
            _in_order(
                _record(entry, functools.partial(read_tensor, folder / entry["file"], entry["key"]))
                for entry in entries
            )
        )

    def ops(self) -> dict[str, Record]:
        """Return the first record of each operator by id, in order."""
        found: dict[str, Record] = {}
        for record in self.records:
            found.setdefault(record.id, record)
        return found


def _place(entry: Any) -> dict[str, Any]:
    place = {"kind": entry.kind, "tensor": entry.tensor}
    return {**place, "step": entry.step, "order": entry.order}


def _record(about: dict[str, Any], load: Callable[[], Array]) -> Record:
    names = ("id", "type", "module", "direction", "kind", "tensor", "step", "order")
    is_ordered = str(about["namespace"]).endswith("/eager")
    return Record(**{name: about[name] for name in names}, is_ordered=is_ordered, load=load)


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sort records into the program's order; those of graphs were taken in any order."""
    found = list(records)
    if all(record.is_ordered for record in found):
        return found
    return sorted(found, key=lambda record: (record.step, record.order))
