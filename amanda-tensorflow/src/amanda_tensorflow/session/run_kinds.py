"""The kind of a session run: a step of training, a forward pass, or the setting of state."""

from __future__ import annotations

from typing import Any, Literal

from amanda_tensorflow.graphs.topological_order import needed
from amanda_tensorflow.operators.phases import changes_variables, phase_of_node
from amanda_tensorflow.session.runs import SessionRun

RunKind = Literal["train", "forward", "setup"]

_ON_QUEUES = ("QueueEnqueue", "QueueClose")


def kind_of(run: SessionRun) -> RunKind:
    """Classify a run by the state that it changes.

    What the threads of queue runners run meanwhile prepares data: it is no pass of a model.
    """
    roots = [*(tensor.op for tensor in run.fetches), *run.targets]
    if changes_variables(needed(roots)):
        return "train"
    is_set = all(_sets(op) for op in roots)
    return "setup" if is_set else "forward"


def _sets(op: Any) -> bool:
    """True if an operator sets variables or fills a queue, or waits for operators that do."""
    if op.type == "NoOp":
        return all(map(_sets, op.control_inputs))
    return op.type.startswith(_ON_QUEUES) or phase_of_node(op, False) == "setup"
