"""What a run of a session is: a step of training, a forward pass, or the setting of variables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

from amanda_tensorflow.operators.phases import changes_variables, phase_of_node
from amanda_tensorflow.session.runs import Key, SessionRun, key_of

RunKind = Literal["train", "forward", "setup"]


class RunKinds:
    """Remembers what the runs of sessions are."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[Key, RunKind]]
        self._known = weakref.WeakKeyDictionary()

    def of(self, session: Any, handles: tuple[Any, Any, Any]) -> RunKind:
        """What a run is.

        Args:
            handles: the runtime's handles of feeds (with their values), fetches and targets.
        """
        known, key = self._known.setdefault(session, {}), key_of(*handles)
        kind = known.get(key)
        if kind is None:
            run = SessionRun.of(session.graph, *handles)
            roots = [tensor.op for tensor in run.fetches] + list(run.targets)
            kind = known[key] = _kind(roots)
        return kind


def _kind(roots: Sequence[Any]) -> RunKind:
    found: dict[Any, None] = dict.fromkeys(roots)
    waiting = list(found)
    while waiting:
        op = waiting.pop()
        for needed in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if needed not in found:
                found[needed] = None
                waiting.append(needed)
    if changes_variables(found):
        return "train"
    is_set = all(_sets(op) for op in roots)
    return "setup" if is_set else "forward"


def _sets(op: Any) -> bool:
    """Whether an operator sets variables, or waits for operators that do."""
    if op.type == "NoOp":
        return all(map(_sets, op.control_inputs))
    return phase_of_node(op, False) == "setup"
