"""Reading and computing with TensorFlow's tensors; imported when the first of them comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_tools._values.tensors import Array
from amanda_tools._values.tensors.arrays import BitsOfArrays


class TensorFlowArithmetic(BitsOfArrays):
    """TensorFlow's tensors: eager ones, and for arithmetic and element types symbolic ones."""

    # -- reading ----------------------------------------------------------

    def is_floating(self, tensor: Any) -> bool:
        return bool(tf.as_dtype(tensor.dtype).is_floating)

    def is_readable(self, tensor: Any) -> bool:
        return hasattr(tensor, "numpy") and not self.is_opaque(tensor)

    def is_readable_float(self, tensor: Any) -> bool:
        # Hot path: floating-point types are never opaque, which need not be asked.
        return bool(tensor.dtype.is_floating) and hasattr(tensor, "numpy")

    def is_opaque(self, tensor: Any) -> bool:
        dtype = tensor.dtype
        return dtype in (tf.resource, tf.variant) or dtype.name.endswith("_ref")

    def may_hold_nan(self, tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)

    def is_finite(self, tensor: Any) -> bool | None:
        if not hasattr(tensor, "numpy"):
            return None
        return bool(tf.reduce_all(tf.math.is_finite(_numbers(tensor))))

    def has_nan(self, tensor: Any) -> bool | None:
        if not hasattr(tensor, "numpy"):
            return None
        return bool(tf.reduce_any(tf.math.is_nan(_numbers(tensor))))

    def numbers(self, tensor: Any) -> Array | None:
        return self.numpy(_numbers(tensor)) if self.is_readable(tensor) else None

    def dtype(self, tensor: Any) -> str:
        return str(tf.as_dtype(tensor.dtype).name)

    def storable(self, tensor: Any) -> Any:
        # Not np.array(tensor), which fails for a bfloat16 without axes (NumPy 2, TensorFlow 2.21).
        return np.array(tensor.numpy() if hasattr(tensor, "numpy") else tensor)

    def copy(self, tensor: Any) -> Any:
        return tf.stop_gradient(tf.identity(tensor))

    # -- bits -------------------------------------------------------------

    def with_bits(self, tensor: Any, positions: Array, bits: Array) -> Any:
        return tf.constant(super().with_bits(tensor, positions, bits))

    # -- constants and variables ------------------------------------------

    def constant(self, array: Array, like: Any) -> Any:
        # An array, not a tensor, which would belong to the graph that is being built.
        return np.asarray(array).astype(tf.as_dtype(like.dtype).as_numpy_dtype)

    def cast_like(self, constant: Any, like: Any) -> Any:
        is_same = tf.as_dtype(constant.dtype) == like.dtype
        return constant if is_same else tf.cast(constant, like.dtype)

    def variable(self, array: Array, like: Any) -> Any:
        with tf.init_scope():
            return tf.Variable(self.constant(array, like))

    def assign(self, target: Any, array: Array) -> None:
        if not hasattr(target, "assign"):
            raise TypeError(f"{type(target).__name__} is a value, not a variable")
        target.assign(self.constant(array, target))

    def train_in_backward(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        count = len(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def pass_on(*given: Any) -> Any:
            def step(*gradients: Any) -> list[Any]:
                steps = [
                    variable.assign_sub(rate * gradient)
                    for variable, gradient in zip(variables, gradients[count:], strict=True)
                    if gradient is not None
                ]
                # In a graph nothing else depends on the steps: without this they would not run.
                with tf.control_dependencies(steps):
                    passed = [g if g is None else tf.identity(g) for g in gradients[:count]]
                return [*passed, *[None] * len(variables)]

            return [tf.identity(tensor) for tensor in given], step

        found = pass_on(*tensors, *(tf.convert_to_tensor(variable) for variable in variables))
        return found[:count], found[count:]

    stop_gradient = staticmethod(tf.stop_gradient)

    # -- elementwise ------------------------------------------------------

    relu = staticmethod(tf.nn.relu)
    sigmoid = staticmethod(tf.sigmoid)
    round = staticmethod(tf.round)
    # The optimizer of graphs multiplies by the reciprocal of a constant that divides (2.21).
    divide = staticmethod(tf.math.divide_no_nan)
    clip = staticmethod(tf.clip_by_value)
    where = staticmethod(tf.where)

    def widen(self, tensor: Any) -> Any:
        is_short = tf.as_dtype(tensor.dtype).size < 4
        return tf.cast(tensor, "float32") if is_short else tensor

    def round_trip(self, tensor: Any, dtype: str) -> Any:
        return tf.cast(tf.cast(tensor, getattr(tf.dtypes.experimental, dtype)), tensor.dtype)

    # -- axes -------------------------------------------------------------

    softmax = staticmethod(tf.nn.softmax)
    matmul = staticmethod(tf.matmul)
    reshape = staticmethod(tf.reshape)
    transpose = staticmethod(tf.linalg.matrix_transpose)

    def min_max(self, tensor: Any, axis: int | None = None) -> tuple[Any, Any]:
        keeps = axis is not None
        return tf.reduce_min(tensor, axis, keeps), tf.reduce_max(tensor, axis, keeps)

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        return tf.reduce_mean(tensor, list(axes))

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return tf.reduce_sum(tensor, list(axes))

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        return tf.gather(tensor, list(indices), axis=axis)

    def top_mask(self, scores: Any, count: int) -> Any:
        # Not argsort(direction="DESCENDING"), which leaves the order of ties open.
        ranks = tf.argsort(tf.argsort(-scores, stable=True))
        return tf.cast(ranks < count, scores.dtype)


def _numbers(tensor: Any) -> Any:
    """Return real numbers of a type that kernels check: parts of complex ones, wider 8-bit ones."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
    return tf.cast(tensor, tf.float32) if tensor.dtype.size == 1 else tensor


ARITHMETIC = TensorFlowArithmetic()
