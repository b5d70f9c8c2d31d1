"""Errors of TensorFlow in an instrumented copy, in the words that the vanilla graph would use.

TensorFlow lists where the failing operator of a function was defined. An operator of a copy was
added by Amanda: what is listed instead is where the program has defined the vanilla one::

    Detected at node GatherV2 defined at (most recent call last):
      File "train.py", line 8, in step
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals

_BLOCK = re.compile(
    r"^(Detected at node (?P<name>\S+) defined at \(most recent call last\):\n)"
    r"(?:  File [^\n]*\n(?:    [^\n]*\n)?\n?)+",
    re.MULTILINE,
)


def reworded(error: Any, graph: Any) -> Any:
    """An error of a copy with the definitions of vanilla operators; the error itself for others.

    Args:
        graph: the copy.
    """
    if not isinstance(error, tf.errors.OpError):
        return error
    text = _BLOCK.sub(lambda found: _defined(found, graph), error.message)
    if text == error.message:
        return error
    return type(error)(error.node_def, error.op, text).with_traceback(error.__traceback__)


def _defined(found: re.Match[str], graph: Any) -> str:
    """The lines about the definition of one operator."""
    known = (_internals.known_ops(graph) or {}).get(found["name"])
    trace = None if known is None or known.source is None else known.source.traceback
    if trace is None:
        return found[0]
    frames = (f for f in trace.get_user_frames() if "<embedded" not in f.filename)
    lines = [f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames]
    return found[1] + "".join(f"{line}\n" for line in lines)
