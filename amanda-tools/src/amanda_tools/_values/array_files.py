r"""Files of NumPy arrays (``.npz``): written atomically, and read without trust in their contents.

Arrays have names of operators. ``stored_name("a\0b")`` is a name that a file can hold, from which
``original_name()`` gives the operator's again.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from amanda.errors import FileError
from amanda.files import opened, replaced
from amanda_tools._values.tensors import Array

SMALL = 256_000_000
"""Bytes that any file may unpack to."""

RATIO = 100
"""Bytes that each byte of a file may unpack to, beyond :data:`SMALL`.

Masks of zeros and ones, the most regular arrays that are written, pack to a fifth or a tenth;
deflate reaches 1,000 for an array of zeros.
"""

_LONGEST_HEADER = 10_000
"""Characters of the header of an array: a few dozen are usual, and parsing takes long for many."""

_LACKING = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")
_TAKEN = ("file", "allow_pickle")
"""Parameters of ``np.savez``, which takes arrays as arguments of their names."""

_STORED = re.compile(r"\\u([0-9a-f]{4})")


def stored_name(name: str) -> str:
    r"""Write out what a file's names lack, control characters and lone surrogates, as ``\u0000``.

    The backslash is written out, too, so that :func:`original_name` is the inverse.
    """
    stored = _LACKING.sub(lambda found: f"\\u{ord(found[0]):04x}", name)
    return f"\\u{ord(stored[0]):04x}{stored[1:]}" if stored in _TAKEN else stored


def original_name(stored: str) -> str:
    """Undo :func:`stored_name`."""
    return _STORED.sub(lambda found: chr(int(found[1], 16)), stored)


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name; the file is complete or not there.

    Raises:
        OSError: the file cannot be written.
    """
    contents: dict[str, Any] = {stored_name(n): np.asarray(array) for n, array in arrays.items()}
    size = sum(array.nbytes for array in contents.values())
    with replaced(path, binary=True) as file:
        np.savez_compressed(file, **contents)
        if size > max(SMALL, RATIO * file.tell()):
            # Compressed it would be refused as an archive that unpacks to too much.
            file.seek(0)
            file.truncate()
            np.savez(file, **contents)


def read_arrays(path: str | os.PathLike[str], tool: str) -> dict[str, Array]:
    """Read all arrays of a file, by name. No code in it runs, and no name is used as a path.

    Args:
        path: the file.
        tool: the tool that reads it, for messages.

    Raises:
        FileError: the file is missing or damaged, holds something other than arrays of numbers, or
            would unpack to far more than its size.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            _check_sizes(archive, os.fstat(file.fileno()).st_size)
            members = {
                original_name(m.filename.removesuffix(".npy")): m for m in archive.infolist()
            }
            if len(members) < len(archive.infolist()):
                raise ValueError("two arrays have the same name")
            return {name: _read_array(archive, member) for name, member in members.items()}
    except FileError as error:
        raise FileError(f"{tool}: {error}") from error
    # The parsers of ZIP and NumPy raise many types for files that are damaged on purpose.
    except Exception as error:
        about = str(error) or type(error).__name__
        raise FileError(
            f"{tool}: {path} is not a file that {tool} has written, or is damaged: {about}; save "
            "it again"
        ) from error


def _check_sizes(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive that unpacks to too much, before anything is unpacked."""
    total = sum(member.file_size for member in archive.infolist())
    if total > max(SMALL, RATIO * size):
        raise ValueError(f"its {size:,} bytes would unpack to {total:,}")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read one array; its header decides for no more memory than the member has."""
    with archive.open(member) as file:
        shape, fortran, dtype = _read_header(file)
        if dtype.kind not in "biufU":
            # Pickled objects, which run code of the file when they are read, among others.
            raise ValueError(f"{member.filename} holds elements of type {dtype}")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} is too short for its shape {shape}")
        data = file.read(count * dtype.itemsize + 1)
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"{member.filename} does not have the length of its shape {shape}")
    flat = np.frombuffer(bytearray(data), dtype, count) if data else np.zeros(count, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of NumPy's format")
    return readers[version](file, max_header_size=_LONGEST_HEADER)
