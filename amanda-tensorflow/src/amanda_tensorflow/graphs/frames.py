"""The frames in which the loops of TensorFlow 1 run, and the order of their iterations.

A loop of TensorFlow 1 is no operator: its values enter a frame by ``Enter`` and leave it by
``Exit``, and what is computed between the two runs once in each iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from amanda_tensorflow import _internals

ENTRIES = frozenset({"Enter", "RefEnter"})
"""Types of the operators by which a value enters a frame."""

_EXITS = frozenset({"Exit", "RefExit"})
_PYTHON = frozenset({"EagerPyFunc", "While", "If", "Case"})
"""Types that may run Python: a node of a routine; loops and branches whose bodies have one, which
are none of the stateless types."""

Frame = tuple[str, ...]
"""The names of the frames in which an operator runs, from the outermost on."""

_OF_GRAPHS: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, Frame]]] = (
    weakref.WeakKeyDictionary()
)
"""By vanilla graph, its version and the frames in it: each gradient with actions asks for one."""


def is_in_loop(op: Any) -> bool:
    """True if an operator of a vanilla graph runs in a loop of TensorFlow 1."""
    graph = op.graph
    version, frames = _OF_GRAPHS.get(graph, (-1, {}))
    if version != graph.version:
        version, frames = graph.version, _frames(graph.get_operations())
        _OF_GRAPHS[graph] = version, frames
    return op.name in frames


def run_in_order(graph: Any, entries: Sequence[Any]) -> None:
    """Let the loops in which routines run as Python execute one iteration after the other.

    Args:
        graph: of the copy, whose operators are in an order in which it may run.
        entries: the operators by which values enter the frames of loops in it.
    """
    operations = graph.get_operations()
    frames = _frames(operations)
    python = (op for op in operations if op.type in _PYTHON)
    found = {name for op in python for name in frames.get(op.name, ())}
    for op in entries:
        if _name(op) in found:
            _internals.run_in_order(op)


def _frames(operations: Sequence[Any]) -> dict[str, Frame]:
    """The frames of operators that run in some, by name of the operator."""
    frames: dict[str, Frame] = {}
    for op in operations:
        before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        # The back edge of a loop comes from an operator that follows.
        frame = max((frames[o.name] for o in before if o.name in frames), key=len, default=())
        if op.type in ENTRIES:
            frame = (*frame, _name(op))
        elif op.type in _EXITS:
            frame = frame[:-1]
        if frame:
            frames[op.name] = frame
    return frames


def _name(op: Any) -> str:
    """The name of the frame that an operator of type ``Enter`` enters."""
    return str(op.get_attr("frame_name").decode())
