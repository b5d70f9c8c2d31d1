"""The kind of a session run: a step of training, a forward pass, or the setting of variables."""

from __future__ import annotations

from typing import Any, Literal

from amanda_tensorflow.graphs.topological_order import needed
from amanda_tensorflow.operators.phases import changes_variables, phase_of_node
from amanda_tensorflow.session.runs import SessionRun

RunKind = Literal["train", "forward", "setup"]


def kind_of(run: SessionRun) -> RunKind:
    """Classify a run by the variables that it changes."""
    roots = [*(tensor.op for tensor in run.fetches), *run.targets]
    if changes_variables(needed(roots)):
        return "train"
    is_set = all(_sets(op) for op in roots)
    return "setup" if is_set else "forward"


def _sets(op: Any) -> bool:
    """True if an operator sets variables, or waits for operators that do."""
    if op.type == "NoOp":
        return all(map(_sets, op.control_inputs))
    return phase_of_node(op, False) == "setup"
