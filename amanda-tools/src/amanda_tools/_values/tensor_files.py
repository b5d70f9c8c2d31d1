"""Files of tensors of any framework, in the safetensors format, through its own library.

The library has a writer per framework. Each takes the framework's tensors as they are, so
that types that numpy lacks (bfloat16, the small ones) keep their bits.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amanda_tools._values.numerics import Array

WRITABLE = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2".split()
)
"""Names of the element types that are written."""

_SMALL = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Types of the format that numpy lacks, and their names."""


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file.

    Args:
        path: the file.
        tensors: by name what ``Numerics.stored`` gives, of one framework.
        metadata: texts for the head of the file.

    Raises:
        OSError: it cannot be written.
    """
    is_numpy = all(isinstance(tensor, np.ndarray) for tensor in tensors.values())
    library = importlib.import_module("safetensors")
    writer = importlib.import_module(f"safetensors.{'numpy' if is_numpy else 'torch'}")
    try:
        writer.save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except library.SafetensorError as error:
        raise OSError(f"{os.fspath(path)} cannot be written: {error}") from error


def read_tensor(path: Path, key: str) -> Array:
    """One tensor of a file as an array; types that numpy lacks as float32.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or holds no such tensor.
    """
    library = importlib.import_module("safetensors")
    try:
        file = _opened(path, "np")
        kind = file.get_slice(key).get_dtype()
        if kind not in _SMALL:
            return np.asarray(file.get_tensor(key))
        if "torch" in sys.modules or not _has_small_types():
            return np.asarray(_opened(path, "pt").get_tensor(key).float().numpy())
        return _small(path, key, _SMALL[kind])
    except library.SafetensorError as error:
        raise ValueError(f"{key} cannot be read from {path}: {error}") from error


@functools.lru_cache(maxsize=8)
def _opened(path: Path, framework: str) -> Any:
    return importlib.import_module("safetensors").safe_open(path, framework=framework)


def _has_small_types() -> bool:
    """Whether numpy's arrays can have them; a package adds them, which TensorFlow brings."""
    try:
        importlib.import_module("ml_dtypes")
    except ImportError:
        return False
    return True


def _small(path: Path, key: str, name: str) -> Array:
    """The tensor in the type that ``ml_dtypes`` adds to numpy, widened."""
    found = dict(importlib.import_module("safetensors").deserialize(path.read_bytes()))[key]
    dtype = getattr(importlib.import_module("ml_dtypes"), name)
    return np.frombuffer(found["data"], dtype).reshape(found["shape"]).astype(np.float32)
