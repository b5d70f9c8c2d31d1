"""Shapes, element types and devices of an operator's tensors, which stay when the tensors go.

``specs_of([tensor])[0].row()`` is ``{"shape": [2, 3], "dtype": "float32", "device": "cpu"}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import attrs

Phase = Literal["setup", "forward", "backward", "optimizer", "other"]
"""The phase of an operator: building and initialising models, computing results and losses,
computing gradients, changing parameters, or anything else (data, metrics)."""

PHASES: tuple[Phase, ...] = get_args(Phase)


@attrs.frozen
class LocalPart:
    """The part that this process has of a tensor that is distributed over several.

    Attributes:
        shape, dtype, device: of the part.
        global_shape: the sizes of the whole tensor.
        placement: how it is distributed, in the framework's words: ``Shard(0)``.
    """

    shape: Any
    dtype: Any
    device: Any
    global_shape: tuple[int, ...]
    placement: str

    def row(self) -> dict[str, Any]:
        """What a result says of the whole tensor."""
        return {"global_shape": list(self.global_shape), "placement": self.placement}


class TensorSpec:
    """The shape, element type and device of a tensor; the tensor itself is not held.

    Args:
        tensor: a tensor of any framework, also a symbolic one, or a :class:`LocalPart`.

    Attributes:
        whole: the distributed tensor that it is a part of; None for others.
    """

    __slots__ = ("_device", "_dtype", "_shape", "whole")

    def __init__(self, tensor: Any) -> None:
        # Taken as the framework has them: they are read once for each operator, and shown later.
        self._shape = _shape_of(tensor)
        self._dtype = getattr(tensor, "dtype", None)
        self._device = getattr(tensor, "device", None)
        self.whole = tensor if type(tensor) is LocalPart else None

    def __repr__(self) -> str:
        return f"TensorSpec({self.dtype}{self.shape})"

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The sizes, None for one that is not known before the run; None for an unknown rank."""
        if type(self._shape) is tuple:
            return self._shape
        try:
            return None if self._shape is None else tuple(map(_size, self._shape))
        except (TypeError, ValueError):
            # TensorFlow's shape of unknown rank.
            return None

    @property
    def dtype(self) -> str:
        """The element type without the framework's name: ``float32``; "" if it has none."""
        name = getattr(self._dtype, "name", None) or self._dtype
        return "" if name is None else str(name).rpartition(".")[2]

    @property
    def itemsize(self) -> int | None:
        """Bytes of an element; None if the framework does not provide them."""
        size = getattr(self._dtype, "itemsize", None) or getattr(self._dtype, "size", None)
        return size if isinstance(size, int) else None

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements; None if a size is unknown."""
        shape, size = self.shape, self.itemsize
        is_known = shape is not None and size is not None and None not in shape
        return math.prod((size, *shape)) if is_known else None  # type: ignore[arg-type,misc]

    @property
    def device(self) -> str:
        """The device of its elements: ``cpu``, ``cuda:0``, ``gpu:0``; "" if it is not known."""
        if self._device is None:
            return ""
        # TensorFlow says /job:localhost/replica:0/task:0/device:CPU:0.
        name = str(self._device).rpartition("device:")[2].lower()
        return name.removesuffix(":0") if name.startswith("cpu") else name

    def row(self) -> dict[str, Any]:
        """The keys of a tensor in a tool's result; of a distributed one also ``global_shape`` and
        ``placement``."""
        shape, whole = self.shape, self.whole
        row = {
            "shape": None if shape is None else list(shape),
            "dtype": self.dtype,
            "device": self.device,
        }
        if whole is not None:
            row.update(whole.row())
        return row


Specs = tuple[TensorSpec | None, ...]
"""The descriptions of several tensors; None for one that is absent."""


@attrs.define(eq=False)
class OpTensors:
    """The shapes, types and devices of an operator's tensors in its first execution.

    Filled as the operator runs; of a backward operator the tensors are gradients. Where a tool has
    its analyses run again, they are those of the execution in which they do.

    Attributes:
        inputs: that of each input, None for an absent one; None before they were seen.
        outputs: likewise.
        is_old: an analysis is to run again, at the next execution.
    """

    inputs: Specs | None = None
    outputs: Specs | None = None
    is_old: bool = False


def specs_of(tensors: Iterable[Any]) -> Specs:
    """The description of each tensor; None for an absent one."""
    return tuple([None if tensor is None else TensorSpec(tensor) for tensor in tensors])


def _shape_of(tensor: Any) -> Any:
    try:
        shape = tensor.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # A nested tensor has no one shape.
        return None
    if not isinstance(shape, tuple):
        return shape
    # A size of PyTorch's that stands for a number would keep a trace alive.
    return tuple(shape) if _INT.issuperset(map(type, shape)) else tuple(map(_size, shape))


_INT = frozenset({int})


def _size(size: Any) -> int | None:
    """A size as a number; None where it is not known, or known to a tracer only."""
    if type(size) is int:
        return size
    value = getattr(size, "value", size)  # a Dimension of TensorFlow 1
    is_number = isinstance(value, int) or type(value).__module__ == "numpy"
    return int(value) if is_number else None
