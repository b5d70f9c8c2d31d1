"""Reading and computing with NumPy's arrays, and with those that its functions take, as JAX's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda.errors import UnsupportedProgramError
from amanda_tools._values.tensors import Arithmetic, Array

_FLOATS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}
"""Digits of the fraction, and the lowest exponent, of 8-bit floating-point types."""


class BitsOfArrays(Arithmetic):
    """Bits of tensors that NumPy can hold, whatever their type."""

    def bits(self, tensor: Any, positions: Array) -> Array:
        if reason := self.refusal(tensor):
            raise TypeError(f"a tensor that {reason}")
        return _as_integers(self.storable(tensor).reshape(-1)[positions])

    def with_bits(self, tensor: Any, positions: Array, bits: Array) -> Any:
        new = self.storable(tensor)
        # Not reshape(-1), which may copy.
        new.flat[positions] = bits.view(new.dtype)
        return new

    def to_bits(self, values: Array, like: Any) -> Array:
        with np.errstate(over="ignore"):
            return _as_integers(self.constant(values, like))

    def from_bits(self, bits: Array, like: Any) -> Array:
        # A flipped bit can make a signalling NaN, of which NumPy warns.
        with np.errstate(invalid="ignore"):
            return np.asarray(bits.view(self.constant(bits[:0], like).dtype).astype(np.float64))


class ArrayArithmetic(BitsOfArrays):
    """Arrays. Other tensors, such as a list in ``data``, are only read."""

    # -- reading ----------------------------------------------------------

    def shape(self, tensor: Any) -> list[int]:
        # A functional framework differentiates with respect to a Python number, too.
        return [int(size) for size in getattr(tensor, "shape", ())]

    def is_floating(self, tensor: Any) -> bool:
        return "float" in self.dtype(tensor)

    def may_hold_nan(self, tensor: Any) -> bool:
        return self.is_floating(tensor) or "complex" in self.dtype(tensor)

    def is_finite(self, tensor: Any) -> bool:
        return bool(np.isfinite(self.numpy(tensor)).all())

    def has_nan(self, tensor: Any) -> bool:
        return bool(np.isnan(self.numpy(tensor)).any())

    def refusal(self, tensor: Any) -> str:
        if isinstance(tensor, (np.ndarray, np.generic)) or hasattr(tensor, "__array_namespace__"):
            return ""
        return f"is of {type(tensor).__module__}.{type(tensor).__qualname__}, which is no array"

    def storable(self, tensor: Any) -> Any:
        data = getattr(tensor, "data", tensor) if self.refusal(tensor) else tensor
        return np.array(data if isinstance(data, list) else tensor).reshape(self.shape(tensor))

    copy = storable

    def dtype(self, tensor: Any) -> str:
        return str((self.storable(tensor) if self.refusal(tensor) else tensor).dtype)

    # -- constants and variables ------------------------------------------

    def constant(self, array: Array, like: Any) -> Any:
        if reason := self.refusal(like):
            raise UnsupportedProgramError(f"a tool cannot compute with a tensor that {reason}")
        return np.asarray(array).astype(like.dtype)

    def cast_like(self, constant: Any, like: Any) -> Any:
        return constant.astype(like.dtype, copy=False)

    variable = constant

    def assign(self, target: Any, array: Array) -> None:
        if not (isinstance(target, np.ndarray) and target.flags.writeable):
            raise TypeError(f"{type(target).__name__} is a value, not a variable")
        target[...] = array

    def train_in_backward(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        return list(tensors), list(variables)  # No backward pass comes.

    def stop_gradient(self, tensor: Any) -> Any:
        return tensor

    # -- elementwise ------------------------------------------------------

    round = staticmethod(np.round)
    divide = staticmethod(np.divide)
    clip = staticmethod(np.clip)
    where = staticmethod(np.where)

    def relu(self, tensor: Any, /) -> Any:
        return np.maximum(tensor, 0)

    def sigmoid(self, tensor: Any, /) -> Any:
        # Not by exp(-tensor), which overflows.
        return (1 + np.tanh(tensor / 2)) / 2

    def widen(self, tensor: Any) -> Any:
        is_short = self.is_floating(tensor) and tensor.dtype.itemsize < 4
        return tensor.astype(np.float32) if is_short else tensor

    def round_trip(self, tensor: Any, dtype: str) -> Any:
        # NumPy has no such type: round to multiples of the step between two of its numbers.
        digits, lowest = _FLOATS[dtype]
        exponents = np.maximum(np.frexp(tensor)[1] - 1, lowest)
        steps = np.ldexp(tensor.dtype.type(1), exponents - digits)
        return np.round(tensor / steps) * steps

    # -- axes -------------------------------------------------------------

    matmul = staticmethod(np.matmul)

    def reshape(self, tensor: Any, shape: Sequence[int], /) -> Any:
        return np.reshape(tensor, tuple(shape))

    def softmax(self, tensor: Any) -> Any:
        exponents = np.exp(tensor - np.max(tensor, -1, keepdims=True))
        return exponents / np.sum(exponents, -1, keepdims=True)

    def min_max(self, tensor: Any, axis: int | None = None) -> tuple[Any, Any]:
        keeps = axis is not None
        return np.min(tensor, axis, keepdims=keeps), np.max(tensor, axis, keepdims=keeps)

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        return np.mean(tensor, tuple(axes)) if axes else tensor

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return np.sum(tensor, tuple(axes))

    def transpose(self, tensor: Any, /) -> Any:
        return np.swapaxes(tensor, -1, -2)

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        return np.take(tensor, np.array(indices), axis)

    def top_mask(self, scores: Any, count: int) -> Any:
        order = np.argsort(-scores, -1, "stable")
        return (np.argsort(order, -1) < count).astype(scores.dtype)


def _as_integers(values: Array) -> Array:
    """Return the bits of numbers.

    Raises:
        TypeError: they are neither real floating-point numbers nor integers.
    """
    if not ("float" in values.dtype.name or values.dtype.kind in "iu"):
        raise TypeError(f"elements of type {values.dtype}")
    return values.view(f"uint{8 * values.dtype.itemsize}")


ARITHMETIC = ArrayArithmetic()
