"""The phase of a forward operator, by the code that has called it or added it to its graph."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from amanda.interface.specs import Phase
from amanda_tensorflow.operators.variables import VARIABLES

_BY_FILE: Mapping[str, Phase] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
"""Parts of the names of files, whose code runs operators of one phase; the first one counts."""

_UPDATES = re.compile(r"(Resource)?(Sparse)?Apply[A-Z]|Assign(Sub|Add)(VariableOp)?$")
"""Types of operators that change variables; outside of layers, those of optimizers do."""

_INITIALISING = re.compile(r"(^|/)(Initializer|initial_value|IsInitialized|IsVariableInitialized)")
"""Names of operators that TensorFlow 1 initialises variables with."""

_INITIALISER = "initialize_variables"
"""The function in which ``tf.function`` initialises the variables that a function has created
(TensorFlow 2.16 to 2.21)."""

_ASKING = "_evaluate_var_is_initialized"
"""The function in which it asks at once which of them have a value by now (2.16 to 2.21)."""

_OF_VARIABLES = VARIABLES | {"VarIsInitializedOp"}
_DRAWING = re.compile(r"(Stateless)?Random|StatelessTruncatedNormal|TruncatedNormal$|Multinomial$")

_DEEPEST = 60
"""Calling functions that are looked at."""

_BUILDING = object()


def phase_of_eager(kind: str, in_layer: bool, in_module: bool = False) -> Phase:
    """The phase of an operator that is about to run at once.

    Args:
        kind: its type.
        in_layer: whether a Keras layer runs it.
        in_module: whether a module of ``tf.Module`` does, which may train a model as well.
    """
    found = phase_of_code({}, in_layer)
    if found is not None:
        return found
    return "forward" if in_layer else _of_type(kind, in_module)


def phase_of_code(known: dict[Any, Any], in_layer: bool) -> Phase | None:
    """The phase that follows from the calling functions, the innermost one that determines it.

    Args:
        known: what is known of functions, to be remembered: it is asked at operators.
        in_layer: whether a Keras layer runs.
    """
    frame: FrameType | None = inspect.currentframe()
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        told = known.get(code, "")
        if told == "":
            told = known[code] = _told_by(code)
        if told is _BUILDING:
            if _builds(frame):
                return "setup"
        elif told is not None:
            # Keras builds a layer in the layer's first call.
            return told if told == "setup" or not in_layer else "forward"
        frame = frame.f_back
    return None


def _told_by(code: CodeType) -> Any:
    """The phase of what a function calls; :data:`_BUILDING` if that depends on its arguments."""
    found = _of_file(code.co_filename)
    if found is None and code.co_name in ("__init__", "build"):
        return _BUILDING
    return "setup" if code.co_name == _ASKING else found


def phase_of_node(op: Any, in_layer: bool, in_module: bool = False) -> Phase:
    """The phase of an operator of a graph.

    Args:
        op: the operator.
        in_layer: whether a Keras layer has made it.
        in_module: whether a module of ``tf.Module`` has, which may train a model as well.
    """
    name, kind = op.name, op.type
    if _INITIALISING.search(name) or kind in _OF_VARIABLES or name.endswith("/Assign"):
        return "setup"
    if getattr(op.graph, "name", "") == _INITIALISER:
        return "setup"
    if in_layer:
        return "forward"
    if _UPDATES.match(kind):
        return "optimizer"
    for file in _files(op.traceback):
        found = _of_file(file)
        if found is not None:
            return found
    return _of_type(kind, in_module)


def _files(traceback: Any) -> Iterator[str]:
    """The files of the frames that have added an operator, innermost first."""
    frames = traceback or ()
    for position in range(len(frames) - 1, max(-1, len(frames) - 1 - _DEEPEST), -1):
        yield frames[position].filename


def changes_variables(ops: Iterable[Any]) -> bool:
    """True if one of the operators changes a parameter as an optimizer does; not a counter."""
    return any(
        _UPDATES.match(op.type) and _is_real(op) and phase_of_node(op, False) == "optimizer"
        for op in ops
    )


def _is_real(op: Any) -> bool:
    """True if an operator that changes a variable changes one of real or complex numbers."""
    attributes = op.op_def.attr
    name = next((a.name for a in attributes if a.name in ("T", "dtype")), None)
    kind = None if name is None else op.get_attr(name)
    return kind is None or kind.is_floating or kind.is_complex


def _of_type(kind: str, in_module: bool) -> Phase:
    if _UPDATES.match(kind):
        return "optimizer"
    return "other" if _DRAWING.match(kind) and not in_module else "forward"


def _of_file(file: str) -> Phase | None:
    for part, phase in _BY_FILE.items():
        if part in file:
            return phase
    return None


def _builds(frame: FrameType) -> bool:
    """True if a constructor or ``build`` is that of a module or layer."""
    names = frame.f_code.co_varnames
    first = frame.f_locals.get(names[0]) if names else None
    return isinstance(first, tf.Module) or any(
        cls.__module__.startswith(("keras.", "tf_keras.")) for cls in type(first).__mro__
    )
