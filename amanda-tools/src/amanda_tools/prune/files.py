"""Files of ``prune``: arrays by op id in ``.npz``, with a header that says what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amanda.errors import FileError
from amanda.files import parse_json
from amanda_tools._values.array_files import read_arrays, write_arrays
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
    header = json.dumps({"kind": kind, "version": _VERSION, **about})
    write_arrays(Path(path), {_HEADER: np.array(header), **arrays})
    return Path(path)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the arrays and the header of a file.

    Raises:
        FileError: the file cannot be read, was not written by ``prune``, or holds another kind.
    """
    arrays = read_arrays(path, "prune")
    text = arrays.pop(_HEADER, None)
    if text is None or text.dtype.kind != "U" or text.ndim:
        raise FileError(f"prune: {path} is not a file that prune has written")
    header = parse_json(str(text), path)
    found = [header.get(key) for key in ("kind", "version")] if isinstance(header, dict) else []
    if found != [kind, _VERSION]:
        raise FileError(
            f"prune: {path} holds {' of version '.join(map(str, found)) or 'nothing known'}, and "
            f"not {kind} of version {_VERSION}"
        )
    _check_elements(path, kind, arrays)
    return arrays, header


def weight_names(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of weights by op id that a header holds; files of others have none."""
    names = header.get("weights")
    found = names.items() if isinstance(names, dict) else ()
    return {op_id: name for op_id, name in found if isinstance(name, str)}


def _check_elements(path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array]) -> None:
    """Refuse masks that are not of booleans, and other arrays with NaN or infinities."""
    for name, array in arrays.items():
        if kind == "masks" and array.dtype.kind != "b":
            raise FileError(f"prune: {path}: the mask {name} is of {array.dtype}, not of bool")
        if kind != "masks" and not (array.dtype.kind == "f" and np.isfinite(array).all()):
            raise FileError(f"prune: {path}: {name} is not of finite numbers")
