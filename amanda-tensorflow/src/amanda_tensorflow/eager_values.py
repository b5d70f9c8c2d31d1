"""Which tensors of eager execution were read from a variable.

Reading a variable is an operator, and its output a tensor like any other. The
driver notes these outputs, and what a cast or an identity makes of them, so that
``context.get_value`` can tell a parameter from a computed tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.eager_ids import muted

READING = frozenset({"ReadVariableOp", "Identity", "Cast"})
"""Operators whose output may be the value of a variable."""


@attrs.frozen
class Source:
    """The variable that a tensor was read from.

    Attributes:
        handle: weak reference to the variable's handle.
        dtype: the variable's dtype.
        casts: the dtypes that the value was cast to on its way.
    """

    handle: weakref.ref[Any]
    dtype: Any
    casts: tuple[Any, ...] = ()

    def read(self) -> Any:
        """The current value; None if the variable is gone."""
        handle = self.handle()
        if handle is None:
            return None
        with muted(), _internals.stop_recording():
            value = _internals.read_variable(handle, self.dtype)
            for dtype in self.casts:
                value = tf.cast(value, dtype)
        return value


class Values:
    """The tensors that were read from variables, as long as they live."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[weakref.ref[Any], Source]] = {}

    def note(self, kind: str, origin: Any, result: Any) -> None:
        """An operator of :data:`READING` has made `result` of `origin`."""
        if kind == "ReadVariableOp":
            source: Source | None = Source(weakref.ref(origin), result.dtype)
        elif isinstance(origin, _internals.EagerTensor):
            source = self.source_of(origin)
        else:
            # The runtime has read a variable that was passed as it is.
            handle = getattr(origin, "handle", None)
            source = None if handle is None else Source(weakref.ref(handle), origin.dtype)
        if source is None:
            return
        if kind == "Cast":
            source = attrs.evolve(source, casts=(*source.casts, result.dtype))
        key, sources = id(result), self._sources

        def died(_: weakref.ref[Any]) -> None:
            sources.pop(key, None)

        sources[key] = (weakref.ref(result, died), source)

    def source_of(self, tensor: Any) -> Source | None:
        """The variable that a tensor was read from, or is the handle of; None if there is none."""
        known = self._sources.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if tensor is not None and tensor.dtype == tf.resource:
            dtype = _internals.variable_dtype(tensor)
            return None if dtype is None else Source(weakref.ref(tensor), dtype)
        return None

    def of(self, tensor: Any) -> Any:
        """The value of the variable that `tensor` stands for; None for other tensors."""
        source = self.source_of(tensor)
        if source is None:
            return None
        return source.read() if tensor.dtype == tf.resource else tensor

    def weak(self, tensors: Sequence[Any]) -> list[WeakTensor]:
        """Weak stand-ins for tensors."""
        return [WeakTensor(tensor, self.source_of(tensor)) for tensor in tensors]

    def clear(self) -> None:
        """Forget everything."""
        self._sources.clear()


class WeakTensor:
    """A forward tensor as a backward context finds it: called, it gives the tensor or None."""

    __slots__ = ("_ref", "_source")

    def __init__(self, tensor: Any, source: Source | None) -> None:
        self._ref = weakref.ref(tensor)
        self._source = source

    def __call__(self) -> Any:
        return self._ref()

    def constant(self) -> Any:
        """The value of the variable that it was read from; None if it was not."""
        if self._source is None:
            return None
        tensor = self._ref()
        if tensor is None or tensor.dtype == tf.resource:
            return self._source.read()
        return tensor
