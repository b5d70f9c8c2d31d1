r"""Files of tensors in the safetensors format, written and read through its own library.

The library has a writer per framework, which takes the framework's tensors unchanged: element types
that NumPy lacks (bfloat16, 8-bit floats) keep their bits.

Tensors have names of operators. ``stored_name("a\0b")`` is a name that a file can hold, from which
``original_name()`` gives the operator's again.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amanda.errors import FileError
from amanda.files import new_beside, opened
from amanda_tools._values.tensors import Array

WRITABLE = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2".split()
)
"""Names of the element types that can be written."""

RECORDING = "recording"
"""Name of the id that the files of one recording share, in their headers and in the index."""

_SMALL = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Element types of the format that NumPy lacks, and their names."""


_LACKING = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")
_STORED = re.compile(r"\\u([0-9a-f]{4})")


def stored_name(name: str) -> str:
    r"""Write out what a file's names lack, control characters and lone surrogates, as ``\u0000``.

    The backslash is written out, too, so that :func:`original_name` is the inverse.
    """
    return _LACKING.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def original_name(stored: str) -> str:
    """Undo :func:`stored_name`."""
    return _STORED.sub(lambda found: chr(int(found[1], 16)), stored)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file.

    Args:
        path: path of the file.
        tensors: by name; results of ``TensorReader.storable`` of one framework.
        metadata: texts for the header of the file.

    Raises:
        OSError: the file cannot be written.
    """
    is_numpy = all(isinstance(tensor, np.ndarray) for tensor in tensors.values())
    library = importlib.import_module("safetensors")
    writer = importlib.import_module(f"safetensors.{'numpy' if is_numpy else 'torch'}")
    named = {stored_name(name): tensor for name, tensor in tensors.items()}
    try:
        with new_beside(Path(path)) as partial:
            writer.save_file(named, partial, None if metadata is None else dict(metadata))
    except (library.SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{os.fspath(path)} cannot be written: {reason}") from error


def read_tensors(
    path: str | os.PathLike[str], tool: str
) -> tuple[dict[str, Array], dict[str, str]]:
    """Read all tensors of a file, by name, and the texts of its header.

    Args:
        path: the file.
        tool: the tool that reads it, for messages.

    Raises:
        FileError: the file is missing or damaged, or has element types that NumPy lacks.
    """
    # The library would wait for ever at a pipe.
    with opened(path):
        pass
    try:
        with _open_file(path, "np") as file:
            names = {original_name(key): key for key in file.keys()}  # noqa: SIM118 - no mapping
            tensors = {name: np.asarray(file.get_tensor(key)) for name, key in names.items()}
            return tensors, file.metadata() or {}
    # Its parser raises more than its own error for files that are damaged on purpose.
    except Exception as error:
        raise FileError(
            f"{tool}: {os.fspath(path)} is not a file that {tool} has written, or is damaged: "
            f"{error}"
        ) from error


def check_tensors(path: Path, keys: Iterable[str], recording: str = "") -> None:
    """Check that a file can be read, and has these tensors.

    Args:
        path: path of the file.
        keys: names of the tensors.
        recording: the id of the recording that it has to belong to; "" for any.

    Raises:
        FileError: the file is missing or damaged, lacks a tensor, or is of another recording.
    """
    stored, metadata = _header(path)
    known, its_recording = set(stored), metadata.get(RECORDING, "")
    if recording and its_recording != recording:
        raise FileError(f"{path} is of another recording: another run has written into its folder")
    for key in keys:
        if stored_name(key) not in known:
            raise FileError(f"{path} has no tensor {key}: it is of another recording")


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors of a file.

    Raises:
        FileError: the file is missing or damaged.
    """
    return [original_name(stored) for stored in _header(path)[0]]


def _header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of a file as they are stored, and its texts."""
    # The library would wait for ever at a pipe.
    with opened(path):
        pass
    try:
        with _open_file(path, "np") as file:
            return list(file.keys()), file.metadata() or {}
    # Its parser raises more than its own error for files that are damaged on purpose.
    except Exception as error:
        raise FileError(f"{path} is not a safetensors file, or is damaged: {error}") from error


def read_tensor(path: Path, key: str) -> Array:
    """Read one tensor of a file; types that NumPy lacks as float32.

    Raises:
        FileError: the file cannot be read, is not a safetensors file, or has no such tensor.
    """
    library, key = importlib.import_module("safetensors"), stored_name(key)
    try:
        stat = path.stat()
        changed = stat.st_ino, stat.st_mtime_ns
        file = _open(path, "np", changed)
        kind = file.get_slice(key).get_dtype()
        if kind not in _SMALL:
            return np.asarray(file.get_tensor(key))
        # Through PyTorch if it is loaded anyway, or where nothing else knows the type.
        if "torch" in sys.modules or not _has_small_types():
            return np.asarray(_open(path, "pt", changed).get_tensor(key).float().numpy())
        return _read_small(path, key, _SMALL[kind])
    except (library.SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{key} cannot be read from {path}: {error}") from error


@functools.lru_cache(maxsize=8)
def _open(path: Path, framework: str, changed: tuple[int, int]) -> Any:
    """Return an open file, of which the last eight are kept open.

    Args:
        changed: inode and time of change: a later run may have replaced the file.
    """
    return _open_file(path, framework)


def _open_file(path: str | os.PathLike[str], framework: str) -> Any:
    return importlib.import_module("safetensors").safe_open(path, framework=framework)


def _has_small_types() -> bool:
    """True if ``ml_dtypes``, which TensorFlow requires, can be imported: it adds these types to
    NumPy."""
    try:
        importlib.import_module("ml_dtypes")
    except ImportError:
        return False
    return True


def _read_small(path: Path, key: str, name: str) -> Array:
    """Read a tensor of a type that ``ml_dtypes`` adds to NumPy; return it as float32."""
    found = dict(importlib.import_module("safetensors").deserialize(path.read_bytes()))[key]
    dtype = getattr(importlib.import_module("ml_dtypes"), name)
    return np.frombuffer(found["data"], dtype).reshape(found["shape"]).astype(np.float32)
