"""The action cache: the records of one scope's analyses, by operator.

An :class:`OpRecord` has the context of an operator, the actions that analyses recorded on it, and
which analyses have run; :class:`ActionCache` has the records of a scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from amanda.interface.action import Action, ActionKind, Filter, InstPoint, Owner
from amanda.interface.backward_context import BackwardOpContext
from amanda.interface.calls import OpCall
from amanda.interface.context import OpContext, OpState

Actions = Mapping[ActionKind, tuple[Action, ...]]
"""Actions by kind, in running order."""


@attrs.define(eq=False, repr=False)
class OpRecord:
    """The record of one forward or backward operator in one scope.

    Attributes:
        context: the context that its analyses get.
        state: the engine's side of the context, with the recorded actions.
        analysed: points whose analyses have run.
        redo: tools whose analyses have to run again, by point.
        children: records of the operator's backward operators, by id.
    """

    context: OpContext
    state: OpState
    analysed: frozenset[InstPoint] = frozenset()
    redo: dict[InstPoint, set[Owner]] = attrs.field(factory=dict)
    children: dict[str, OpRecord] = attrs.field(factory=dict)
    _is_selected: bool | None = None

    @classmethod
    def of_call(cls, call: OpCall, namespace: str, runs_at_once: bool = True) -> OpRecord:
        """A new record of the forward operator that `call` executes."""
        state = OpState.of_call(call)
        return cls(OpContext(state, namespace, runs_at_once), state)

    def child(self, op: Any, op_id: str, *, fresh: bool) -> OpRecord:
        """The record of a backward operator; `fresh` discards an earlier one."""
        record = self.children.get(op_id)
        if record is None or fresh:
            state = self.state.of_backward(op, op_id)
            record = OpRecord(BackwardOpContext(self.context, state), state)
            self.children[op_id] = record
        return record

    @property
    def has_actions(self) -> bool:
        """True if any action is recorded for this very operator."""
        return any(self.state.actions.values())

    def is_selected(self, op_filter: Filter | None) -> bool:
        """True if the scope's filter lets its tools see the operator."""
        if self._is_selected is None:
            self._is_selected = op_filter is None or op_filter.selects(self.context)
        return self._is_selected

    def restrict(self, op_filter: Filter) -> None:
        """Restrict the recorded actions to the executions that the scope's filter selects."""
        for kind, actions in self.state.actions.items():
            self.state.actions[kind] = tuple([op_filter.restrict(action) for action in actions])

    def drop(self, tool: Owner) -> None:
        """Drop the actions of `tool`; its analyses run again at the next execution."""
        for kind, actions in self.state.actions.items():
            self.state.actions[kind] = tuple([a for a in actions if a.tool is not tool])
        if self.state.tensors is not None:
            self.state.tensors.is_old = True
        for point in self.analysed:
            self.redo.setdefault(point, set()).add(tool)

    def drop_all(self, tool: Owner) -> None:
        """Drop the actions of `tool` on the operator and on its backward operators, see
        :meth:`drop`."""
        self.drop(tool)
        for child in tuple(self.children.values()):
            child.drop(tool)

    def sort(self, tools: Sequence[Owner]) -> None:
        """Sort the actions into the order of `tools`."""
        for kind, actions in self.state.actions.items():
            if len(actions) > 1:
                self.state.actions[kind] = in_order(actions, tools)

    def actions_with(self, begun: Actions, tools: Sequence[Owner]) -> Actions:
        """The actions, with those of `begun` that were dropped since, in the order of `tools`."""
        found = dict(self.state.actions)
        for kind, earlier in begun.items():
            now = found.get(kind, ())
            if earlier != now and (dropped := [a for a in earlier if a not in now]):
                found[kind] = in_order((*dropped, *now), tools)
        return found

    def note_analysed(self, point: InstPoint) -> None:
        """Note that the analyses of a point have run."""
        points = self.analysed | {point}
        # Equal sets are one object for all records.
        self.analysed = _POINTS.setdefault(points, points)

    @property
    def complete(self) -> bool:
        """True if all analyses of the forward operator have run.

        It is False after a first execution in which the operator itself has failed.
        """
        return not self.redo and InstPoint.AFTER_FORWARD_OP in self.analysed

    def pending(self, point: InstPoint) -> bool:
        """True if an analysis of `point` has yet to run."""
        return point not in self.analysed or bool(self.redo.get(point))

    def actions(self, kind: ActionKind) -> tuple[Action, ...]:
        """The recorded actions of one kind, in order."""
        return self.state.actions.get(kind, ())


