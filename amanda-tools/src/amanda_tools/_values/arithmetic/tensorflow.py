"""The arithmetic of the optimization tools on TensorFlow; imported when a tensor of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_tools._values.arithmetic import Arithmetic


class TensorFlowArithmetic(Arithmetic):
    """On tensors of TensorFlow, with values or symbolic."""

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        value = np.array(tensor)
        return value.astype(np.float32) if self.is_floating(tensor) and _is_short(value) else value

    def bits(self, tensor: Any, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._as_integers(np.array(tensor).reshape(-1)[positions], tensor)

    def with_bits(
        self, tensor: Any, positions: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]
    ) -> Any:
        new = np.array(tensor)
        # Not reshape(-1), which may be a copy.
        new.flat[positions] = bits.view(new.dtype)
        return self.framework.constant(new)

    def to_bits(self, values: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        return self._as_integers(self.constant(values, like), like)

    def from_bits(self, bits: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        # A flipped bit can make a signalling NaN.
        with np.errstate(invalid="ignore"):
            return np.asarray(bits.view(self._numpy_type(like)).astype(np.float64))

    def _as_integers(self, values: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        kind = self.framework.as_dtype(like.dtype)
        if not (kind.is_floating or kind.is_integer):
            raise TypeError(f"elements of type {kind.name}")
        return values.view(f"uint{8 * values.dtype.itemsize}")

    def _numpy_type(self, like: Any) -> Any:
        return self.framework.as_dtype(like.dtype).as_numpy_dtype

    def is_floating(self, tensor: Any) -> bool:
        return bool(self.framework.as_dtype(tensor.dtype).is_floating)

    def constant(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        # Not a tensor: it would belong to the graph in which it was made.
        return np.asarray(array).astype(self._numpy_type(like))

    def matched(self, constant: Any, like: Any) -> Any:
        is_same = self.framework.as_dtype(constant.dtype) == like.dtype
        return constant if is_same else self.framework.cast(constant, like.dtype)

    def variable(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        with self.framework.init_scope():
            return self.framework.Variable(self.constant(array, like))

    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        if not hasattr(target, "assign"):
            raise TypeError(f"{type(target).__name__} is a value and no variable")
        target.assign(self.constant(array, target))

    def training(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        tf, count = self.framework, len(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def entrance(*given: Any) -> Any:
            def step(*gradients: Any) -> list[Any]:
                steps = [
                    variable.assign_sub(rate * gradient)
                    for variable, gradient in zip(variables, gradients[count:], strict=True)
                    if gradient is not None
                ]
                # In a graph nothing else would make the steps run.
                with tf.control_dependencies(steps):
                    passed = [g if g is None else tf.identity(g) for g in gradients[:count]]
                return [*passed, *[None] * len(variables)]

            return [tf.identity(tensor) for tensor in given], step

        found = entrance(*tensors, *(tf.convert_to_tensor(variable) for variable in variables))
        return found[:count], found[count:]

    def stop_gradient(self, tensor: Any) -> Any:
        return self.framework.stop_gradient(tensor)

    def relu(self, tensor: Any) -> Any:
        return self.framework.nn.relu(tensor)

    def sigmoid(self, tensor: Any) -> Any:
        return self.framework.sigmoid(tensor)

    def softmax(self, tensor: Any) -> Any:
        return self.framework.nn.softmax(tensor)

    def matmul(self, a: Any, b: Any) -> Any:
        return self.framework.matmul(a, b)

    def single(self, tensor: Any) -> Any:
        is_short = self.framework.as_dtype(tensor.dtype).size < 4
        return self.framework.cast(tensor, "float32") if is_short else tensor

    def through(self, tensor: Any, dtype: str) -> Any:
        eight = getattr(self.framework.dtypes.experimental, dtype)
        return self.framework.cast(self.framework.cast(tensor, eight), tensor.dtype)

    def round(self, tensor: Any) -> Any:
        return self.framework.round(tensor)

    def clip(self, tensor: Any, low: Any, high: Any) -> Any:
        return self.framework.clip_by_value(tensor, low, high)

    def extremes(self, tensor: Any) -> tuple[Any, Any]:
        return self.framework.reduce_min(tensor), self.framework.reduce_max(tensor)

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        return self.framework.reduce_mean(tensor, list(axes))

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return self.framework.reduce_sum(tensor, list(axes))

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return self.framework.reshape(tensor, list(shape))

    def transpose(self, tensor: Any) -> Any:
        return self.framework.linalg.matrix_transpose(tensor)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.framework.where(condition, a, b)

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        return self.framework.gather(tensor, list(indices), axis=axis)

    def top(self, scores: Any, count: int) -> Any:
        # Not argsort(DESCENDING), which leaves the order of equals open.
        order = self.framework.argsort(-scores, stable=True)
        ranks = self.framework.argsort(order)
        return self.framework.cast(ranks < count, scores.dtype)


def _is_short(value: np.ndarray[Any, Any]) -> bool:
    return bool(value.dtype.itemsize < 4)


ARITHMETIC = TensorFlowArithmetic(tf)
