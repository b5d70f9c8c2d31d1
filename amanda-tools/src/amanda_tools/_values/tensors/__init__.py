"""Reading and computing with tensors of any framework, without a branch for a framework in a tool.

:func:`reader_of` gives what analysis tools need: finite or not, NumPy copies, element types.
:func:`arithmetic_of` adds what optimization tools compute with::

    reader = reader_of(tensor)
    if reader.is_readable_float(tensor) and not reader.is_finite(tensor):
        print(reader.numpy(tensor))

    arithmetic = arithmetic_of(weight)
    masked = weight * arithmetic.constant(numpy_mask, like=weight)

PyTorch and TensorFlow have a module here, imported when the first of its tensors comes; the tensors
of all other frameworks are taken for arrays, as NumPy understands them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

import numpy as np

Array = np.ndarray[Any, Any]


class TensorReader(Protocol):
    """Reads the tensors of one framework."""

    def is_floating(self, tensor: Any) -> bool:
        """True if the element type is a real floating-point type; symbolic tensors included."""

    def may_hold_nan(self, tensor: Any) -> bool:
        """True if the element type is a real or complex floating-point type."""

    def is_finite(self, tensor: Any) -> bool | None:
        """True if no element of a tensor is NaN or infinite; None if they cannot be read.

        Sparse tensors have the elements that they store, nested ones those of their items.
        """

    def is_clean(self, tensor: Any) -> bool | None:
        """:meth:`is_finite` of tensors of any type. Hot path: asked at every execution."""
        return not self.may_hold_nan(tensor) or self.is_finite(tensor)

    def has_nan(self, tensor: Any) -> bool | None:
        """True if an element is NaN; None if the elements cannot be read."""

    def numbers(self, tensor: Any) -> Array | None:
        """Copy the elements that :meth:`is_finite` reads to NumPy, in any shape; else None.

        Real and imaginary parts of complex numbers are elements of their own.
        """
        return self.numpy(tensor) if self.is_readable(tensor) else None

    def kind(self, tensor: Any) -> str:
        """Name why :meth:`is_readable_float` is False: ``complex64``, ``sparse_coo``, ``nested``.

        "" for integers, truth values, texts and handles, whose values are no measurements.
        """
        return self.dtype(tensor) if self.may_hold_nan(tensor) else ""

    def is_readable(self, tensor: Any) -> bool:
        """True if :meth:`numpy` works: False for symbolic tensors and those without dense data."""
        return True

    def is_readable_float(self, tensor: Any) -> bool:
        """True if the tensor has floating-point elements that can be read."""
        return self.is_floating(tensor) and self.is_readable(tensor)

    def is_opaque(self, tensor: Any) -> bool:
        """True for handles of variables, iterators and lists, which hold no elements themselves."""
        return False

    def refusal(self, tensor: Any) -> str:
        """Return a reason why tools cannot compute with a tensor, to follow "its weight", or "".

        Nested tensors, and classes that compute on their own, such as a quantized weight.
        """
        return ""

    def is_stacked(self, tensor: Any) -> bool:
        """True if :meth:`numpy` gives the values of many samples, along a first axis of its own."""
        return False

    def numpy(self, tensor: Any) -> Array:
        """Copy to NumPy in the type of the same name; float32 for types that NumPy lacks."""
        array: Array = self.storable(tensor)
        # bfloat16 and the 8-bit types come in types that ml_dtypes adds to NumPy.
        return array.astype(np.float32) if array.dtype.kind == "V" else array

    def numpy_view(self, tensor: Any) -> Array:
        """:meth:`numpy` without a copy where the tensor's memory can be read as it is.

        Use it at once, and only read it: it shows what is in that memory, in its order.
        """
        return self.numpy(tensor)

    def wide_numpy(self, tensor: Any) -> Array:
        """:meth:`numpy` with float16, too, as float32, whose products and sums do not overflow."""
        array = self.numpy(tensor)
        return array.astype(np.float32) if array.dtype == np.float16 else array

    def storable(self, tensor: Any) -> Any:
        """Copy to the CPU with the element type unchanged, as safetensors' writers take it."""

    def copy(self, tensor: Any) -> Any:
        """Copy within the framework, detached from automatic differentiation."""

    def shape(self, tensor: Any) -> list[int]:
        """Sizes of the axes; [] of nested tensors, which have none."""
        return [int(size) for size in tensor.shape]

    def dtype(self, tensor: Any) -> str:
        """Name of the element type: ``float32``, ``bfloat16``."""


