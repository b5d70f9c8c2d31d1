"""Files of ``prune``: arrays by op id in ``.npz``, with a header that says what they are."""

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
    """Write arrays as a compressed ``.npz`` file, which is complete or not there.

    Args:
        path: path of the file; no suffix is appended.
        kind: masks, gates or weights.
        arrays: by name.
        about: further facts for the header, plain data.

    Returns:
        The path.
    """
    target = Path(path)
    header = json.dumps({"kind": kind, "version": _VERSION, **about})
    with replaced(target, binary=True) as file:
        contents: dict[str, Any] = {_HEADER: np.array(header), **arrays}
        np.savez_compressed(file, **contents)
    return target


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the arrays and the header of a file.

    Raises:
        OSError: it cannot be read.
        AmandaError: it was not written by ``prune``, or holds another kind.
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
