"""Types of operators: which are operators to tools, and what the drivers know of each."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals

ROUTING = frozenset(
    """Switch RefSwitch Merge RefMerge Enter RefEnter Exit RefExit NextIteration RefNextIteration
    LoopCond""".split()
)
"""Types that route values through the loops and branches of TensorFlow 1."""

STRUCTURAL = ROUTING | frozenset(
    """Const NoOp Placeholder PlaceholderWithDefault PlaceholderV2 _Arg _Retval _ListToArray
    _ArrayToList VarHandleOp Variable VariableV2 VarIsInitializedOp IsVariableInitialized
    ControlTrigger EagerPyFunc""".split()
)
"""Types that compute nothing: they hold, name or route values. They are not operators to tools."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""Types that call one function. Its operators are instrumented instead of the call."""

DATASET_LOOPS = frozenset({"ReduceDataset", "ScanDataset"})
"""Loops over a dataset: their bodies take state, an element and further arguments."""

CONTROL_FLOW = DATASET_LOOPS | frozenset(
    "While StatelessWhile If StatelessIf Case StatelessCase".split()
)
"""Types that run functions as bodies or branches, whose operators are instrumented instead.
``for element in dataset:`` in a ``tf.function`` becomes a ReduceDataset or a ScanDataset."""

NOT_OPS = STRUCTURAL | CALLS | CONTROL_FLOW
"""Types that are not operators to tools."""

PYTHON_FUNCTIONS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
"""Types that call Python functions of the user."""

UNROUTABLE = frozenset({tf.resource, tf.variant})
"""Dtypes of tensors that stand for state: routines may look at them and cannot replace them."""


def is_op(kind: str) -> bool:
    """True if an operator of this type is one to tools."""
    return kind not in NOT_OPS


def is_differentiable(tensor: Any) -> bool:
    """True if a tensor is one, of a type that gradients are computed for."""
    return tensor is not None and bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def has_gradient(tensor: Any) -> bool:
    """True if gradients are computed for a tensor: of numbers, of a list of tensors, whose gradient
    is another list, and of the handle of a variable, whose gradient is that of its value."""
    return is_differentiable(tensor) or (tensor is not None and tensor.dtype in UNROUTABLE)


@functools.cache
def runs_functions(kind: str) -> bool:
    """True if operators of this type run functions that cannot be instrumented."""
    definition = _internals.op_def_of(kind)
    found = () if definition is None else definition.attr
    if kind in CALLS or kind in CONTROL_FLOW:
        return False
    return kind in PYTHON_FUNCTIONS or any(a.type in ("func", "list(func)") for a in found)


@functools.cache
def is_random(kind: str) -> bool:
    """True if operators of this type keep the state of a random generator where they run."""
    definition = _internals.op_def_of(kind)
    if definition is None or not definition.is_stateful:
        return False
    args = (*definition.input_arg, *definition.output_arg)
    # A resource, or a reference.
    has_state = any(a.is_ref or tf.as_dtype(a.type or tf.float32) in UNROUTABLE for a in args)
    return not has_state and any(attr.name == "seed2" for attr in definition.attr)


@functools.cache
def takes_reference(kind: str) -> bool:
    """True if operators of this type take a reference to a variable of TensorFlow 1."""
    definition = _internals.op_def_of(kind)
    return definition is not None and any(arg.is_ref for arg in definition.input_arg)


@functools.cache
def has_one_output(kind: str) -> bool:
    """True if operators of this type declare one output, which is not a list."""
    definition = _internals.op_def_of(kind)
    if definition is None or len(definition.output_arg) != 1:
        return False
    output = definition.output_arg[0]
    return not (output.number_attr or output.type_list_attr)
