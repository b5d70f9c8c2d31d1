"""Writes and reads files in the safetensors format, of tensors of any framework.

The format: https://huggingface.co/docs/safetensors. Eight bytes, the length of a JSON
header, little-endian; the header, padded with spaces to a multiple of eight; the data
of the tensors without gaps, where the header says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from amanda_tools.numerics import Array

TYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Element types that the format has, and what it calls them."""


@attrs.frozen
class Stored:
    """One tensor's data.

    Attributes:
        dtype: a key of :data:`TYPES`.
        shape: its sizes.
        data: its elements in order.
    """

    dtype: str
    shape: Sequence[int]
    data: bytes


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a file.

    Raises:
        OSError: it cannot be written.
        KeyError: an element type is none of :data:`TYPES`.
    """
    header: dict[str, object] = {}
    offset = 0
    # The widest types first keep every tensor aligned.
    order = sorted(tensors.items(), key=lambda item: -_width(item[1].dtype))
    for name, stored in order:
        end = offset + len(stored.data)
        header[name] = {
            "dtype": TYPES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, stored in order:
            file.write(stored.data)


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors of a file by name, as the header has them, and where the data begins.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 1 << 30:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def read_array(path: Path, about: Mapping[str, Any], start: int) -> Array:
    """One tensor of a file as an array; bfloat16, which numpy lacks, as float32.

    Args:
        path: the file.
        about: what its header says of the tensor.
        start: where the file's data begins.

    Raises:
        ValueError: the element type is one that numpy has nothing for.
    """
    begin, end = about["data_offsets"]
    with path.open("rb") as file:
        file.seek(start + begin)
        data = file.read(end - begin)
    if about["dtype"] == "BF16":
        # Its bits are the upper half of a float32.
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(about["shape"])
    names = {written: name for name, written in TYPES.items()}
    name = names.get(about["dtype"], "")
    if name.startswith("float8") or not name:
        raise ValueError(f"numpy has no type for {about['dtype']}")
    return np.frombuffer(data, dtype=name).reshape(about["shape"])


def _width(dtype: str) -> int:
    """Bits of an element: the first number in its name."""
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return int(digits[0]) if digits else 8
