"""Copying the values of variables between the user's session and the shadow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.operators.variables import VARIABLES

_REFERENCES = frozenset({"VariableV2", "Variable"})
"""Types of operators that make a variable of TensorFlow 1's reference kind."""

_MARK = "amanda/variables"
"""Annotation around runs in TensorFlow's profiler: what reads its recordings leaves them out, as
operators of the user's graph run there without the program asking for it."""

_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})
"""Types of operators that check whether a variable has a value."""


@attrs.frozen(eq=False)
class VariableOps:
    """The operators of a graph by which one of its variables is read and written.

    Attributes:
        read: the tensor of its value, or None.
        assign: the operator that writes it, or None.
        fed: the tensor that is fed with the value to write, or None.
        is_initialized: the tensor that tells whether it has a value, or None.
    """

    read: Any
    assign: Any
    fed: Any
    is_initialized: Any

    @classmethod
    def found(cls, op: Any) -> VariableOps:
        """Those that a user's graph has for the variable that `op` makes: nothing is added."""
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
        return cls(read, assign, None if assign is None else assign.inputs[1], check)

    @classmethod
    def added(cls, op: Any) -> VariableOps:
        """Add those for the variable that `op` makes to its graph, a shadow's."""
        handle, dtype = op.outputs[0], op.get_attr("dtype")
        with (
            op.graph.as_default(),
            op.graph.control_dependencies(None),
            tf.name_scope("amanda/state"),
        ):
            fed = tf.compat.v1.placeholder(dtype, None)
            if op.type in _REFERENCES:
                assign = tf.raw_ops.Assign(ref=handle, value=fed, validate_shape=False)
                check = tf.raw_ops.IsVariableInitialized(ref=handle)
                return cls(tf.raw_ops.Identity(input=handle), assign.op, fed, check)
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            assign = tf.raw_ops.AssignVariableOp(resource=handle, value=fed)
            return cls(read, assign, fed, tf.raw_ops.VarIsInitializedOp(resource=handle))


@attrs.define(eq=False)
class Variables:
    """The variables of a session, read and written by operators of its graph.

    Args:
        session: the user's session, or a shadow.
        make: gives the operators for the variable that an operator makes.
        extends: whether reading and writing give the runtime what the graph has got since the last
            run. A copy that is being made may read a variable.
    """

    _session: Any
    _make: Callable[[Any], VariableOps]
    _extends: bool = True
    _known: dict[str, VariableOps] = attrs.field(factory=dict, init=False)

    def ops(self, name: str) -> VariableOps:
        """The operators for the variable that the operator of this name makes."""
        found = self._known.get(name)
        if found is None or found.assign is None or found.read is None:
            op = self._session.graph.get_operation_by_name(name)
            found = self._known[name] = self._make(op)
        return found

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of the variables that have one and can be read, by name."""
        found = {name: self.ops(name) for name in names}
        readable = {name: v for name, v in found.items() if v.read is not None}
        asked = {name: v for name, v in readable.items() if v.is_initialized is not None}
        answers = self._run([variable.is_initialized for variable in asked.values()])
        full = [name for name, answer in zip(asked, answers, strict=True) if answer]
        values = self._run([readable[name].read for name in full])
        result = dict(zip(full, values, strict=True))
        for name in readable.keys() - asked.keys():
            # Whether it has a value can be found out only by reading it, one at a time.
            try:
                (result[name],) = self._run([readable[name].read])
            except tf.errors.FailedPreconditionError:
                continue
        return result

    def write(self, values: dict[str, np.ndarray]) -> None:
        """Set variables; those without an initializer are left out."""
        pairs = [(self.ops(name), value) for name, value in values.items()]
        known = [(variable, value) for variable, value in pairs if variable.assign is not None]
        targets = [variable.assign for variable, _ in known]
        self._run((), targets, [(variable.fed, value) for variable, value in known])

    def _run(
        self, fetches: Sequence[Any], targets: Sequence[Any] = (), feeds: Sequence[Any] = ()
    ) -> list[Any]:
        with tf.profiler.experimental.Trace(_MARK):
            # Locks are held here for which the session's threads may be waiting.
            return _internals.run_in_this_thread(
                self._session, fetches, targets, feeds, self._extends
            )


def variables_in(ops: Sequence[Any]) -> list[str]:
    """The names of the operators among `ops` that make variables."""
    return [op.name for op in ops if op.type in VARIABLES]
