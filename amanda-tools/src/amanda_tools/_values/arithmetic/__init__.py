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
        """An array as a value that an optimizer can train; made in a routine, not in an analysis,
        which may run in a graph."""

    @abc.abstractmethod
    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        """Write an array into a parameter or variable.

        Raises:
            TypeError: `target` cannot be written.
        """

    @abc.abstractmethod
    def training(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        """Tensors and the values of variables; what is computed with them trains the variables.

        The backward pass that gives a gradient of one of the tensors also makes a step,
        ``variable -= rate * gradient``. The gradients of the tensors are not changed.
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
    def single(self, tensor: Any) -> Any:
        """Of floating point types below 32 bits as float32, others as they are."""

    @abc.abstractmethod
    def through(self, tensor: Any, dtype: str) -> Any:
        """Rounded to a floating point type of 8 bits, in the type that it has."""

    @abc.abstractmethod
    def round(self, tensor: Any) -> Any:
        """To the nearest integer, of two to the even one."""

    @abc.abstractmethod
    def clip(self, tensor: Any, low: Any, high: Any) -> Any:
        """Between two bounds, numbers or tensors, for which it is differentiable, too."""

    @abc.abstractmethod
    def extremes(self, tensor: Any) -> tuple[Any, Any]:
        """The smallest and the largest element."""

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
            module = importlib.import_module(f"{__name__}.{_FRAMEWORKS[framework]}")
            arithmetic: Arithmetic = module.ARITHMETIC
            return arithmetic
    raise TypeError(
        f"the optimization tools cannot compute with {kind.__module__}.{kind.__qualname__}; "
        f"they know the tensors of {' and '.join(_FRAMEWORKS)}"
    )


_FRAMEWORKS: dict[str, str] = {"torch": "pytorch", "tensorflow": "tensorflow"}
"""Top package of a framework to the module of its arithmetic."""
