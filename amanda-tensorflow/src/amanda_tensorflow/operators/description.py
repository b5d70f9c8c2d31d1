"""Operators as tools see them: ``get_op()``, names of inputs, attributes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow import _internals


@attrs.frozen
class NamedOperator:
    """An operator as ``get_op()`` and ``get_backward_op()`` give it. It keeps no graph alive.

    Attributes:
        type: the registered name: ``Conv2D``.
        name: the operator's name in its graph, or in eager execution its id. It always
            contains the type.
    """

    type: str
    name: str
    _op: Callable[[], Any] | None = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def of(cls, op: Any) -> NamedOperator:
        """The view of an operator of a graph."""
        return cls(op.type, named_with_type(op.name, op.type), weakref.ref(op))

    def made_at(self) -> Iterator[tuple[str, int]]:
        """File and line of each frame of the call that added it to its graph, innermost first.

        Nothing for an eager operator: the call that runs it is the current one.
        """
        op = None if self._op is None else self._op()
        frames = () if op is None else op.traceback or ()
        # By index: each frame is converted when it is read, and callers stop early.
        for position in range(len(frames) - 1, -1, -1):
            frame = frames[position]
            yield frame.filename, frame.lineno

    def __str__(self) -> str:
        return self.name


def named_with_type(name: str, kind: str) -> str:
    """A name that contains the operator's type, which it may lack: Keras' ``.../convolution``."""
    return name if kind in name else f"{name}/{kind}"


def module_of(name: str) -> str:
    """The module path that an operator's name begins with: ``net/c1`` of ``net/c1/MatMul``."""
    return name.rpartition("/")[0]


@functools.cache
def _input_args(kind: str) -> tuple[tuple[str, str], ...]:
    """The name of each input argument, and the attribute that gives the length of a list."""
    definition = _internals.op_def_of(kind)
    if definition is None:
        return ()
    return tuple((arg.name, arg.number_attr or arg.type_list_attr) for arg in definition.input_arg)


@functools.cache
def _fixed_names(kind: str) -> tuple[str, ...] | None:
    """The names of the inputs of all operators of a type; None if that has lists of inputs."""
    arguments = _input_args(kind)
    return None if any(length for _, length in arguments) else tuple(name for name, _ in arguments)


def input_names(kind: str, count: int, attributes: Mapping[str, Any]) -> Sequence[str]:
    """The declared name of each of `count` inputs; the items of a list are ``values[0]``, ...

    Args:
        attributes: give the lengths of lists.

    Returns:
        "" for every input if the declaration does not fit `count`.
    """
    fixed = _fixed_names(kind)
    if fixed is not None and len(fixed) == count:
        # One tuple for all operators of the type.
        return fixed
    arguments = _input_args(kind)
    names: list[str] = []
    for name, length in arguments:
        if length:
            names += [f"{name}[{i}]" for i in range(_length(attributes.get(length)))]
        else:
            names.append(name)
    return names if len(names) == count else [""] * count


def _length(value: Any) -> int:
    """The length that an attribute gives: a number, or a list of types."""
    return len(value) if isinstance(value, (list, tuple)) else int(value or 0)


@functools.cache
def attribute_names(kind: str) -> tuple[str, ...]:
    """The names of the attributes that operators of this type declare."""
    definition = _internals.op_def_of(kind)
    return () if definition is None else tuple(attr.name for attr in definition.attr)


@functools.cache
def _type_attributes(kind: str) -> frozenset[str]:
    """The names of the attributes that hold a dtype, or a list of dtypes."""
    definition = _internals.op_def_of(kind)
    found = () if definition is None else definition.attr
    return frozenset(attr.name for attr in found if attr.type in ("type", "list(type)"))


def attributes_of(op: Any) -> dict[str, Any]:
    """The attributes of an operator of a graph by name, as tools see them."""
    return presented(op.type, ((name, op.get_attr(name)) for name in attribute_names(op.type)))


def presented(kind: str, attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Attributes by name as tools see them: text is str, types are tf.DType, shapes are lists."""
    types = _type_attributes(kind)
    return {name: _presented(value, name in types) for name, value in attributes}


def _presented(value: Any, is_type: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_presented(item, is_type) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if is_type and value is not None:
        return tf.as_dtype(value)
    if isinstance(value, tf.TensorShape):
        return None if value.rank is None else value.as_list()
    if type(value).__name__ == "TensorShapeProto":
        return _presented(tf.TensorShape(value), False)
    if type(value).__name__ == "NameAttrList":
        return value.name
    return value
