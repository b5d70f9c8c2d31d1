"""Effective paths: the critical part of each operator, unions, similarity, files.

::

    both = read("out/path.safetensors")
    similarity(both["class 3"], both["class 5"])        # of their critical neurons
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda.errors import AmandaError, FileError
from amanda.files import parse_json
from amanda_tools._values.tensor_files import read_tensors, write_tensors
from amanda_tools._values.tensors import Array

KINDS = ("neurons", "weights", "synapses")
"""The kinds of things that can be critical."""


@attrs.frozen(eq=False)
class Mask:
    """A boolean mask, packed to eight elements per byte.

    Attributes:
        shape: shape of the mask.
        bits: the elements in order, packed as ``numpy.packbits`` does.
    """

    shape: tuple[int, ...]
    bits: Array

    @classmethod
    def of(cls, shape: Sequence[int], index: Array) -> Mask:
        """Make a mask with these flat indices set."""
        mask = np.zeros(math.prod(shape), bool)
        mask[index] = True
        return cls(tuple(int(size) for size in shape), np.packbits(mask))

    @property
    def array(self) -> Array:
        """The mask as an array of bool."""
        return np.unpackbits(self.bits, count=self.size).astype(bool).reshape(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Number of elements set."""
        return int(np.unpackbits(self.bits).sum())

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.shape, self.bits | other.bits)

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.shape, self.bits & other.bits)


@attrs.frozen(eq=False)
class OpPath:
    """The part of a path in one operator.

    Attributes:
        neurons: elements of its output; None in a union of outputs of different shapes.
        weights: elements of its weight, None without one.
        synapses: with the option ``synapses`` the critical products, ascending: index in the output
            times products per output, plus position among them.
        critical: number of critical synapses; None in a union if they were not kept.
        total: number of synapses.
    """

    neurons: Mask | None
    weights: Mask | None
    synapses: Array | None
    critical: int | None
    total: int

    def __or__(self, other: OpPath) -> OpPath:
        both = self.synapses is not None and other.synapses is not None
        synapses = np.union1d(self.synapses, other.synapses) if both else None  # type: ignore[arg-type]
        critical = None if synapses is None else len(synapses)
        return OpPath(
            _union(self.neurons, other.neurons),
            _union(self.weights, other.weights),
            synapses,
            critical,
            self.total,
        )