def in_order(actions: Sequence[Action], tools: Sequence[Owner]) -> tuple[Action, ...]:
    """The actions in the order of `tools`."""
    rank = {id(tool): position for position, tool in enumerate(tools)}
    return tuple(sorted(actions, key=lambda action: rank[id(action.tool)]))


_POINTS: dict[frozenset[InstPoint], frozenset[InstPoint]] = {}


class ActionCache:
    """The records of one scope, by :attr:`OpCall.key <amanda.interface.calls.OpCall.key>`."""

    def __init__(self) -> None:
        self._records: dict[str, OpRecord] = {}
        # Keys that differ from the operator id, by id: a model has the same ids in several graphs.
        self._other_keys: dict[str, dict[str, None]] = {}
        self._forgotten = [0, 0, 0]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(tuple(self._records.values()))

    def get(self, key: str) -> OpRecord | None:
        """The record of a forward operator, None if it was never analysed."""
        return self._records.get(key)

    def put(self, key: str, record: OpRecord) -> None:
        """Store the record of a forward operator."""
        self._records[key] = record
        if record.state.op_id != key:
            self._other_keys.setdefault(record.state.op_id, {})[key] = None

    def discard(self, key: str, record: OpRecord) -> None:
        """Remove a record whose analysis failed, so that it runs again."""
        if self._records.get(key) is record:
            self._remove(key)

    def _remove(self, key: str) -> OpRecord | None:
        record = self._records.pop(key, None)
        if record is not None and (keys := self._other_keys.get(record.state.op_id)) is not None:
            keys.pop(key, None)
            if not keys:
                self._other_keys.pop(record.state.op_id, None)
        return record

    def drop(self, tool: Owner, op_id: str | None) -> None:
        """Drop the actions of `tool`, of one operator or of all."""
        if op_id is None:
            for record in self:
                record.drop_all(tool)
            return
        found = self._of_op(op_id)
        for record in found:
            record.drop_all(tool)
        # A tool may call this for each operator of a program.
        for record in () if found else self._with_child(op_id):
            record.children[op_id].drop(tool)

    def _of_op(self, op_id: str) -> list[OpRecord]:
        """The records of a forward operator."""
        keys = (op_id, *tuple(self._other_keys.get(op_id, ())))
        records = [record for key in keys if (record := self._records.get(key)) is not None]
        return [record for record in records if record.state.op_id == op_id]

    def _with_child(self, backward_id: str) -> list[OpRecord]:
        """The records of the forward operators that have a backward operator."""
        # Nearly all drivers form ids of backward operators as <forward id>/grad/<name>.
        likely = self._of_op(backward_id.rpartition("/grad/")[0])
        found = [record for record in likely if backward_id in record.children]
        return found or [record for record in self if backward_id in record.children]

    def forget(self, model: str) -> None:
        """Drop the records of a model whose operators cannot run again, forward or backward.

        Args:
            model: beginning of the keys of its records, before a dot, a slash or a ``#``.
        """
        ends = tuple(f"{model}{end}" for end in "./#")
        keys = [key for key in tuple(self._records) if key.startswith(ends)]
        removed = [record for key in keys if (record := self._remove(key)) is not None]
        for index, count in enumerate(_counts(removed)):
            self._forgotten[index] += count

    def counts(self) -> tuple[int, int, int]:
        """The numbers of seen forward operators, of seen backward operators, and of operators with
        actions, including deleted models."""
        ops, backward_ops, instrumented = self._forgotten
        now = _counts(tuple(self._records.values()))
        return ops + now[0], backward_ops + now[1], instrumented + now[2]

    def clear(self) -> None:
        """Drop all records, when the scope ends."""
        self._records.clear()
        self._other_keys.clear()
        self._forgotten = [0, 0, 0]


def _counts(records: Sequence[OpRecord]) -> tuple[int, int, int]:
    children = [child for record in records for child in tuple(record.children.values())]
    return len(records), len(children), sum(r.has_actions for r in (*records, *children))


class DryRun(Protocol):
    """A backward pass of the driver itself, invisible to the program.

    Analyses of backward operators run in it, routines do not: the dispatcher is paused.
    """

    def note(
        self, backward: OpRecord, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any] | None
    ) -> None:
        """Note the execution of a backward operator.

        Args:
            backward: its record in one scope.
            grad_outputs: the gradients that it consumes.
            grad_inputs: the gradients that it has produced; None before it runs.
        """
