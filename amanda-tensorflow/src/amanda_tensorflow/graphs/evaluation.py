"""Runs the function of a graph operator by operator, in the thread that asks for it.

The runtime runs a function in the threads of its pool, of which there are as many as processors. A
routine runs in one of them, and others may wait for it to end before they can run theirs. If it
calls a function, no thread is left that could run that function::

    outputs = evaluate(function.graph, inputs)

TensorFlow's own nodes that call Python (``tf.py_function``) wait for ever then: in a pool of one
thread, or where two threads of the program run such functions on two processors (2.21).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.topological_order import needed
from amanda_tensorflow.operators.types import CALLS, ROUTING

_LOOPS = frozenset({"While", "StatelessWhile"})
_BRANCHES = frozenset({"If", "StatelessIf"})
_CASES = frozenset({"Case", "StatelessCase"})
_SKIPPED = frozenset({"NoOp", "ControlTrigger"})

_Run = Callable[[Sequence[Any]], Sequence[Any]]
"""A function of the inputs of an operator, or of a function, that computes the outputs."""


class _NoEvaluation(Exception):
    """A graph holds an operator that does not run by itself."""


@attrs.frozen
class _Step:
    """One operator of a graph that is evaluated.

    Attributes:
        inputs: the numbers of the tensors that it reads.
        outputs: the numbers of those that it makes.
    """

    run: _Run
    inputs: Sequence[int]
    outputs: Sequence[int]


@attrs.frozen
class _Program:
    """The operators of a graph in an order in which they can run; it keeps no graph alive.

    Attributes:
        inputs: the numbers of the tensors that the function is given.
        outputs: the numbers of those that it returns.
    """

    inputs: Sequence[int]
    steps: Sequence[_Step]
    outputs: Sequence[int]

    def run(self, given: Sequence[Any]) -> list[Any]:
        values = dict(zip(self.inputs, given, strict=True))
        for step in self.steps:
            outputs = step.run([values[number] for number in step.inputs])
            values.update(zip(step.outputs, outputs, strict=True))
        return [values[number] for number in self.outputs]


_PROGRAMS: weakref.WeakKeyDictionary[Any, _Program | None] = weakref.WeakKeyDictionary()
"""The programs of graphs; None where there can be none."""


def evaluate(graph: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Run a function's graph eagerly, without the threads of the runtime.

    Args:
        graph: the graph of the function.
        inputs: the values of its inputs, captured ones included.

    Returns:
        The outputs. None if it holds an operator that does not run by itself, such as those of the
        loops of TensorFlow 1; nothing has run then.
    """
    if graph not in _PROGRAMS:
        try:
            _PROGRAMS[graph] = _program(graph)
        except _NoEvaluation:
            _PROGRAMS[graph] = None
    program = _PROGRAMS[graph]
    if program is None:
        return None
    # A tape fails where a function returns one of its inputs, a constant of an earlier call, or a
    # tensor twice ("Invalid tape state", 2.21).
    return [_internals.identity(output) for output in program.run(inputs)]


def _program(graph: Any) -> _Program:
    numbers: dict[int, int] = {}

    def numbered(tensors: Sequence[Any]) -> list[int]:
        return [numbers.setdefault(id(tensor), len(numbers)) for tensor in tensors]

    inputs = numbered(graph.inputs)
    given = {tensor.op.name for tensor in graph.inputs}
    roots = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    steps = [
        _Step(_running(op), numbered(op.inputs), numbered(op.outputs))
        for op in needed(roots)
        if op.name not in given and op.type not in _SKIPPED
    ]
    return _Program(inputs, steps, numbered(graph.outputs))


def _running(op: Any) -> _Run:
    """A function that runs an operator of a graph.

    Raises:
        _NoEvaluation: it does not run by itself.
    """
    kind = op.type
    if kind == "Const":
        value = tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)
        return lambda inputs: (value,)
    if kind in ROUTING or kind == "Placeholder" or _internals.is_function_call(op):
        raise _NoEvaluation
    called = _called(op)
    if kind in CALLS:
        return called["f"][0].run
    if kind in _LOOPS:
        return _loop(called["cond"][0], called["body"][0])
    if kind in _BRANCHES:
        branches = called["then_branch"][0], called["else_branch"][0]
        return _case(branches, lambda condition: 0 if _is_true(condition) else 1)
    if kind in _CASES:
        return _case(called["branches"], lambda index: int(index.numpy()))
    return _alone(op)


def _called(op: Any) -> Mapping[str, Sequence[_Program]]:
    """The programs of the functions that a call, a loop or a branch runs, by attribute."""
    found: dict[str, Sequence[_Program]] = {}
    if op.type not in CALLS | _LOOPS | _BRANCHES | _CASES:
        return found
    for attribute, callees in _internals.callees_of(op).items():
        if any(callee is None or callee.must_compile for callee in callees):
            raise _NoEvaluation
        found[attribute] = [_program(callee.graph) for callee in callees if callee is not None]
    return found


def _alone(op: Any) -> _Run:
    """A function that runs an operator which calls no function of the graph."""
    kind, count, device = op.type, len(op.outputs), op.device
    attributes = _internals.attributes_to_execute(op)

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        if not device:
            return _internals.execute_now(kind, count, list(inputs), attributes)
        with tf.device(device):
            return _internals.execute_now(kind, count, list(inputs), attributes)

    return run


def _loop(condition: _Program, body: _Program) -> _Run:
    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        while _is_true(condition.run(inputs)[0]):
            inputs = body.run(inputs)
        return inputs

    return run


def _case(branches: Sequence[_Program], index: Callable[[Any], int]) -> _Run:
    """A function that runs one of several; the first input tells which, by its `index`."""

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        number = index(inputs[0])
        # An index that no branch has stands for the last one.
        taken = branches[number if 0 <= number < len(branches) else -1]
        return taken.run(inputs[1:])

    return run


def _is_true(tensor: Any) -> bool:
    """True if a condition holds: a scalar that is not zero or empty, or a tensor with elements."""
    value = tensor.numpy()
    return bool(value) if tensor.shape.rank == 0 else bool(value.size)
