"""An operator of a graph as core is told of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.interface.calls import OpCall, Variable
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.sites import Site
from amanda_tensorflow.graphs.variable_values import (
    ReadVariable,
    WriteVariable,
    value_of,
    variable_key,
    variable_origin,
    variable_view,
)
from amanda_tensorflow.operators.variable_views import Step, changed
from amanda_tensorflow.operators.variables import HandleVariable


@attrs.define(eq=False)
class GraphOpCall(OpCall):
    """An operator of a graph that is about to be added to a copy.

    Attributes:
        site: where it is.
        source: the vanilla operator; `inputs` are tensors of the copy.
        read: reads a variable.
        write: writes a variable of a session.
    """

    site: Site | None = None
    source: Any = None
    read: ReadVariable | None = None
    write: WriteVariable | None = None

    def shown_inputs(self) -> Sequence[Any]:
        return self.inputs if self.source is None else tuple(self.source.inputs)

    def shown_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        # Those of the copy may not be made yet, and need not be for their shapes.
        return outputs if self.source is None else tuple(self.source.outputs)

    def value(self, index: int) -> Any:
        assert self.site is not None
        assert self.read is not None
        return value_of(self.site, self.source.inputs[index], self.read)

    def value_key(self, index: int) -> Hashable | None:
        assert self.site is not None
        return variable_key(self.site, self.source.inputs[index])

    def variable(self, index: int) -> Variable | None:
        assert self.site is not None
        tensor = self.source.inputs[index]
        origin = variable_origin(self.site, tensor)
        if origin is None:
            return None
        steps = variable_view(self.site, tensor)
        if isinstance(origin, _internals.EagerTensor):
            return HandleVariable(origin, steps)
        return None if self.write is None else GraphVariable(origin.name, steps, self.write)

    def value_view(self, index: int) -> tuple[Any, ...]:
        assert self.site is not None
        return variable_view(self.site, self.source.inputs[index])

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        return runner(self.source)


class GraphVariable(Variable):
    """A variable that an operator of a session's graph makes.

    Args:
        name: the operator's name.
        steps: the casts, reshapes and transpositions between the variable and the input.
        write: writes a variable.
    """

    def __init__(self, name: str, steps: Sequence[Step], write: WriteVariable) -> None:
        self.name = name
        self._steps = tuple(steps)
        self._write = write

    def change(self, function: Callable[[Any], Any]) -> None:
        self._write(self.name, lambda value: changed(value, self._steps, function))


def runner(op: Any) -> Callable[[Sequence[Any]], Any]:
    """A function of flat inputs that runs an operator like `op`, eagerly or in the default graph.

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
