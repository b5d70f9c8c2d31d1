"""The operator graph that :mod:`amanda.tools.graph_tracing` records, and its replay.

The nodes are forward operators (:class:`TracedOp`), the edges tensors (:class:`TracedTensor`). The
graph refers to the program's tensors weakly; a tensor that takes no weak reference, such as a NumPy
scalar, is kept alive until tracing ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError, CapabilityError, TensorReleased
from amanda.interface.calls import OpFunction
from amanda.interface.context import OpContext
from amanda.python.nested import SCALARS, leaves, plain
from amanda.python.references import Reference
from amanda.scope.switches import disabled
from amanda.tools.description import OpDescription, describe


@attrs.frozen
class TracedTensor:
    """One value of a tensor: the output of an operator, or an input of the graph.

    An operator that changes a tensor in place produces a new entry for the same tensor.

    Attributes:
        index: its number in :attr:`Graph.tensors`.
        producer: id of the operator that produced it; "" for an input of the graph.
        position: its position among the outputs of the producer.
        is_parameter: True if it is an input that is a parameter, buffer, variable or constant.
    """

    index: int
    producer: str = ""
    position: int = 0
    is_parameter: bool = False


@attrs.define(eq=False)
class TracedOp:
    """A forward operator.

    Attributes:
        id, type, name, module, namespace: as in
            :class:`amanda.tools.description.OpDescription`.
        inputs: the tensors that it reads; None for an absent optional one.
        input_names: the declared name of each input, "" for an input without one.
        outputs: the tensors that it produces.
        attributes: its non-tensor arguments, as plain types or text.
        backward: its backward operators, in the order of their first execution.
    """

    id: str
    type: str
    name: str
    module: str
    namespace: str
    inputs: tuple[TracedTensor | None, ...]
    input_names: tuple[str, ...]
    outputs: tuple[TracedTensor | None, ...] = ()
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    backward: list[OpDescription] = attrs.field(factory=list)


@attrs.frozen
class Edge:
    """An output of one operator that is an input of another one."""

    producer: str
    output: int
    consumer: str
    input: int


class Graph:
    """The traced operators and tensors, in the order of first execution."""

    def __init__(self) -> None:
        self._ops: dict[str, TracedOp] = {}
        self._tensors: list[TracedTensor] = []
        self._sources: dict[int, Callable[[], Any]] = {}
        self._bound: dict[int, tuple[_Reference | _Held, TracedTensor]] = {}
        self._held: dict[int, _Held] = {}
        self._frozen: dict[str, OpFunction | CapabilityError] = {}
        self._described: dict[str, OpDescription] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def __contains__(self, op_id: str) -> bool:
        return op_id in self._ops

    def __repr__(self) -> str:
        return f"<Graph of {len(self)} ops>"

    # -- reading ----------------------------------------------------------

    @property
    def ops(self) -> list[TracedOp]:
        """The forward operators in the order of their first execution."""
        return list(self._ops.values())

    @property
    def backward_ops(self) -> list[OpDescription]:
        """The backward operators, in the order of their forward operators."""
        return [backward for op in self._ops.values() for backward in op.backward]

    @property
    def tensors(self) -> list[TracedTensor]:
        """All tensors."""
        return list(self._tensors)

    @property
    def inputs(self) -> list[TracedTensor]:
        """The input tensors that are not parameters, in the order of their first use."""
        return [t for t in self._tensors if not t.producer and not t.is_parameter]

    @property
    def parameters(self) -> list[TracedTensor]:
        """The parameters, buffers, variables and constants, in the order of their first use."""
        return [t for t in self._tensors if t.is_parameter]

    @property
    def outputs(self) -> list[TracedTensor]:
        """The tensors that operators produce and no operator reads."""
        read = {t for op in self._ops.values() for t in op.inputs}
        return [t for t in self._tensors if t.producer and t not in read]

    @property
    def edges(self) -> list[Edge]:
        """The edges between operators, in the order of the consumers."""
        return [
            Edge(tensor.producer, tensor.position, op.id, position)
            for op in self._ops.values()
            for position, tensor in enumerate(op.inputs)
            if tensor is not None and tensor.producer
        ]

    def op(self, op_id: str) -> TracedOp:
        """The forward operator with an id.

        Raises:
            KeyError: no operator with this id was traced.
        """
        return self._ops[op_id]

    def description(self, op_id: str) -> OpDescription:
        """The description of a forward or backward operator, with the shapes of its tensors.

        Raises:
            KeyError: the graph has no such operator.
        """
        return self._described[op_id]

    def producers(self, op_id: str) -> list[TracedOp]:
        """The operators whose outputs an operator reads, without repetition."""
        tensors = (t for t in self._ops[op_id].inputs if t is not None and t.producer)
        return [self._ops[producer] for producer in dict.fromkeys(t.producer for t in tensors)]

    def consumers(self, op_id: str) -> list[TracedOp]:
        """The operators that read an operator's outputs."""
        return [
            op
            for op in self._ops.values()
            if any(t is not None and t.producer == op_id for t in op.inputs)
        ]

    def tensor_of(self, tensor: Any) -> TracedTensor | None:
        """The latest entry of one of the program's tensors; None if the graph has none.

        It is the entry by which the last traced operator has produced or read the tensor.
        """
        entry = self._bound.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    # -- replay -----------------------------------------------------------

    def replay(
        self,
        inputs: Sequence[Any] | Mapping[TracedTensor, Any],
        outputs: Iterable[TracedTensor] | None = None,
    ) -> list[Any]:
        """Run the traced forward operators again, in the same order, without instrumentation.

        Random operators draw new numbers: restore the generator's state first. Numbers that the
        program has read from tensors (sizes, ``item()``) are those of the traced run. Operators
        that work in place change the tensors that they get, the model's own parameters and
        buffers included.

        Args:
            inputs: one tensor for each of :attr:`inputs`, in order; or a mapping from tensors of
                the graph to values. Parameters, and inputs that the mapping leaves out, are the
                program's own tensors.
            outputs: the tensors to return; None for :attr:`outputs`.

        Returns:
            The value of each of `outputs`.

        Raises:
            CapabilityError: the driver cannot run a single operator again.
            TensorReleased: an input is not given, and the program's own tensor is not alive.
            ValueError: the number of inputs is wrong.
        """
        values = self._input_values(inputs)
        # Under a scope of the caller, the replayed operators would be instrumented and traced.
        with disabled():
            for op in self._ops.values():
                self._replay_op(op, values)
        return [values[t.index] for t in (self.outputs if outputs is None else outputs)]

    def _input_values(self, inputs: Sequence[Any] | Mapping[TracedTensor, Any]) -> dict[int, Any]:
        if isinstance(inputs, Mapping):
            return {tensor.index: value for tensor, value in inputs.items()}
        wanted = self.inputs
        if len(inputs) != len(wanted):
            raise ValueError(
                f"the graph has {len(wanted)} inputs, got {len(inputs)}; give a mapping from "
                "graph.tensor_of(tensor) to values to leave some to the model"
            )
        return {t.index: value for t, value in zip(wanted, inputs, strict=True)}

    def _replay_op(self, op: TracedOp, values: dict[int, Any]) -> None:
        function = self._frozen[op.id]
        if isinstance(function, CapabilityError):
            raise function
        arguments = [None if t is None else self._value(op, t, values) for t in op.inputs]
        produced = [leaf for leaf in leaves(function.run(arguments)) if type(leaf) not in SCALARS]
        expected = [t for t in op.outputs if t is not None]
        if expected and len(produced) != len(expected):
            raise AmandaError(
                f"op {op.id} gave {len(produced)} tensors in the replay and {len(expected)} "
                "when it was traced"
            )
        values.update((t.index, new) for t, new in zip(expected, produced, strict=False))

    def _value(self, op: TracedOp, tensor: TracedTensor, values: dict[int, Any]) -> Any:
        if tensor.index not in values:
            source = self._sources.get(tensor.index)
            values[tensor.index] = None if source is None else source()
        value = values[tensor.index]
        if value is None:
            position = op.inputs.index(tensor)
            raise TensorReleased(
                f"input {position} of op {op.id} is neither given nor alive; keep the model "
                f"while you replay, or give a value for graph.tensors[{tensor.index}]"
            )
        return value

    # -- tracing ----------------------------------------------------------

    def add(self, context: OpContext) -> TracedOp:
        """Record an operator; called in an analysis that sees its outputs.

        If its id is known already, only the tensors of this execution are bound to its entries.
        """
        op = self._ops.get(context.get_op_id())
        if op is None:
            op = self._new_op(context, describe(context))
        self.follow(op, context.get_outputs() or ())
        return op

    def add_backward(self, context: OpContext) -> None:
        """Record a backward operator."""
        found = describe(context)
        op = self._ops.get(found.forward)
        if op is not None and all(found.id != backward.id for backward in op.backward):
            op.backward.append(found)
            self._described[found.id] = found

    def follow(self, op: TracedOp, outputs: Iterable[Any]) -> None:
        """Bind the output tensors of an execution to the entries of `op`."""
        for tensor, known in zip(outputs, op.outputs, strict=False):
            if tensor is not None and known is not None:
                self._bind(tensor, known)

    def note_substitute(self, output: Any, substitute: Any) -> None:
        """Bind a tensor that a tool has put in place of an output to the output's entry."""
        known = self.tensor_of(output)
        if known is not None and self.tensor_of(substitute) is None:
            self._bind(substitute, known)

    def _new_op(self, context: OpContext, found: OpDescription) -> TracedOp:
        op = TracedOp(
            id=found.id,
            type=found.type,
            name=found.name,
            module=found.module,
            namespace=found.namespace,
            inputs=tuple(self._inputs(context)),
            input_names=tuple(context.get_input_names()),
            attributes={name: plain(value) for name, value in context.get_attrs().items()},
        )
        outputs = context.get_outputs() or ()
        op.outputs = tuple(
            None if tensor is None else self._new_tensor(op.id, position)
            for position, tensor in enumerate(outputs)
        )
        try:
            self._frozen[op.id] = context.get_function()
        except CapabilityError as error:
            self._frozen[op.id] = error
        self._ops[op.id] = op
        self._described[op.id] = found
        return op

    def _inputs(self, context: OpContext) -> Iterator[TracedTensor | None]:
        for position, tensor in enumerate(context.get_inputs()):
            known = None if tensor is None else self.tensor_of(tensor)
            if tensor is not None and known is None:
                is_parameter = context.get_value(position) is not None
                known = self._new_tensor(is_parameter=is_parameter)
                self._sources[known.index] = self._bind(tensor, known)
            yield known

    def _new_tensor(
        self, producer: str = "", position: int = 0, is_parameter: bool = False
    ) -> TracedTensor:
        tensor = TracedTensor(len(self._tensors), producer, position, is_parameter)
        self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        """Release the tensors that take no weak reference; called when tracing ends."""
        for reference in self._held.values():
            self._forget(reference)
            reference.tensor = None
        self._held.clear()

    def _bind(self, tensor: Any, known: TracedTensor) -> _Reference | _Held:
        reference: _Reference | _Held
        try:
            reference = _Reference(tensor, self._forget)
        except TypeError:
            # Such as a scalar of NumPy. It is held, or another object could get its id.
            reference = _Held(tensor)
            if earlier := self._held.get(known.index):
                self._forget(earlier)
            self._held[known.index] = reference
        self._bound[reference.key] = (reference, known)
        return reference

    def _forget(self, reference: _Reference | _Held) -> None:
        """Remove a tensor that is no longer alive: another object may get its ``id()``."""
        entry = self._bound.get(reference.key)
        if entry is not None and entry[0] is reference:
            del self._bound[reference.key]


class _Reference(Reference):
    """A weak reference with the ``id()`` of its tensor, which is still known when that is gone."""

    __slots__ = ("key",)

    key: int

    def __new__(cls, tensor: Any, callback: Callable[[Any], None]) -> _Reference:
        reference = super().__new__(cls, tensor, callback)
        reference.key = id(tensor)
        return reference


class _Held:
    """The reference to a tensor that takes no weak reference."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.key = id(tensor)
        self.tensor = tensor

    def __call__(self) -> Any:
        return self.tensor