def _union(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None or one.shape != other.shape:
        return None
    return one | other


@attrs.frozen(eq=False)
class Path:
    """The effective path of an input, or of a class: the union of its inputs' paths.

    Attributes:
        label: the class; None if the output has more than one position.
        ops: operator id to its part, from the output to the input.
        inputs: input of the model to its critical elements.
    """

    label: int | None
    ops: Mapping[str, OpPath]
    inputs: Mapping[str, Mask]

    def __or__(self, other: Path) -> Path:
        ops = {
            key: self.ops[key] | other.ops[key] if key in self.ops and key in other.ops
            else self.ops.get(key) or other.ops[key]
            for key in {**self.ops, **other.ops}
        }  # fmt: skip
        shared = [key for key in self.inputs if key in other.inputs]
        unions = {key: _union(self.inputs[key], other.inputs[key]) for key in shared}
        inputs = {key: mask for key, mask in unions.items() if mask is not None}
        label = self.label if self.label == other.label else None
        return Path(label, ops, inputs)

    def density(self, kind: str = "neurons") -> float:
        """Return the fraction of neurons, weights or synapses that is critical, over all
        operators."""
        found = [count_critical(op, kind) for op in self.ops.values()]
        total = sum(size for _, size in found)
        return sum(count for count, _ in found) / total if total else 0.0


def count_critical(op: OpPath, kind: str) -> tuple[int, int]:
    """Return the critical and all neurons, weights or synapses of an operator."""
    if kind == "synapses":
        return (0, 0) if op.critical is None else (op.critical, op.total)
    mask = getattr(op, kind)
    return (0, 0) if mask is None else (mask.count, mask.size)


def _overlap(one: OpPath, other: OpPath, kind: str) -> tuple[int, int, int]:
    """Count what is critical in both, in the first, and in the second."""
    left, right = getattr(one, kind), getattr(other, kind)
    if left is None or right is None:
        return 0, 0, 0
    if isinstance(left, Mask):
        if left.shape != right.shape:
            return 0, 0, 0
        return (left & right).count, left.count, right.count
    return len(np.intersect1d(left, right, assume_unique=True)), len(left), len(right)


def similarity(a: Path, b: Path, kind: str = "neurons", ops: Iterable[str] = ()) -> float:
    """Return the Jaccard index of two paths: critical in both, divided by critical in either.

    Args:
        a, b: paths of one model.
        kind: neurons, weights or synapses.
        ops: ids of operators; none for all that both have.

    Returns:
        Between 0 and 1; 1 for two empty paths.

    Raises:
        AmandaError: they have nothing of that kind in common.
    """
    both, left, right = _overlaps(a, b, kind, ops)
    return both / (left + right - both) if left + right else 1.0


def containment(a: Path, b: Path, kind: str = "neurons", ops: Iterable[str] = ()) -> float:
    """Return the fraction of path `a` that lies in path `b`.

    For the path of an input and that of its class, which is much larger. Arguments and errors are
    those of :func:`similarity`.
    """
    both, left, _ = _overlaps(a, b, kind, ops)
    return both / left if left else 1.0


def _overlaps(a: Path, b: Path, kind: str, ops: Iterable[str]) -> list[int]:
    if kind not in KINDS:
        raise AmandaError(f"path: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    shared = [key for key in ops or a.ops if key in a.ops and key in b.ops]
    if not any(getattr(p.ops[key], kind) is not None for key in shared for p in (a, b)):
        hint = "; load the tool with synapses=True" if kind == "synapses" else ""
        raise AmandaError(f"path: the two paths have no {kind} in common{hint}")
    found = [_overlap(a.ops[key], b.ops[key], kind) for key in shared]
    return [sum(column) for column in zip(*found, strict=True)]


# -- files ------------------------------------------------------------------------


def write(path: str | os.PathLike[str], paths: Mapping[str, Path]) -> None:
    """Write paths by name, masks packed.

    Raises:
        OSError: the file cannot be written.
    """
    arrays: dict[str, Array] = {}
    about: dict[str, Any] = {}
    for name, one in paths.items():
        masks = {f"input {key}": mask for key, mask in one.inputs.items()}
        ops = {}
        for op_id, op in one.ops.items():
            ops[op_id] = [op.critical, op.total]
            masks |= {f"{op_id} neurons": op.neurons, f"{op_id} weights": op.weights}  # type: ignore[dict-item]
            if op.synapses is not None:
                arrays[f"{name} {op_id} synapses"] = op.synapses
        known = {key: mask for key, mask in masks.items() if mask is not None}
        arrays |= {f"{name} {key}": mask.bits for key, mask in known.items()}
        shapes = {key: mask.shape for key, mask in known.items()}
        about[name] = {"label": one.label, "ops": ops, "shapes": shapes}
    write_tensors(path, arrays, {"amanda_paths": json.dumps(about)})


def read(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Read the paths that :func:`write` or ``amanda run -t path`` has written, by name.

    Raises:
        FileError: the file cannot be read, or holds no paths.
    """
    arrays, header = read_tensors(path, "path")
    try:
        about = parse_json(header["amanda_paths"], path)
        return {name: _path_of(name, one, arrays) for name, one in about.items()}
    # Wrong types or missing parts raise different errors, depending on the code that uses them.
    except Exception as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise FileError(
            f"path: {os.fspath(path)} holds no effective paths, or is damaged: {reason}"
        ) from error


def _path_of(name: str, one: Mapping[str, Any], arrays: Mapping[str, Array]) -> Path:
    """Create the path of a name from its entry in a file, and from the file's arrays."""
    masks = {
        key: _mask_of(key, shape, arrays[f"{name} {key}"]) for key, shape in one["shapes"].items()
    }
    ops = {}
    for key, figures in one["ops"].items():
        critical, total = figures
        if not (isinstance(total, int) and isinstance(critical, int | None)):
            raise ValueError(f"the numbers of synapses of {key} are {figures}")
        synapses = arrays.get(f"{name} {key} synapses")
        if synapses is not None and not (synapses.ndim == 1 and synapses.dtype.kind in "iu"):
            raise ValueError(f"the synapses of {key} are not a list of whole numbers")
        parts = (masks.get(f"{key} neurons"), masks.get(f"{key} weights"))
        ops[key] = OpPath(*parts, synapses, critical, total)
    inputs = {k.removeprefix("input "): m for k, m in masks.items() if k.startswith("input ")}
    label = one["label"]
    if not isinstance(label, int | None):
        raise ValueError(f"the class of {name} is {label!r}")
    return Path(label, ops, inputs)


def _mask_of(key: str, shape: Any, bits: Array) -> Mask:
    """Make a mask; its shape decides for no more memory than its bits have."""
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or bits.dtype != np.uint8 or bits.shape != (-(-math.prod(shape) // 8),):
        raise ValueError(f"the mask {key} does not have the length of its shape {shape}")
    return Mask(tuple(shape), bits)
