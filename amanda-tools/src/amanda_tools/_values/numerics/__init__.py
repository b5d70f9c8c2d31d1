"""What analysis tools ask of a tensor's numbers, in whatever framework it is.

A tool has no branch for a framework: it asks for the numerics of the tensor that
it got. No framework is imported before a tensor of it is there::

    numerics = numerics_of(tensor)
    if numerics.is_floating(tensor) and not numerics.is_finite(tensor):
        print(describe_tensor(tensor))
"""

from __future__ import annotations

import abc
import functools
import importlib
import math
from collections.abc import Hashable
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, Any]


class Numerics(abc.ABC):
    """The numbers of the tensors of one framework."""

    @abc.abstractmethod
    def is_floating(self, tensor: Any) -> bool:
        """Whether its elements can be NaN, and can be read: no complex, quantized or
        symbolic tensor, and none without data."""

    @abc.abstractmethod
    def is_finite(self, tensor: Any) -> bool:
        """Whether all elements of a floating-point tensor are numbers, as fast as possible."""

    def is_clean(self, tensor: Any) -> bool:
        """Whether there is nothing in it that is no number: what is asked at every execution."""
        return not self.is_floating(tensor) or self.is_finite(tensor)

    @abc.abstractmethod
    def has_nan(self, tensor: Any) -> bool:
        """Whether an element of a floating-point tensor is NaN."""

    def is_readable(self, tensor: Any) -> bool:
        """Whether it has elements that :meth:`numpy` gives."""
        return True

    def is_opaque(self, tensor: Any) -> bool:
        """Whether it stands for state (a variable's handle) or holds other tensors (a list)."""
        return False

    @abc.abstractmethod
    def numpy(self, tensor: Any) -> Array:
        """A copy on the CPU in numpy's type of the same name, float32 where there is none."""

    def stored(self, tensor: Any) -> Any:
        """A copy on the CPU in its own type, as the writer of its framework takes it."""
        return self.numpy(tensor)

    @abc.abstractmethod
    def copy(self, tensor: Any) -> Any:
        """A copy that nothing is differentiated through."""

    def shape(self, tensor: Any) -> list[int]:
        """Its sizes; [] of what has none, such as a nested tensor."""
        return [int(size) for size in tensor.shape]

    @abc.abstractmethod
    def dtype(self, tensor: Any) -> str:
        """The name of its element type: ``float32``, ``bfloat16``."""


class PlainNumerics(Numerics):
    """Tensors that numpy understands, or that hold a list of numbers in ``data``."""

    def is_floating(self, tensor: Any) -> bool:
        return bool(np.issubdtype(self.numpy(tensor).dtype, np.floating))

    def is_finite(self, tensor: Any) -> bool:
        return bool(np.isfinite(self.numpy(tensor)).all())

    def has_nan(self, tensor: Any) -> bool:
        return bool(np.isnan(self.numpy(tensor)).any())

    def numpy(self, tensor: Any) -> Array:
        data = getattr(tensor, "data", tensor)
        array = np.array(data if isinstance(data, list) else tensor)
        return array.reshape([int(size) for size in tensor.shape])

    def copy(self, tensor: Any) -> Any:
        return self.numpy(tensor)

    def dtype(self, tensor: Any) -> str:
        return str(self.numpy(tensor).dtype)


_MODULES = {"torch": "pytorch", "tensorflow": "tensorflow", "keras": "tensorflow"}


def numerics_of(tensor: Any) -> Numerics:
    """The numerics of the framework that a tensor belongs to."""
    return _numerics(cast("Hashable", type(tensor)))


@functools.lru_cache(maxsize=256)
def _numerics(kind: type) -> Numerics:
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    for root in roots:
        if root in _MODULES:
            module = importlib.import_module(f"{__name__}.{_MODULES[root]}")
            found: Numerics = module.NUMERICS
            return found
    return PlainNumerics()


def statistics(tensor: Any) -> dict[str, Any]:
    """What a summary says of a tensor: shape, type, range, moments, and how much is no number.

    The figures are those of the finite elements, null if there are none.
    """
    numerics = numerics_of(tensor)
    found: dict[str, Any] = {
        "shape": numerics.shape(tensor),
        "dtype": numerics.dtype(tensor),
    }
    if not numerics.is_readable(tensor):
        return found
    array = numerics.numpy(tensor)
    if array.dtype.kind not in "fiub":
        return found
    values = array.astype(np.float64, copy=False).ravel()
    finite = values[np.isfinite(values)]
    found.update(
        nan=int(np.isnan(values).sum()),
        posinf=int(np.isposinf(values).sum()),
        neginf=int(np.isneginf(values).sum()),
        zeros=int((values == 0).sum()),
    )
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        # The sum of huge numbers may leave the range of a double.
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(function(finite)) if finite.size else math.nan
        found[name] = value if math.isfinite(value) else None
    return found
