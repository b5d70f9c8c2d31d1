"""Dumps of collectives by PyTorch's Flight Recorder (version 2.10, of PyTorch 2.13).

They are pickles of plain data, one per rank, that its process groups write when they time out:
``TORCH_FR_DUMP_TEMP_FILE=out/dump_rank_`` names them.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amanda.errors import FileError
from amanda.files import opened

NAME = re.compile(r"[^.]*(?:dump|trace)[^.]*?(?P<rank>[0-9]{1,9})")
"""The name of a dump: a prefix of the user's with one of these words, and the rank."""


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dump(path: Path) -> tuple[str, str]:
    """Read a dump: the first collective that has not ended, and the last one that has, as text.

    Raises:
        FileError: it cannot be read, or is no dump.
    """
    try:
        with opened(path) as file:
            found = _PlainData(file).load()
        entries = sorted(found["entries"], key=lambda each: int(each["record_id"]))
        # Entries of gloo keep the state "scheduled"; those that are retired may have failed.
        ended = [bool(each["retired"] or each["state"] == "completed") for each in entries]
        texts = [_text(each) for each in entries]
    except FileError:
        raise
    except Exception as error:
        # A pickle that is damaged raises errors of many types.
        why = f"{type(error).__name__}: {error}"
        raise FileError(f"{path} is no dump of collectives, or damaged: {why}") from error
    waits = [text for text, is_over in zip(texts, ended, strict=True) if not is_over]
    over = [text for text, is_over in zip(texts, ended, strict=True) if is_over]
    more = f", {len(waits) - 1} more" if len(waits) > 1 else ""
    return waits[0] + more if waits else "-", over[-1] if over else "-"


def _text(entry: Mapping[str, Any]) -> str:
    """``gloo:all_reduce 5 (default_pg)``: what, its number in the group, the group."""
    name, about = entry["process_group"]
    number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
    return f"{entry['profiling_name']} {number} ({name if about == 'undefined' else about})"
