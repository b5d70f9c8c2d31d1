"""Writing of result files: complete files or none, JSON.

``write_json(folder / "count.json", result)`` writes plain data; :func:`replaced` opens any other
text file in the same way.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON so that the file is either complete or not there.

    Args:
        path: the file, which is replaced if it exists.
        data: the data. Values for which JSON has no form, infinities and NaN included, are written
            as text.

    Raises:
        OSError: the file cannot be written; an earlier one is as it was.
    """
    with replaced(path) as file:
        json.dump(plain_data(data), file, indent=1, default=str, allow_nan=False)


@contextlib.contextmanager
def replaced(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file for writing text or bytes that replaces `path` when the with-block ends.

    If the block raises, nothing of it is left, and an earlier file is as it was.

    Raises:
        OSError: the file cannot be written.
    """
    # In the same folder, which os.replace() needs.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") if binary else partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def plain_data(value: Any) -> Any:
    """Convert containers to dictionaries and lists, and infinities and NaN to text, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
