"""Writing of result files: atomic replacement, JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


def write_json(path: Path, data: Any) -> None:
    """Write plain data so that the file is either complete or not there.

    What JSON has no form for is written as text, infinities included.

    Raises:
        OSError: the file cannot be written.
    """
    with replaced(path) as file:
        json.dump(plain_data(data), file, indent=1, default=str, allow_nan=False)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A file to write text into, which takes the place of `path` once it is complete.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def plain_data(value: Any) -> Any:
    """The same in types that JSON has; infinities and NaN, for which it has none, as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
