"""Copying the values of variables between the user's session and the shadow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from amanda_tensorflow import _internals

VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
"""Types of operators that make a variable."""

_REFERENCES = frozenset({"VariableV2", "Variable"})
"""Types of operators that make a variable of TensorFlow 1's reference kind."""

_MARK = "amanda/variables"
"""Annotation around runs in TensorFlow's profiler: what reads its recordings leaves them out, as
operators of the user's graph run there without the program asking for it."""

_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})
"""Types of operators that check whether a variable has a value."""


def _run(
    session: Any,
    fetches: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[tuple[Any, Any]] = (),
    extends: bool = True,
) -> list[Any]:
    """Run operators of a session that read and write variables."""
    with tf.profiler.experimental.Trace(_MARK):
        return _internals.run_vanilla(session, fetches, targets, feeds, extends=extends)


@attrs.frozen(eq=False)
class VariableOps:
    """The operators of a user's graph by which one of its variables is read and written.

    Only operators that are there already: nothing is added to the graph.

    Attributes:
        op: the operator that makes the variable.
        read: the tensor of its value, or None.
        assign: its initializer, or None; a value is written by feeding the second input.
        is_initialized: the tensor that tells whether it has a value, or None.
    """

    op: Any
    read: Any
    assign: Any
    is_initialized: Any

    @classmethod
    def of(cls, op: Any) -> VariableOps:
        """The operators for the variable that `op` makes."""
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
                # A read that waits for other operators, such as a training step, would run them.
                read = consumer.outputs[0]
        if is_reference and read is None:
            read = op.outputs[0]
        return cls(op, read, assign, check)


class VanillaVariables:
    """The variables of a user's session, read and written by operators of the user's graph."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._known: dict[str, VariableOps] = {}

    def ops(self, name: str) -> VariableOps:
        """The operators for the variable that the operator of this name makes."""
        found = self._known.get(name)
        if found is None or found.assign is None or found.read is None:
            op = self._session.graph.get_operation_by_name(name)
            found = self._known[name] = VariableOps.of(op)
        return found

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of the variables that have one and can be read, by name."""
        found = {name: self.ops(name) for name in names}
        readable = {name: v for name, v in found.items() if v.read is not None}
        asked = {name: v for name, v in readable.items() if v.is_initialized is not None}
        answers = _run(self._session, [variable.is_initialized for variable in asked.values()])
        empty = {name for name, answer in zip(asked, answers, strict=True) if not answer}
        sure = [name for name in asked if name not in empty]
        values = _run(self._session, [readable[name].read for name in sure])
        result = dict(zip(sure, values, strict=True))
        for name in readable.keys() - asked.keys():
            # Whether it has a value can be found out only by reading it, one at a time.
            try:
                (result[name],) = _run(self._session, [readable[name].read])
            except tf.errors.FailedPreconditionError:
                continue
        return result

    def write(self, values: dict[str, np.ndarray]) -> None:
        """Set variables; those without an initializer are left out."""
        pairs = [(self.ops(name).assign, value) for name, value in values.items()]
        known = [(assign, value) for assign, value in pairs if assign is not None]
        _run(
            self._session,
            (),
            [assign for assign, _ in known],
            [(assign.inputs[1], value) for assign, value in known],
        )


@attrs.frozen(eq=False)
class _Access:
    """The operators that are added to a shadow for one variable.

    Attributes:
        is_initialized: the tensor that tells whether it has a value.
        value: the tensor of its value.
        fed: the placeholder of the value to write.
        assign: the operator that writes it.
    """

    is_initialized: Any
    value: Any
    fed: Any
    assign: Any

    @classmethod
    def of(cls, op: Any) -> _Access:
        """Add the operators for the variable that `op` makes to the current graph."""
        handle, dtype = op.outputs[0], op.get_attr("dtype")
        fed = tf.compat.v1.placeholder(dtype, None, name="amanda/state")
        if op.type in _REFERENCES:
            assign = tf.raw_ops.Assign(ref=handle, value=fed, validate_shape=False)
            check = tf.raw_ops.IsVariableInitialized(ref=handle)
            return cls(check, tf.raw_ops.Identity(input=handle), fed, assign.op)
        return cls(
            tf.raw_ops.VarIsInitializedOp(resource=handle),
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype),
            fed,
            tf.raw_ops.AssignVariableOp(resource=handle, value=fed),
        )


class ShadowVariables:
    """The variables of a shadow, read and written by operators that are added to it.

    Reading and writing leave the runtime without the operators that the shadow's graph has got
    since: a copy that is being made may read a variable.

    Args:
        session: the shadow's session.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._accesses: dict[str, _Access] = {}

    def add(self, names: Iterable[str]) -> None:
        """Add the operators for some variables to the shadow."""
        graph = self._session.graph
        with (
            graph.as_default(),
            graph.control_dependencies(None),
            tf.name_scope("amanda/state"),
        ):
            for name in names:
                if name not in self._accesses:
                    self._accesses[name] = _Access.of(graph.get_operation_by_name(name))

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of the variables that have one, by name; they were added."""
        found = {name: self._accesses[name] for name in names}
        checks = [access.is_initialized for access in found.values()]
        answers = _run(self._session, checks, extends=False)
        full = [name for name, answer in zip(found, answers, strict=True) if answer]
        values = _run(self._session, [found[name].value for name in full], extends=False)
        return dict(zip(full, values, strict=True))

    def write(self, values: dict[str, np.ndarray]) -> None:
        """Set variables, which were added."""
        found = {name: self._accesses[name] for name in values}
        _run(
            self._session,
            (),
            [access.assign for access in found.values()],
            [(access.fed, values[name]) for name, access in found.items()],
            extends=False,
        )


def variables_in(ops: Sequence[Any]) -> list[str]:
    """The names of the operators among `ops` that make variables."""
    return [op.name for op in ops if op.type in VARIABLES]
