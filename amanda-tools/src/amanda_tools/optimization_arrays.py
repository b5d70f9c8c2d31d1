"""The array arithmetic of the optimization tools, in the framework of the arrays.

A tool asks for the arithmetic of the tensors that it got, and has no branch for
a framework itself::

    arithmetic = arithmetic_of(tensor)
    mask = arithmetic.constant(numpy_mask, like=tensor)

What is computed once, such as a static mask, is computed with numpy. No
framework is imported before a tensor of it is there.
"""

from __future__ import annotations

import abc
import functools
import importlib
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np


class Arithmetic(abc.ABC):
    """The operations that the tools need beyond Python's own operators.

    Args:
        framework: the framework's module.
    """

    def __init__(self, framework: Any) -> None:
        self.framework = framework

    @abc.abstractmethod
    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """A copy of a tensor's value; of floating point types below 32 bits as float32."""

    @abc.abstractmethod
    def bits(self, tensor: Any, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The elements at some positions of the flattened tensor, as unsigned integers.

        Raises:
            TypeError: its elements are neither real floating point numbers nor integers.
        """

    @abc.abstractmethod
    def with_bits(
        self, tensor: Any, positions: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]
    ) -> Any:
        """A copy of a tensor with other elements at some positions, outside of AD."""

    @abc.abstractmethod
    def to_bits(self, values: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        """Numbers in the type of a tensor, as unsigned integers."""

    @abc.abstractmethod
    def from_bits(self, bits: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        """What :meth:`to_bits` has made, as float64."""

    @abc.abstractmethod
    def is_floating(self, tensor: Any) -> bool:
        """Whether its elements are real floating point numbers."""

    @abc.abstractmethod
    def constant(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        """An array as something to compute with beside `like`: its type, its device."""

    @abc.abstractmethod
    def matched(self, constant: Any, like: Any) -> Any:
        """A constant in the type and on the device that `like` has by now."""

    @abc.abstractmethod
    def variable(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        """An array as a value that an optimizer can train."""

    @abc.abstractmethod
    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        """Write an array into a parameter or variable.

        Raises:
            TypeError: `target` cannot be written.
        """

    @abc.abstractmethod
    def stop_gradient(self, tensor: Any) -> Any:
        """The same value, for which nothing is differentiated."""

    @abc.abstractmethod
    def relu(self, tensor: Any) -> Any:
        """``max(tensor, 0)``, differentiable."""

    @abc.abstractmethod
    def sigmoid(self, tensor: Any) -> Any:
        """The logistic function."""

    @abc.abstractmethod
    def softmax(self, tensor: Any) -> Any:
        """Along the last axis."""

    @abc.abstractmethod
    def matmul(self, a: Any, b: Any) -> Any:
        """The matrix product over the last two axes."""

    @abc.abstractmethod
    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        """The mean over some axes, which disappear."""

    @abc.abstractmethod
    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        """The sum over some axes, which disappear."""

    @abc.abstractmethod
    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        """The elements in another shape."""

    @abc.abstractmethod
    def transpose(self, tensor: Any) -> Any:
        """The last two axes exchanged."""

    @abc.abstractmethod
    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`; either may be a number."""

    @abc.abstractmethod
    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        """Some positions of an axis."""

    @abc.abstractmethod
    def top(self, scores: Any, count: int) -> Any:
        """1 at the `count` largest of the last axis, the first ones of equals, else 0."""


def arithmetic_of(tensor: Any) -> Arithmetic:
    """The arithmetic of the framework that a tensor belongs to.

    Raises:
        TypeError: it is of no framework that is known here.
    """
    return _arithmetic(cast("Hashable", type(tensor)))


@functools.lru_cache(maxsize=256)
def _arithmetic(kind: Any) -> Arithmetic:
    for ancestor in kind.__mro__:
        framework = ancestor.__module__.partition(".")[0]
        if framework in _FRAMEWORKS:
            return _FRAMEWORKS[framework](importlib.import_module(framework))
    raise TypeError(
        f"the optimization tools cannot compute with {kind.__module__}.{kind.__qualname__}; "
        f"they know the tensors of {' and '.join(_FRAMEWORKS)}"
    )


class TorchArithmetic(Arithmetic):
    """On tensors of PyTorch."""

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        value = tensor.detach().cpu()
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()
        return np.array(value.numpy())

    def bits(self, tensor: Any, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        picked = tensor.detach()[self._indices(tensor, positions)].reshape(-1)
        return self._as_integers(picked)

    def with_bits(
        self, tensor: Any, positions: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]
    ) -> Any:
        # A clone keeps the order in memory, on which the last bits of products depend.
        new = tensor.detach().clone()
        elements = self._from_integers(bits, tensor).to(tensor.device)
        new[self._indices(tensor, positions)] = elements if new.dim() else elements[0]
        return new

    def to_bits(self, values: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        return self._as_integers(self.framework.tensor(values).to(like.dtype))

    def from_bits(self, bits: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self._from_integers(bits, like).double().numpy())

    def _indices(self, tensor: Any, positions: np.ndarray[Any, Any]) -> Any:
        axes = np.unravel_index(positions, tuple(tensor.shape)) if tensor.dim() else ()
        return tuple(self.framework.tensor(axis, device=tensor.device) for axis in axes)

    def _as_integers(self, tensor: Any) -> np.ndarray[Any, Any]:
        torch = self.framework
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"elements of type {tensor.dtype}")
        size = 8 * tensor.element_size()
        integers = tensor.view(getattr(torch, f"int{size}")).cpu().numpy()
        return np.asarray(integers.view(f"uint{size}"))

    def _from_integers(self, bits: np.ndarray[Any, Any], like: Any) -> Any:
        signed = bits.view(f"int{8 * bits.dtype.itemsize}")
        return self.framework.from_numpy(signed).view(like.dtype)

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.is_floating_point())

    def constant(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return self.framework.tensor(array, dtype=like.dtype, device=like.device)

    def matched(self, constant: Any, like: Any) -> Any:
        return constant.to(device=like.device, dtype=like.dtype)

    def variable(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return self.constant(array, like).requires_grad_()

    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        with self.framework.no_grad():
            target.copy_(self.constant(array, target))

    def stop_gradient(self, tensor: Any) -> Any:
        return tensor.detach()

    def relu(self, tensor: Any) -> Any:
        return tensor.relu()

    def sigmoid(self, tensor: Any) -> Any:
        return tensor.sigmoid()

    def softmax(self, tensor: Any) -> Any:
        return tensor.softmax(-1)

    def matmul(self, a: Any, b: Any) -> Any:
        return a @ b

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        # Without axes PyTorch would take all of them.
        return tensor.mean(tuple(axes)) if axes else tensor

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return tensor.sum(tuple(axes)) if axes else tensor

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def transpose(self, tensor: Any) -> Any:
        return tensor.mT

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.framework.where(condition, a, b)

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        positions = self.framework.tensor(indices, device=tensor.device)
        return tensor.index_select(axis, positions)

    def top(self, scores: Any, count: int) -> Any:
        order = scores.detach().argsort(dim=-1, descending=True, stable=True)
        return (order.argsort(-1) < count).to(scores.dtype)


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
        return constant

    def variable(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        with self.framework.init_scope():
            return self.framework.Variable(self.constant(array, like))

    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        if not hasattr(target, "assign"):
            raise TypeError(f"{type(target).__name__} is a value and no variable")
        target.assign(self.constant(array, target))

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


_FRAMEWORKS: dict[str, type[Arithmetic]] = {
    "torch": TorchArithmetic,
    "tensorflow": TensorFlowArithmetic,
}
