"""Which tensors of eager execution were read from a variable.

Reading a variable is an operator, and its output a tensor like any other. The
driver notes these outputs, and what a cast, an identity or another view makes of them, so that
``context.get_value`` can tell a parameter from a computed tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.eager.thread import muted
from amanda_tensorflow.operators.variable_views import VIEWS, Step, step_of

READING = frozenset({"ReadVariableOp", "Identity", "Cast"}) | VIEWS
"""Operators whose output may be the value of a variable."""


@attrs.frozen
class Source:
    """The variable that a tensor was read from.

    Attributes:
        handle: weak reference to the variable's handle.
        steps: what has become of the value on its way.
    """

    handle: weakref.ref[Any]
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> int | None:
        """What tells the variable from others; None if it is gone."""
        handle = self.handle()
        return None if handle is None else _internals.handle_key(handle)

    def read(self) -> Any:
        """The current value; None if the variable is gone."""
        handle = self.handle()
        dtype = None if handle is None else _internals.variable_dtype(handle)
        if dtype is None:
            return None
        with muted(), _internals.stop_recording():
            value = _internals.read_variable(handle, dtype)
            for step in self.steps:
                value = step.of(value)
        return value


class _Known(weakref.ref[Any]):
    """A tensor that was read from a variable."""

    __slots__ = ("key", "source")

    key: int
    source: Source


class VariableValues:
    """The tensors that were read from variables, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

        def died(known: _Known, known_tensors: dict[int, _Known] = self._known) -> None:
            known_tensors.pop(known.key, None)

        self._died: Any = died

    def note(self, kind: str, inputs: Sequence[Any], result: Any) -> None:
        """An operator of :data:`READING` has made `result` of its first input."""
        origin = inputs[0]
        if kind == "ReadVariableOp":
            source = Source(weakref.ref(origin))
        else:
            known = self._known.get(id(origin))
            if known is None:
                return
            source = known.source
        step = None
        if kind == "Cast":
            step = Step("Cast", result.dtype)
        elif kind in VIEWS:
            step = step_of(kind, origin, result, lambda: np.asarray(inputs[1]).tolist())
        if step is not None:
            source = attrs.evolve(source, steps=(*source.steps, step))
        new = _Known(result, self._died)
        new.key = id(result)
        new.source = source
        self._known[new.key] = new

    def source_of(self, tensor: Any) -> Source | None:
        """The variable that a tensor was read from, or is the handle of; None if there is none."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known.source
        if tensor.dtype == tf.resource and _internals.variable_dtype(tensor) is not None:
            return Source(weakref.ref(tensor))
        return None

    def of(self, tensor: Any) -> Any:
        """The value of the variable that `tensor` stands for; None for other tensors."""
        source = self.source_of(tensor)
        if source is None:
            return None
        return source.read() if tensor.dtype == tf.resource else tensor

    def weak(self, tensors: Sequence[Any]) -> list[WeakTensor]:
        """Weak stand-ins for tensors."""
        known = self._known
        return [WeakTensor(tensor, known.get(id(tensor))) for tensor in tensors]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


class WeakTensor:
    """A forward tensor as a backward context finds it: called, it gives the tensor or None."""

    __slots__ = ("_ref", "_source")

    def __init__(self, tensor: Any, known: _Known | None) -> None:
        self._ref = weakref.ref(tensor)
        self._source = None if known is None else known.source

    def __call__(self) -> Any:
        return self._ref()

    def constant(self) -> Any:
        """The value of the variable that it was read from, or is; None for other tensors."""
        tensor = self._ref()
        if self._source is not None:
            return self._source.read() if tensor is None else tensor
        if tensor is not None and tensor.dtype == tf.resource:
            return Source(self._ref).read()
        return None
