"""Variables behind operators' inputs, to be named and written (``context.get_variable``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda_tensorflow import _internals
from amanda_tensorflow.operators.variable_views import ViewStep, changed


class HandleVariable(Variable):
    """A variable that is known by its concrete handle.

    Args:
        handle: the handle.
        steps: the casts, reshapes and transpositions between the variable and the input.
    """

    def __init__(self, handle: Any, steps: Sequence[ViewStep]) -> None:
        self._handle = weakref.ref(handle)
        self._steps = tuple(steps)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The variable's name, or path in Keras."""
        handle = self._handle()
        return "" if handle is None else _internals.variable_name(handle)

    def is_alive(self) -> bool:
        return self._handle() is not None

    def change(self, function: Callable[[Any], Any]) -> None:
        handle = self._handle()
        dtype = None if handle is None else _internals.variable_dtype(handle)
        if dtype is None:
            raise AmandaError("the variable is gone")
        with _internals.eager_mode(), _internals.stop_recording():
            value = _internals.read_variable(handle, dtype)
            _internals.write_variable(handle, changed(value, self._steps, function))
