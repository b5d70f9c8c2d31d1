"""Files of ``prune``: arrays by op id, with what they were made for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amanda.errors import AmandaError
from amanda.files import replaced
from amanda_tools._values.tensors import Array

_HEADER = "amanda-prune"
_VERSION = 1


def write(
    path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], **about: Any
) -> Path:
    """Write arrays as a compressed ``.npz`` file; it is complete or not there.

    Args:
        path: the file, to which nothing is appended.
        kind: what the arrays are.
        arrays: by name.
        about: further facts, plain data.
    """
    target = Path(path)
    header = json.dumps({"kind": kind, "version": _VERSION, **about})
    with replaced(target, binary=True) as file:
        contents: dict[str, Any] = {_HEADER: np.array(header), **arrays}
        np.savez_compressed(file, **contents)
    return target


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a file, and what was said about them.

    Raises:
        OSError: it cannot be read.
        AmandaError: it is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file[_HEADER]))
            arrays = {name: file[name] for name in file.files if name != _HEADER}
    except (ValueError, KeyError, AttributeError) as error:
        raise AmandaError(f"prune: {path} is no file that prune has written: {error}") from error
    if header["kind"] != kind or header["version"] != _VERSION:
        raise AmandaError(
            f"prune: {path} holds {header['kind']} of version {header['version']}, and not "
            f"{kind} of version {_VERSION}"
        )
    return arrays, header
