"""Files of ``prune``: arrays by op id as safetensors, with a header that says what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amanda.errors import FileError
from amanda.files import parse_json
from amanda_tools._values.tensor_files import read_tensors, write_tensors
from amanda_tools._values.tensors import Array

_HEADER = "amanda_prune"
_VERSION = 1


def write(
    path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], **about: Any
) -> Path:
    """Write arrays as a safetensors file, which is complete or not there.

    Args:
        path: path of the file; no suffix is appended.
        kind: masks or gates.
        arrays: by name.
        about: further facts for the header, plain data.

    Returns:
        The path.
    """
    header = json.dumps({"kind": kind, "version": _VERSION, **about})
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_tensors(path, contiguous, {_HEADER: header})
    return Path(path)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the arrays and the header of a file.

    Raises:
        FileError: the file cannot be read, was not written by ``prune``, or holds another kind.
    """
    arrays, about = read_tensors(path, "prune")
    header = parse_json(about.get(_HEADER, "null"), path)
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
