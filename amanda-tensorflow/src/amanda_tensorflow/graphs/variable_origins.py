"""``context.get_value`` and ``get_variable`` in graphs: variables and constants behind tensors.

A tensor of a function may stand for a tensor of its caller (:attr:`OpSite.sources`) or for a
concrete one (:attr:`OpSite.captured`); both are followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.labels import PARAMETERS
from amanda_tensorflow.operators.variables import (
    VARIABLES,
    VIEWS,
    HandleVariable,
    ViewStep,
    changed,
    parameter_name,
    step_of,
)

_LOOK_THROUGH = frozenset(
    {"Identity", "Cast", "ReadVariableOp", "Enter", "RefEnter", "EnsureShape"}
)
"""Operators that pass on the value of a variable or constant."""

ReadVariable = Callable[[Any, Any], Any]
"""Reads a variable: called with its concrete handle, or with the operator of the graph that makes
it, and its dtype or None. Gives None for a variable without a value."""

WriteVariable = Callable[[str, Callable[[Any], Any]], None]
"""Writes a variable of a session: called with the name of the operator that makes it, and a
function of its value that gives the new one."""


def value_of(site: OpSite, tensor: Any, read: ReadVariable, dtype: Any = None) -> Any:
    """The value of a tensor that a variable, a constant or a captured tensor determines, else None.

    Args:
        read: reads a variable.
        dtype: the type in which a variable is read; None for its own.
    """
    op = tensor.op
    kind = op.type
    if kind == "Const":
        with _internals.eager_mode():
            return tf.constant(tf.make_ndarray(op.get_attr("value")))
    if kind in VARIABLES:
        return read(op, dtype)
    if kind == "Placeholder":
        return _placeholder_value(site, tensor, read, dtype)
    if kind not in _LOOK_THROUGH and kind not in VIEWS:
        return None
    step = ViewStep(kind, tensor.dtype) if kind == "Cast" else _view(tensor)
    if step is None and kind in VIEWS:
        return None
    reads = tensor.dtype if kind == "ReadVariableOp" else dtype
    value = value_of(site, op.inputs[0], read, reads)
    if value is None or step is None:
        return value
    with _internals.eager_mode():
        return step.of(value)


def _view(tensor: Any) -> ViewStep | None:
    """The step that an operator of :data:`VIEWS` makes; None for others, or if it is not known."""
    op = tensor.op
    if op.type not in VIEWS:
        return None
    return step_of(op.type, op.inputs[0], tensor, lambda: tf.get_static_value(op.inputs[1]))


def variable_view(site: OpSite, tensor: Any) -> tuple[ViewStep, ...]:
    """The reshapes and transpositions from a variable to a tensor."""
    op = tensor.op
    if op.type == "Placeholder" and id(tensor) in site.sources:
        return variable_view(*site.sources[id(tensor)])
    if op.type not in _LOOK_THROUGH and op.type not in VIEWS:
        return ()
    step = _view(tensor)
    before = variable_view(site, op.inputs[0])
    return before if step is None else (*before, step)


def variable_of(site: OpSite, tensor: Any, write: WriteVariable | None) -> Variable | None:
    """The variable whose value or handle a tensor is; None for other tensors.

    Args:
        write: writes a variable of a session; None in functions.
    """
    origin = variable_origin(site, tensor)
    if origin is None:
        return None
    steps = variable_view(site, tensor)
    if isinstance(origin, _internals.EagerTensor):
        return HandleVariable(origin, steps)
    return GraphVariable(origin.name, (site.root_ids, origin.name), steps, write)


def variable_origin(site: OpSite, tensor: Any, *, exact: bool = False) -> Any:
    """The concrete handle of the variable whose value or handle a tensor is, or the operator of the
    graph that makes the variable; None for other tensors.

    Args:
        exact: None also for a tensor that shows the variable reshaped, transposed or cast.
    """
    op = tensor.op
    if op.type in VARIABLES:
        return op
    if op.type in _LOOK_THROUGH or _view(tensor) is not None:
        is_changed = op.type == "Cast" or op.type in VIEWS
        return None if exact and is_changed else variable_origin(site, op.inputs[0], exact=exact)
    if op.type != "Placeholder":
        return None
    if id(tensor) in site.sources:
        return variable_origin(*site.sources[id(tensor)], exact=exact)
    concrete = site.captured.get(id(tensor))
    return None if concrete is None or concrete.dtype != tf.resource else concrete


def parameter_of(site: OpSite, tensor: Any, *, exact: bool = False) -> str | None:
    """The path of the parameter whose value or handle a tensor is; None for other tensors.

    Args:
        exact: leave out tensors that show the variable reshaped, transposed or cast.
    """
    origin = variable_origin(site, tensor, exact=exact)
    if origin is None or isinstance(origin, _internals.EagerTensor):
        return parameter_name(origin)
    is_trained = origin.name in _trained_in(origin.graph)
    return PARAMETERS.label_of(weakref.ref(origin), origin.name) if is_trained else None


def _trained_in(graph: Any) -> frozenset[str]:
    """The names of the operators that make the trainable variables of a graph."""
    variables = graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    count, names = _TRAINED.get(graph, (0, frozenset[str]()))
    if count != len(variables):
        names = frozenset(one.op.name for one in variables)
        _TRAINED[graph] = len(variables), names
    return names


_TRAINED: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[str]]] = weakref.WeakKeyDictionary()


def _placeholder_value(site: OpSite, tensor: Any, read: ReadVariable, dtype: Any) -> Any:
    """The value of a placeholder: that of the tensor that it stands for."""
    if id(tensor) in site.sources:
        caller, outer = site.sources[id(tensor)]
        return value_of(caller, outer, read, dtype)
    concrete = site.captured.get(id(tensor))
    if concrete is None or concrete.dtype != tf.resource:
        return concrete
    return read(concrete, dtype)


class GraphVariable(Variable):
    """A variable that an operator of a session's graph makes.

    Args:
        name: the operator's name.
        key: identifies the variable.
        steps: the reshapes and transpositions between the variable and the input.
        write: writes a variable; None where none can be.
    """

    def __init__(
        self, name: str, key: Hashable, steps: tuple[ViewStep, ...], write: WriteVariable | None
    ) -> None:
        self.name, self.key, self.view, self._steps = name, key, steps, steps
        self._write = write

    def change(self, function: Callable[[Any], Any]) -> None:
        if self._write is None:
            raise AmandaError(f"the variable {self.name} of a function cannot be written")
        self._write(self.name, lambda value: changed(value, self._steps, function))
