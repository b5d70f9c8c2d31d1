"""Recovers the forward operators of gradients that were built before Amanda was imported.

They are found by what the graph shows: the operator that ``tf.gradients`` notes in
``_original_op``, the names that TensorFlow gives, and the tensors that a backward and a forward
operator have in common. An ambiguous forward operator is listed, never guessed.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import ForwardOp, GradientCall, GradientLog, is_older

_TAPE = "gradient_tape/"
"""Name scope of the operators that a tape adds to a graph; the forward name scope follows."""
_SYMBOLIC = re.compile(r"(?:.*/)?gradients(?:_\d+)?/(.+)_grad/[^/]+(?:/.*)?$")
_SEED = re.compile(
    r"(?:.*/)?gradients(?:_\d+)?/(?:grad_ys_\d+|Shape|Const|Fill|AddN)[^/]*(?:/.*)?$"
)
"""Names of the operators of ``tf.gradients`` itself: its first gradients, and sums."""
_SYMBOLIC_ROOT = re.compile(r"(?:.*/)?gradients(?:_\d+)?/")
"""Names of all operators that ``tf.gradients`` adds."""

_PLUMBING = frozenset(
    """EmptyTensorList OptionalFromValue OptionalNone TensorListPushBack TensorListReserve
    TensorListSetItem""".split()
)
"""Types of operators by which a loop or branch keeps tensors for its gradient."""

_RECOVERED: weakref.WeakKeyDictionary[Any, tuple[int, GradientLog]] = weakref.WeakKeyDictionary()
"""Recovered logs, with the number of operators that the graph had."""


def completed(graph: Any, log: GradientLog, operations: Mapping[str, Any]) -> GradientLog:
    """A graph's log, completed by the backward operators whose gradient calls were not noted.

    Graphs that are older than the noting have such operators, and graphs that were loaded from a
    file.

    Args:
        log: the gradient calls that were noted.
        operations: the operators of the graph by name.
    """
    older = is_older(graph)
    unknown = [
        name
        for name in operations
        if name not in log.owners
        and (name.startswith(_TAPE) or (older and _SYMBOLIC_ROOT.match(name)))
        and not _SEED.match(name)
        and "/pfor/" not in name
        and operations[name].type not in _PLUMBING
    ]
    if not unknown or (log.calls and not _is_older(log, unknown)):
        return log
    known = _RECOVERED.get(graph)
    if known is None or known[0] != len(operations):
        known = len(operations), _Recovery(graph, log, operations).run(unknown)
        _RECOVERED[graph] = known
    return known[1]


def is_plumbing(op: Any) -> bool:
    """True if an operator of a forward graph only keeps something for a gradient."""
    if op.type not in _PLUMBING:
        return False
    return op.name.startswith(_TAPE) or _SYMBOLIC_ROOT.match(op.name) is not None


def _is_older(log: GradientLog, unknown: list[str]) -> bool:
    """True if there are gradients that were built before the first noted one."""
    return any(name.startswith(_TAPE) or _SYMBOLIC.match(name) for name in unknown) and not any(
        call.ops for call in log.calls
    )


class _Recovery:
    """Finds the owners of the gradient operators of one graph."""

    def __init__(self, graph: Any, log: GradientLog, operations: Mapping[str, Any]) -> None:
        self._graph = graph
        self._log = log
        self._operations = operations
        self._outer = _forward_graph(graph)

    def run(self, unknown: list[str]) -> GradientLog:
        """The log with the owners of the operators `unknown`, and the ambiguous ones among them."""
        owners = {name: self._owner(self._operations[name]) for name in unknown}
        for name, op in self._operations.items():
            if op.type == "AddN" and all(t.op.name in owners for t in op.inputs):
                owners[name] = self._of_sum(op, owners)
        found = GradientLog(list(self._log.calls), dict(self._log.owners), is_recovered=True)
        calls: dict[tuple[int, str], list[str]] = {}
        for name, owner in owners.items():
            if owner is None:
                found.ambiguous.add(name)
            else:
                calls.setdefault((id(owner.graph), owner.name), []).append(name)
        forward = {(id(o.graph), o.name): o for o in owners.values() if o is not None}
        for key, names in calls.items():
            found.add(GradientCall(ForwardOp.of(forward[key]), (), (), tuple(names)))
        return found

    def _owner(self, op: Any) -> Any:
        """The forward operator of a gradient operator; None if it is ambiguous."""
        original = _internals.original_op(op)
        if original is not None:
            return original
        symbolic = _SYMBOLIC.match(op.name)
        if symbolic and not op.name.startswith(_TAPE):
            return self._named(symbolic[1])
        scope = op.name.removeprefix(_TAPE).rpartition("/")[0]
        named = self._operations.get(scope)
        if named is not None and not scope.startswith(_TAPE):
            return named
        return self._by_tensors(op, scope)

    def _named(self, name: str) -> Any:
        """The forward operator of this name, in this graph or the forward graph; else None."""
        if name in self._operations:
            return self._operations[name]
        if self._outer is None:
            return None
        try:
            return self._outer.get_operation_by_name(name)
        except KeyError:
            return None

    def _by_tensors(self, op: Any, scope: str) -> Any:
        """The operator of a name scope that has most tensors in common with `op`.

        Of several, the one whose type is part of the type of `op` (``Relu``, ``ReluGrad``); None
        if that does not decide.
        """
        shared: dict[str, int] = {}
        for tensor in op.inputs:
            near = [tensor.op, *tensor.consumers()]
            for name in {o.name for o in near if _is_candidate(o.name, scope)}:
                shared[name] = shared.get(name, 0) + 1
        most = [name for name, count in shared.items() if count == max(shared.values())]
        fitting = [name for name in most if self._operations[name].type in op.type] or most
        return self._operations[fitting[0]] if len(fitting) == 1 else None

    def _of_sum(self, op: Any, owners: Mapping[str, Any]) -> Any:
        """The forward operator of a sum of output gradients; None if several gradients read it."""
        readers = {c.name: owners[c.name] for c in op.outputs[0].consumers() if c.name in owners}
        found = {id(owner): owner for owner in readers.values()}
        return next(iter(found.values())) if len(found) == 1 else None


def _is_candidate(name: str, scope: str) -> bool:
    """True if a name is that of a forward operator directly in a name scope."""
    if name.startswith(_TAPE) or _SYMBOLIC_ROOT.match(name):
        return False
    return name == scope or name.rpartition("/")[0] == scope


def _forward_graph(graph: Any) -> Any:
    """The graph whose tensors a function of gradients captures; None if there is none."""
    for tensor in getattr(graph, "external_captures", ()):
        if not isinstance(tensor, _internals.EagerTensor) and tensor.graph is not graph:
            return tensor.graph
    return None
