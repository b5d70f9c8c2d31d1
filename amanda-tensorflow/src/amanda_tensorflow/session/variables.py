"""The variables of a graph: where to read and to write them, and copying their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from amanda_tensorflow import _internals

VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_REFERENCES = frozenset({"VariableV2", "Variable"})
_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})


@attrs.frozen(eq=False)
class VariableOps:
    """The operators of a user's graph by which one of its variables is read and written.

    Nothing is added to the graph.

    Attributes:
        op: what makes the variable.
        read: the tensor that has its value, None if there is none.
        assign: its initializer; its second input is fed to write a value.
        is_initialized: the tensor that says whether it has a value, or None.
    """

    op: Any
    read: Any
    assign: Any
    is_initialized: Any

    @classmethod
    def of(cls, op: Any) -> VariableOps:
        """Those of the variable that `op` makes."""
        read = assign = check = None
        is_reference = op.type in _REFERENCES
        reads = "Identity" if is_reference else "ReadVariableOp"
        for consumer in op.outputs[0].consumers():
            kind = consumer.type
            if kind in _CHECKS and check is None:
                check = consumer.outputs[0]
            elif kind == ("Assign" if is_reference else "AssignVariableOp") and assign is None:
                assign = consumer
            elif kind == reads and (read is None or read.op.control_inputs):
                # One that waits for others, such as for a step of an optimizer, would run them.
                read = consumer.outputs[0]
        if is_reference and read is None:
            read = op.outputs[0]
        return cls(op, read, assign, check)


class VanillaVariables:
    """The variables of a user's session, reached by operators that its graph has anyway."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._known: dict[str, VariableOps] = {}

    def ops(self, name: str) -> VariableOps:
        """The operators of the variable that the operator of this name makes."""
        found = self._known.get(name)
        if found is None or found.assign is None or found.read is None:
            op = self._session.graph.get_operation_by_name(name)
            found = self._known[name] = VariableOps.of(op)
        return found

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of those that have one and can be read."""
        found = {name: self.ops(name) for name in names}
        readable = {name: v for name, v in found.items() if v.read is not None}
        asked = {name: v for name, v in readable.items() if v.is_initialized is not None}
        answers = _internals.run_vanilla(
            self._session, [variable.is_initialized for variable in asked.values()]
        )
        empty = {name for name, answer in zip(asked, answers, strict=True) if not answer}
        sure = [name for name in asked if name not in empty]
        values = _internals.run_vanilla(self._session, [readable[name].read for name in sure])
        result = dict(zip(sure, values, strict=True))
        for name in readable.keys() - asked.keys():
            try:
                (result[name],) = _internals.run_vanilla(self._session, [readable[name].read])
            except tf.errors.FailedPreconditionError:
                continue
        return result

    def write(self, values: dict[str, np.ndarray]) -> None:
        """Give variables their values."""
        pairs = [(self.ops(name).assign, value) for name, value in values.items()]
        known = [(assign, value) for assign, value in pairs if assign is not None]
        _internals.run_vanilla(
            self._session,
            (),
            [assign for assign, _ in known],
            [(assign.inputs[1], value) for assign, value in known],
        )


class ShadowVariables:
    """The variables of a copy, reached by operators that are added to it.

    Args:
        session: the copy's own session.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._slots: dict[str, tuple[Any, Any, Any, Any]] = {}

    def _slot(self, name: str) -> tuple[Any, Any, Any, Any]:
        """Of one variable: whether it has a value, the value, a placeholder, what writes that."""
        if name not in self._slots:
            graph = self._session.graph
            op = graph.get_operation_by_name(name)
            with (
                graph.as_default(),
                graph.control_dependencies(None),
                tf.name_scope("amanda/state"),
            ):
                self._slots[name] = _slot(op)
        return self._slots[name]

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of those that have one."""
        names = list(names)
        answers = _internals.run_vanilla(self._session, [self._slot(name)[0] for name in names])
        full = [name for name, answer in zip(names, answers, strict=True) if answer]
        values = _internals.run_vanilla(self._session, [self._slot(name)[1] for name in full])
        return dict(zip(full, values, strict=True))

    def write(self, values: dict[str, np.ndarray]) -> None:
        """Give variables their values."""
        slots = {name: self._slot(name) for name in values}
        _internals.run_vanilla(
            self._session,
            (),
            [slot[3] for slot in slots.values()],
            [(slot[2], values[name]) for name, slot in slots.items()],
        )


def _slot(op: Any) -> tuple[Any, Any, Any, Any]:
    handle, dtype = op.outputs[0], op.get_attr("dtype")
    value = tf.compat.v1.placeholder(dtype, None, name="amanda/state")
    if op.type in _REFERENCES:
        assign = tf.raw_ops.Assign(ref=handle, value=value, validate_shape=False)
        return (
            tf.raw_ops.IsVariableInitialized(ref=handle),
            tf.raw_ops.Identity(input=handle),
            value,
            assign.op,
        )
    return (
        tf.raw_ops.VarIsInitializedOp(resource=handle),
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype),
        value,
        tf.raw_ops.AssignVariableOp(resource=handle, value=value),
    )


def variables_in(ops: Sequence[Any]) -> list[str]:
    """The names of those of some operators that make variables."""
    return [op.name for op in ops if op.type in VARIABLES]
