"""What tools see of TensorFlow's operators: types, names, attributes, input names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow import _internals

ROUTING = frozenset(
    {
        "Switch",
        "RefSwitch",
        "Merge",
        "RefMerge",
        "Enter",
        "RefEnter",
        "Exit",
        "RefExit",
        "NextIteration",
        "RefNextIteration",
        "LoopCond",
    }
)
"""Types that route values through the loops and branches of TensorFlow 1."""

STRUCTURAL = ROUTING | frozenset(
    {
        "Const",
        "NoOp",
        "Placeholder",
        "PlaceholderWithDefault",
        "PlaceholderV2",
        "_Arg",
        "_Retval",
        "_ListToArray",
        "_ArrayToList",
        "VarHandleOp",
        "Variable",
        "VariableV2",
        "VarIsInitializedOp",
        "IsVariableInitialized",
        "ControlTrigger",
        "EagerPyFunc",
    }
)
"""Types that compute nothing: they hold, name or route values. They are no operators to tools."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""Types that call one function; the operators in it are instrumented instead of the call."""

CONTROL_FLOW = frozenset(
    {
        "While",
        "StatelessWhile",
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "ReduceDataset",
        "ScanDataset",
    }
)
"""Types that run functions as bodies and branches, which are instrumented instead of them.
A loop over a dataset in a function becomes the last two."""

NOT_OPS = STRUCTURAL | CALLS | CONTROL_FLOW
"""Types that are no operators to tools."""

DATASET_LOOPS = frozenset({"ReduceDataset", "ScanDataset"})
"""Those of them that take a dataset, state and further arguments."""

PYTHON_FUNCTIONS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
"""Types that call Python functions of the user."""

UNROUTABLE = frozenset({tf.resource, tf.variant})
"""Types of tensors that stand for state: routines may look at them and never replace them."""


@attrs.frozen
class OpView:
    """An operator as ``get_op()`` and ``get_backward_op()`` give it; it keeps no graph alive.

    Attributes:
        type: the registered name: ``Conv2D``.
        name: the operator's name in its graph, or the scope and count where there
            is no graph; the type is always a part of it.
    """

    type: str
    name: str
    _op: Callable[[], Any] | None = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def of(cls, op: Any) -> OpView:
        """The view of an operator of a graph."""
        return cls(op.type, named_with_type(op.name, op.type), weakref.ref(op))

    def made_at(self) -> Iterator[tuple[str, int]]:
        """File and line of each frame of the call that added it to its graph, innermost first.

        None for an operator that is in no graph: eagerly it is made by the call that runs it.
        """
        op = None if self._op is None else self._op()
        frames = () if op is None else op.traceback or ()
        # Each look at a frame costs: the list is long, and the user is near its end.
        for position in range(len(frames) - 1, -1, -1):
            frame = frames[position]
            yield frame.filename, frame.lineno

    def __str__(self) -> str:
        return self.name


def named_with_type(name: str, kind: str) -> str:
    """A name that contains the operator's type: Keras calls a Conv2D ``.../convolution``."""
    return name if kind in name else f"{name}/{kind}"


def is_op(kind: str) -> bool:
    """Whether an operator of a graph is one to tools."""
    return kind not in NOT_OPS


def module_of(name: str) -> str:
    """The module path that an operator's name begins with: ``net/c1`` of ``net/c1/MatMul``."""
    return name.rpartition("/")[0]


@functools.cache
def _input_args(kind: str) -> tuple[tuple[str, str, bool], ...]:
    """Of each input argument its name, what says how many tensors it takes, and whether
    it wants a reference."""
    definition = _internals.op_def_of(kind)
    if definition is None:
        return ()
    return tuple(
        (arg.name, arg.number_attr or arg.type_list_attr, arg.is_ref)
        for arg in definition.input_arg
    )


def input_names(kind: str, count: int, attributes: Mapping[str, Any]) -> list[str]:
    """The declared name of each of `count` inputs; an item of a list is ``values[0]``."""
    arguments = _input_args(kind)
    names: list[str] = []
    for name, length, _ in arguments:
        if length:
            names += [f"{name}[{i}]" for i in range(_length(attributes.get(length)))]
        else:
            names.append(name)
    return names if len(names) == count else [""] * count


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else int(value or 0)


@functools.cache
def runs_functions(kind: str) -> bool:
    """Whether this type of operator runs functions that cannot be instrumented."""
    definition = _internals.op_def_of(kind)
    found = () if definition is None else definition.attr
    if kind in CALLS or kind in CONTROL_FLOW:
        return False
    return kind in PYTHON_FUNCTIONS or any(a.type in ("func", "list(func)") for a in found)


@functools.cache
def takes_reference(kind: str) -> bool:
    """Whether some input of this type of operator is a reference to a variable."""
    return any(is_ref for _, _, is_ref in _input_args(kind))


@functools.cache
def has_one_output(kind: str) -> bool:
    """Whether this type of operator declares one output that is no list."""
    definition = _internals.op_def_of(kind)
    if definition is None or len(definition.output_arg) != 1:
        return False
    output = definition.output_arg[0]
    return not (output.number_attr or output.type_list_attr)


@functools.cache
def attribute_names(kind: str) -> tuple[str, ...]:
    """The names of the attributes that this type of operator declares."""
    definition = _internals.op_def_of(kind)
    return () if definition is None else tuple(attr.name for attr in definition.attr)


@functools.cache
def _type_attributes(kind: str) -> frozenset[str]:
    """The names of the attributes that hold a dtype or a list of them."""
    definition = _internals.op_def_of(kind)
    found = () if definition is None else definition.attr
    return frozenset(attr.name for attr in found if attr.type in ("type", "list(type)"))


def attributes_of(op: Any) -> dict[str, Any]:
    """The attributes of an operator of a graph, name to value."""
    return presented(op.type, ((name, op.get_attr(name)) for name in attribute_names(op.type)))


def presented(kind: str, attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Attributes as tools see them: text as ``str``, types as ``tf.DType``, shapes as lists."""
    types = _type_attributes(kind)
    return {name: _presented(value, name in types) for name, value in attributes}


def _presented(value: Any, is_type: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_presented(item, is_type) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if is_type and value is not None:
        return tf.as_dtype(value)
    if isinstance(value, tf.TensorShape):
        return None if value.rank is None else value.as_list()
    if type(value).__name__ == "TensorShapeProto":
        return _presented(tf.TensorShape(value), False)
    if type(value).__name__ == "NameAttrList":
        return value.name
    return value


def runner(op: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that runs an operator like `op` on flat inputs, at once or in the current graph.

    It holds the attributes, and neither the operator nor a tensor.
    """
    kind, count = op.type, len(op.outputs)
    protos = _internals.attributes_proto(op)
    types = [tensor.dtype for tensor in op.outputs]
    attributes = tuple(item for pair in _internals.raw_attributes(op) for item in pair)

    def run(inputs: Sequence[Any]) -> Any:
        tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
        if _internals.executing_eagerly():
            outputs = _internals.execute_now(kind, count, tensors, attributes)
        else:
            outputs = _internals.create_op(kind, tensors, types, protos)
        return outputs[0] if count == 1 else outputs

    return run
