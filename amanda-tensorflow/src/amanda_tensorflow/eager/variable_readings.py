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

from amanda.interface.calls import KnownTensor
from amanda.python.references import nothing
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.tracker import unwatched
from amanda_tensorflow.operators.variables import VIEWS, ViewStep, parameter_name, step_of

READING = frozenset({"ReadVariableOp", "Identity", "Cast"}) | VIEWS
"""Operators whose output may be the value of a variable."""

SUMS = {"Add": 2, "AddV2": 2, "Sub": 1}
"""Operators whose gradient is that of so many first inputs, unless these are broadcast."""


@attrs.frozen
class VariableSource:
    """The variable that a tensor was read from.

    Attributes:
        handle: weak reference to the variable's handle.
        steps: the casts, reshapes and transpositions between the variable and the tensor.
        is_term: whether the tensor is a sum of the variable and others, with the same gradient.
    """

    handle: weakref.ref[Any]
    steps: tuple[ViewStep, ...] = ()
    is_term: bool = False

    def read(self) -> Any:
        """The variable's current value after the steps; None if the variable is gone."""
        handle = self.handle()
        dtype = None if handle is None else _internals.variable_dtype(handle)
        if dtype is None:
            return None
        with unwatched(), _internals.stop_recording():
            value = _internals.read_variable(handle, dtype)
            for step in self.steps:
                value = step.of(value)
        return value


class WeakTensor(weakref.ref[Any], KnownTensor):
    """A forward tensor as a backward context gets it: called, it gives the tensor or None.

    Attributes:
        source: the variable that the tensor was read from, if any.
    """

    __slots__ = ("source",)

    source: VariableSource | None

    def constant(self) -> Any:
        """The value of the variable that the tensor was read from, or is; else None."""
        tensor = self()
        if self.source is not None and not self.source.is_term:
            return self.source.read() if tensor is None else tensor
        if tensor is not None and tensor.dtype == tf.resource:
            return VariableSource(self).read()
        return None

    def parameter_name(self) -> str | None:
        """The path of the parameter that the tensor was read from, or is; else None.

        None for a view or a cast of it, whose gradient is another one.
        """
        tensor, source = self(), self.source
        if source is None and tensor is not None and tensor.dtype == tf.resource:
            source = VariableSource(self)
        return None if source is None or source.steps else parameter_name(source.handle())


_FEW = 64
"""Up to so many tensors and variables are noted before those that have died are dropped."""


class VariableValues:
    """The tensors that were read from variables, as long as they live.

    An entry whose tensor has died stays until there are many of them, because a callback for each
    death would cost more than all the rest.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], VariableSource]] = {}
        self._handles: dict[int, VariableSource] = {}
        self._most = _FEW

    def note(self, kind: str, inputs: Sequence[Any], result: Any) -> None:
        """An operator of :data:`READING` has made `result` of its first input."""
        origin = inputs[0]
        if kind == "ReadVariableOp":
            found = self._handles.get(id(origin))
            if found is None or found.handle() is not origin:
                found = self._handles[id(origin)] = VariableSource(weakref.ref(origin))
        else:
            found = self._noted(origin)
            if found is None:
                return
            step = None
            if kind == "Cast":
                step = ViewStep("Cast", result.dtype)
            elif kind in VIEWS:
                step = step_of(kind, origin, result, lambda: np.asarray(inputs[1]).tolist())
            if step is not None:
                found = attrs.evolve(found, steps=(*found.steps, step))
        self._known[id(result)] = weakref.ref(result), found
        if len(self._known) + len(self._handles) > self._most:
            self._drop_dead()

    @property
    def noted(self) -> int:
        """Count the tensors that are noted, with some that have died."""
        return len(self._known)

    def note_sum(self, kind: str, inputs: Sequence[Any], result: Any) -> None:
        """An operator of :data:`SUMS` has made `result` of its inputs."""
        if inputs[0].shape == inputs[1].shape:
            found = next(filter(None, map(self._noted, inputs[: SUMS[kind]])), None)
            if found is not None and not found.steps:
                self._known[id(result)] = weakref.ref(result), attrs.evolve(found, is_term=True)

    def _noted(self, tensor: Any, *, terms: bool = False) -> VariableSource | None:
        """The variable that a tensor was read from; None if it was not read from one.

        Args:
            terms: give also the variable that has the gradient of the tensor, a sum.
        """
        known = self._known.get(id(tensor))
        found = known[1] if known is not None and known[0]() is tensor else None
        return None if found is not None and found.is_term and not terms else found

    def _drop_dead(self) -> None:
        """Forget the tensors and variables that have died."""
        # Other threads note tensors meanwhile: copy() is one step, and what they put in place of an
        # entry that had died is put back.
        for key, known in self._known.copy().items():
            if known[0]() is None:
                newer = self._known.pop(key, known)
                if newer[0]() is not None:
                    self._known.setdefault(key, newer)
        for key, source in self._handles.copy().items():
            if source.handle() is None:
                self._handles.pop(key, None)
        self._most = max(_FEW, 2 * (len(self._known) + len(self._handles)))

    def source_of(self, tensor: Any) -> VariableSource | None:
        """The variable that a tensor was read from or is the handle of; None if there is none."""
        found = self._noted(tensor)
        if found is not None:
            return found
        if tensor.dtype == tf.resource and _internals.variable_dtype(tensor) is not None:
            return VariableSource(weakref.ref(tensor))
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
            # With a callback, as all references of Amanda's (`amanda.python.references`).
            weak = WeakTensor(tensor, nothing)
            weak.source = self._noted(tensor, terms=True)
            found.append(weak)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._handles.clear()
