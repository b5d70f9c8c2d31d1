"""Writes files in the safetensors format, of tensors of any framework.

The format: https://huggingface.co/docs/safetensors. Eight bytes, the length of a JSON
header, little-endian; the header, padded with spaces to a multiple of eight; the data
of the tensors without gaps, where the header says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

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


def _width(dtype: str) -> int:
    """Bits of an element: the first number in its name."""
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return int(digits[0]) if digits else 8