class Arithmetic(TensorReader, Protocol):
    """Computes with the tensors of one framework, beyond what Python's operators do.

    Unless said otherwise, operations are differentiable and work in graphs. Results that are
    computed once, such as a static mask, are computed with NumPy instead.
    """

    # -- bits (of values, not in graphs) ----------------------------------

    def bits(self, tensor: Any, positions: Array) -> Array:
        """Elements at positions of the flattened tensor, their bits as unsigned integers.

        Raises:
            TypeError: the elements are neither real floating-point numbers nor integers.
        """

    def with_bits(self, tensor: Any, positions: Array, bits: Array) -> Any:
        """Copy, detached, with other elements at positions of the flattened tensor."""

    def to_bits(self, values: Array, like: Any) -> Array:
        """Cast numbers to the element type of `like`; return the bits as unsigned integers."""

    def from_bits(self, bits: Array, like: Any) -> Array:
        """Inverse of :meth:`to_bits`, as float64."""

    # -- constants and variables ------------------------------------------

    def constant(self, array: Array, like: Any) -> Any:
        """Turn an array into a constant with the element type and device of `like`."""

    def cast_like(self, constant: Any, like: Any) -> Any:
        """Cast a constant to the element type and move it to the device of `like`."""

    def variable(self, array: Array, like: Any) -> Any:
        """Make a trainable value. Call it in a routine: an analysis may run within a graph."""

    def assign(self, target: Any, array: Array) -> None:
        """Write an array into a parameter or variable.

        Raises:
            TypeError: `target` is a plain value.
        """

    def train_in_backward(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        """Return `tensors`, and the values of `variables`, so that the backward pass trains.

        A backward pass that reaches one of the returned tensors does one step of gradient
        descent, ``variable -= rate * gradient``. Gradients of `tensors` pass unchanged.
        """

    def stop_gradient(self, tensor: Any) -> Any:
        """Detach from automatic differentiation, without a copy."""

    # -- elementwise ------------------------------------------------------

    def relu(self, tensor: Any, /) -> Any:
        """``max(tensor, 0)``."""

    def sigmoid(self, tensor: Any, /) -> Any:
        """Logistic function."""

    def divide(self, tensor: Any, number: Any, /) -> Any:
        """Divide by what is not zero; in graphs also by a constant with the bits of a division."""

    def round(self, tensor: Any, /) -> Any:
        """Round to the nearest integer, halves to even."""

    def clip(self, tensor: Any, low: Any, high: Any, /) -> Any:
        """Clamp to numbers or tensors, which get gradients, too; not where they are just met."""

    def where(self, condition: Any, a: Any, b: Any, /) -> Any:
        """`a` where the condition holds, else `b`; either may be a Python number."""

    def widen(self, tensor: Any) -> Any:
        """Cast floating-point types below 32 bits to float32; return others as they are."""

    def round_trip(self, tensor: Any, dtype: str) -> Any:
        """Cast to an 8-bit floating-point type and back."""

    # -- axes -------------------------------------------------------------

    def softmax(self, tensor: Any) -> Any:
        """Softmax along the last axis."""

    def matmul(self, a: Any, b: Any, /) -> Any:
        """Matrix product over the last two axes."""

    def min_max(self, tensor: Any, axis: int | None = None) -> tuple[Any, Any]:
        """Smallest and largest element, as scalars, or along an axis, which stays with size 1."""

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        """Mean over axes, which are removed; of no axes the tensor itself."""

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        """Sum over axes, which are removed; of no axes the tensor itself."""

    def reshape(self, tensor: Any, shape: Sequence[int], /) -> Any:
        """Reshape; one size may be -1."""

    def transpose(self, tensor: Any, /) -> Any:
        """Exchange the last two axes."""

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        """Select positions along an axis."""

    def top_mask(self, scores: Any, count: int) -> Any:
        """1 at the `count` largest scores of the last axis, at ties the first ones; else 0."""


_MODULES = {"torch": "pytorch", "tensorflow": "tensorflow", "keras": "tensorflow"}
"""Top-level package of a tensor's type to the module here; other types have ``arrays``."""


def reader_of(tensor: Any) -> TensorReader:
    """Return the reader of the framework that a tensor belongs to."""
    return _reader_of_type(cast("Hashable", type(tensor)))


def arithmetic_of(tensor: Any) -> Arithmetic:
    """Return the arithmetic of the framework that a tensor belongs to.

    :meth:`TensorReader.refusal` tells a tensor that it can only read.
    """
    return cast("Arithmetic", reader_of(tensor))


def guarded(routine: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Make a replacement routine that is the operator itself where tools cannot compute.

    Args:
        routine: the replacement elsewhere; it gets the operator as the argument ``operator``.
        index: position of the input that it computes with.
    """

    @functools.wraps(routine)
    def run(*inputs: Any, operator: Callable[..., Any], **given: Any) -> Any:
        if arithmetic_of(inputs[index]).refusal(inputs[index]):
            return operator(*inputs)
        return routine(*inputs, operator=operator, **given)

    return run


@functools.lru_cache(maxsize=256)
def _reader_of_type(kind: type) -> TensorReader:
    packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
    found = next((_MODULES[package] for package in packages if package in _MODULES), "arrays")
    arithmetic: Arithmetic = importlib.import_module(f"{__name__}.{found}").ARITHMETIC
    return arithmetic
