"""``context.get_value`` in eager execution: which tensors were read from a variable.

Reading a variable is an operator, whose output is a tensor like any other. The driver notes these
outputs, and what casts, identities, reshapes and transpositions make of them, so that a parameter
can be told from a computed tensor.
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
        steps: the casts, reshapes and transpositions between the variable and the tensor.
    """

    handle: weakref.ref[Any]
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> int | None:
        """A number that no other variable of the process has; None if the variable is gone."""
        handle = self.handle()
        return None if handle is None else _internals.handle_key(handle)

    def read(self) -> Any:
        """The variable's current value after the steps; None if the variable is gone."""
        handle = self.handle()
        dtype = None if handle is None else _internals.variable_dtype(handle)
        if dtype is None:
            return None
        with muted(), _internals.stop_recording():
            value = _internals.read_variable(handle, dtype)
            for step in self.steps:
                value = step.of(value)
        return value


class _ReadTensor(weakref.ref[Any]):
    """Weak reference to a tensor that was read from a variable.

    Attributes:
        key: the ``id`` of the tensor.
        source: the variable.
    """

    __slots__ = ("key", "source")

    key: int
    source: Source


class WeakTensor(weakref.ref[Any]):
    """A forward tensor as a backward context gets it: called, it gives the tensor or None.

    Attributes:
        source: the variable that the tensor was read from, if any.
    """

    __slots__ = ("source",)

    source: Source | None

    def constant(self) -> Any:
        """The value of the variable that the tensor was read from, or is; else None."""
        tensor = self()
        if self.source is not None:
            return self.source.read() if tensor is None else tensor
        if tensor is not None and tensor.dtype == tf.resource:
            return Source(self).read()
        return None


class VariableValues:
    """The tensors that were read from variables, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, _ReadTensor] = {}

        def died(known: _ReadTensor, known_tensors: dict[int, _ReadTensor] = self._known) -> None:
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
        new = _ReadTensor(result, self._died)
        new.key = id(result)
        new.source = source
        self._known[new.key] = new

    def source_of(self, tensor: Any) -> Source | None:
        """The variable that a tensor was read from or is the handle of; None if there is none."""
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
        """Weak references to tensors, each with the variable that it was read from."""
        found = []
        for tensor in tensors:
            weak = WeakTensor(tensor)
            known = self._known.get(id(tensor))
            weak.source = None if known is None else known.source
            found.append(weak)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
