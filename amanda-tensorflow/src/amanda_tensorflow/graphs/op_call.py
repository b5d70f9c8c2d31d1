"""An operator of a graph as core is told of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.errors import CapabilityError
from amanda.interface.calls import BackwardCall, OpCall, Variable, no_name
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import TensorName
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.graphs.variable_origins import (
    ReadVariable,
    WriteVariable,
    parameter_of,
    value_of,
    variable_of,
)


@attrs.define(eq=False)
class GraphOpCall(OpCall):
    """An operator of a graph that is about to be added to a copy.

    Attributes:
        site: where it is.
        source: the vanilla operator; `inputs` are tensors of the copy.
        read: reads a variable.
        write: writes a variable of a session.
    """

    site: OpSite = attrs.field(kw_only=True)
    source: Any = attrs.field(kw_only=True)
    read: ReadVariable = attrs.field(kw_only=True)
    write: WriteVariable | None = attrs.field(kw_only=True)

    def shown_inputs(self) -> Sequence[Any]:
        return placed(self.inputs)

    def shown_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        return placed(outputs)

    def value(self, index: int) -> Any:
        return value_of(self.site, self.source.inputs[index], self.read)

    def variable(self, index: int) -> Variable | None:
        return variable_of(self.site, self.source.inputs[index], self.write)

    def parameter_name(self, index: int) -> str | None:
        return parameter_of(self.site, self.source.inputs[index])

    def is_collective(self) -> bool:
        return bool(self.source.type.startswith("Collective"))

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        return runner(self.source)


@attrs.define(eq=False)
class GraphBackwardCall(BackwardCall):
    """A backward operator of a graph.

    Attributes:
        source: the vanilla operator.
        likes: the vanilla inputs of the forward operator.
        parameter: gives the path of the parameter whose gradient an output is; None for others.
    """

    source: Any = None
    likes: Sequence[Any] = ()
    parameter: Callable[[TensorName], str | None] = no_name

    def shown_inputs(self) -> Sequence[Any] | None:
        return placed(self.likes)

    def parameter_name(self, index: int, names: Sequence[str]) -> str | None:
        # The gradients of all that read a variable are added for the operator that reads it first.
        of = self.likes[0].dtype if self.source.type == "AddN" and self.likes else None
        if of is not None and (of == tf.resource or of != of.base_dtype):
            found: str | None = self.inputs[0].parameter_name()
            return found
        return self.parameter((self.source.name, index))

    def shown(
        self, grad_outputs: Sequence[Any] | None, grad_inputs: Sequence[Any] | None
    ) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
        """The gradients as tensors of the vanilla graph, where these have the same specs."""
        if grad_outputs is None:
            return grad_outputs, grad_inputs
        if grad_inputs is None and _is_as_in_graph(grad_outputs, self.source.inputs):
            return placed(grad_outputs), placed(self.source.outputs)
        return placed(grad_outputs), grad_inputs and placed(grad_inputs)


@attrs.frozen
class PlacedTensor:
    """The shape, type and device of a tensor of a graph that leaves its device to the runtime."""

    shape: Any
    dtype: Any
    device: str


def placed(tensors: Sequence[Any]) -> Sequence[Any]:
    """Tensors of these shapes and types, and of the devices that the runtime gives to operators
    without one, if there is no choice."""
    device = _only_device()
    if not device:
        return tensors
    return tuple(
        tensor
        if tensor is None or getattr(tensor, "device", None) != ""
        else PlacedTensor(tensor.shape, tensor.dtype, device)
        for tensor in tensors
    )


@functools.cache
def _only_device() -> str:
    """The device of all operators that name none; "" where the runtime chooses among kinds."""
    # Logical devices would initialize the runtime, and end the time in which it can be configured.
    kinds = {device.device_type for device in tf.config.get_visible_devices()}
    return "device:CPU:0" if kinds == {"CPU"} else ""


def _is_as_in_graph(tensors: Sequence[Any], vanilla: Sequence[Any]) -> bool:
    """True if tensors of a copy have the static shapes that they have in the vanilla graph."""
    return all(
        new is old or (new is not None and bool(new.shape == old.shape))
        for new, old in zip(tensors, vanilla, strict=True)
    )


def runner(op: Any) -> Callable[[Sequence[Any]], Any]:
    """A function of flat inputs that runs an operator like `op`, eagerly or in the default graph.

    It holds the attributes, and neither the operator nor a tensor.

    Raises:
        CapabilityError: it is run eagerly, and the operator uses a variable of a session.
    """
    kind, count, name = op.type, len(op.outputs), op.name
    # Variables, tables and iterators are the session's own, and eager operators have others.
    is_bound = not isinstance(op.graph, _internals.FuncGraph) and any(
        tensor.dtype == tf.resource for tensor in op.inputs
    )
    protos = _internals.attributes_proto(op)
    types = [tensor.dtype for tensor in op.outputs]
    attributes = _internals.attributes_to_execute(op)

    def run(inputs: Sequence[Any]) -> Any:
        tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
        if _internals.executing_eagerly():
            if is_bound:
                raise CapabilityError(
                    f"the function of op {name}, a {kind}, uses a variable or another resource of "
                    "a session, which Python does not reach while the session runs; mark the "
                    "replacement @amanda.traceable"
                )
            outputs = _internals.execute_now(kind, count, tensors, attributes)
        else:
            graph = _internals.default_graph()
            new = _internals.create_op_in(graph, kind, tensors, types, attrs=dict(protos))
            outputs = list(new.outputs)
        return outputs[0] if count == 1 else outputs

    return run
