"""The graph that :mod:`amanda.tools.graph_tracing` records, and its replay."""

from __future__ import annotations

import importlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError, CapabilityError, TensorReleased
from amanda.interface.context import OpContext
from amanda.scope.switches import disabled
from amanda.tools.description import OpDescription, describe

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


@attrs.frozen
class TracedTensor:
    """A tensor as one operator left it, or as it came into the graph.

    An operator that works in place gives the same tensor a new entry.

    Attributes:
        index: its number in :attr:`Graph.tensors`.
        producer: id of the operator that produced it; "" if none in the graph did.
        position: which of the producer's outputs it is.
        is_parameter: whether it came in as a parameter, buffer, variable or constant.
    """

    index: int
    producer: str = ""
    position: int = 0
    is_parameter: bool = False


@attrs.frozen
class TracedBackwardOp:
    """A backward operator.

    Attributes:
        id, type, name: as the tools' rows give them.
        forward: id of the forward operator.
    """

    id: str
    type: str
    name: str
    forward: str


@attrs.define(eq=False)
class TracedOp:
    """A forward operator.

    Attributes:
        id, type, name, module, namespace: as the tools' rows give them.
        inputs: the tensors it reads; None for an absent optional one.
        input_names: the declared name of each input, "" where it has none.
        outputs: the tensors it produces.
        attributes: its non-tensor arguments, in plain types or as text.
        backward: its backward operators, in the order in which they were met.
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
    backward: list[TracedBackwardOp] = attrs.field(factory=list)


@attrs.frozen
class Edge:
    """Says that an operator reads what another one has produced."""

    producer: str
    output: int
    consumer: str
    input: int


class Graph:
    """What was traced, in the order of first execution."""

    def __init__(self) -> None:
        self._ops: dict[str, TracedOp] = {}
        self._tensors: list[TracedTensor] = []
        self._sources: dict[int, Callable[[], Any]] = {}
        self._bound: dict[int, tuple[_Reference | _Held, TracedTensor]] = {}
        self._held: dict[int, _Held] = {}
        self._frozen: dict[str, Callable[[Sequence[Any]], Any] | CapabilityError] = {}

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
    def backward_ops(self) -> list[TracedBackwardOp]:
        """The backward operators, in the order of their forward operators."""
        return [backward for op in self._ops.values() for backward in op.backward]

    @property
    def tensors(self) -> list[TracedTensor]:
        """All tensors."""
        return list(self._tensors)

    @property
    def inputs(self) -> list[TracedTensor]:
        """The tensors that no operator produced, parameters aside, in the order of use."""
        return [t for t in self._tensors if not t.producer and not t.is_parameter]

    @property
    def parameters(self) -> list[TracedTensor]:
        """The parameters, buffers, variables and constants, in the order of use."""
        return [t for t in self._tensors if t.is_parameter]

    @property
    def outputs(self) -> list[TracedTensor]:
        """The tensors that operators produced and none reads."""
        read = {t for op in self._ops.values() for t in op.inputs}
        return [t for t in self._tensors if t.producer and t not in read]

    @property
    def edges(self) -> list[Edge]:
        """Which output of which operator is which input of which operator."""
        return [
            Edge(tensor.producer, tensor.position, op.id, position)
            for op in self._ops.values()
            for position, tensor in enumerate(op.inputs)
            if tensor is not None and tensor.producer
        ]

    def op(self, op_id: str) -> TracedOp:
        """The forward operator with an id.

        Raises:
            KeyError: it was not traced.
        """
        return self._ops[op_id]

    def producers(self, op_id: str) -> list[TracedOp]:
        """The operators whose outputs an operator reads, each once."""
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
        """What the graph knows of one of the model's tensors; None if nothing.

        It is what the last traced operator that produced or read it made of it.
        """
        entry = self._bound.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def to_dict(self) -> dict[str, Any]:
        """The graph as plain data."""
        return {
            "ops": [
                {
                    **attrs.asdict(op, recurse=False),
                    "inputs": [None if t is None else t.index for t in op.inputs],
                    "outputs": [None if t is None else t.index for t in op.outputs],
                    "input_names": list(op.input_names),
                    "attributes": dict(op.attributes),
                    "backward": [attrs.asdict(backward) for backward in op.backward],
                }
                for op in self.ops
            ],
            "tensors": [attrs.asdict(tensor) for tensor in self._tensors],
            "edges": [attrs.asdict(edge) for edge in self.edges],
        }

    def to_networkx(self) -> Any:
        """The operators as a ``networkx.MultiDiGraph``; a node's ``op`` is the :class:`TracedOp`.

        Raises:
            ImportError: networkx is not installed.
        """
        networkx = importlib.import_module("networkx")
        graph = networkx.MultiDiGraph()
        graph.add_nodes_from((op.id, {"op": op}) for op in self.ops)
        graph.add_edges_from(
            (e.producer, e.consumer, {"output": e.output, "input": e.input}) for e in self.edges
        )
        return graph

    # -- replay -----------------------------------------------------------

    def replay(
        self,
        inputs: Sequence[Any] | Mapping[TracedTensor, Any],
        outputs: Iterable[TracedTensor] | None = None,
    ) -> list[Any]:
        """Run the traced forward operators again, in the same order, uninstrumented.

        Random operators draw new numbers: restore the generator's state first.
        Numbers that the program took out of tensors (sizes, ``item()``) stay as
        they were. Operators that work in place change what they are given, the model's own
        parameters and buffers included.

        Args:
            inputs: one tensor for each of :attr:`inputs`, in order; or a mapping
                from tensors of the graph to values. What the mapping leaves out
                is taken from the model, as parameters are, while it is alive.
            outputs: the tensors to give; None for :attr:`outputs`.

        Raises:
            CapabilityError: the driver cannot run a single operator again.
            TensorReleased: a tensor is needed that is neither given nor alive.
            ValueError: the number of inputs is wrong.
        """
        values = self._given(inputs)
        with disabled():
            for op in self._ops.values():
                self._replay_op(op, values)
        return [values[t.index] for t in (self.outputs if outputs is None else outputs)]

    def _given(self, inputs: Sequence[Any] | Mapping[TracedTensor, Any]) -> dict[int, Any]:
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
        run = self._frozen[op.id]
        if isinstance(run, CapabilityError):
            raise run
        arguments = [None if t is None else self._value(op, t, values) for t in op.inputs]
        produced = [leaf for leaf in _leaves(run(arguments)) if type(leaf) not in _SCALARS]
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

        Of one that is known already only the tensors are followed.
        """
        description = describe(context)
        op = self._ops.get(description.id)
        if op is None:
            op = self._new_op(context, description)
        self.follow(op, context.get_outputs() or ())
        return op

    def add_backward(self, context: OpContext) -> None:
        """Record a backward operator."""
        found = describe(context)
        op = self._ops.get(found.forward)
        if op is not None and all(found.id != backward.id for backward in op.backward):
            op.backward.append(TracedBackwardOp(found.id, found.type, found.name, found.forward))

    def follow(self, op: TracedOp, outputs: Iterable[Any]) -> None:
        """Remember, weakly, which tensors an execution of `op` has produced."""
        for tensor, known in zip(outputs, op.outputs, strict=False):
            if tensor is not None and known is not None:
                self._bind(tensor, known)

    def _new_op(self, context: OpContext, found: OpDescription) -> TracedOp:
        op = TracedOp(
            id=found.id,
            type=found.type,
            name=found.name,
            module=found.module,
            namespace=found.namespace,
            inputs=tuple(self._inputs(context)),
            input_names=tuple(context.get_input_names()),
            attributes={name: _plain(value) for name, value in context.get_attrs().items()},
        )
        outputs = context.get_outputs() or ()
        op.outputs = tuple(
            None if tensor is None else self._new_tensor(op.id, position)
            for position, tensor in enumerate(outputs)
        )
        try:
            self._frozen[op.id] = context.get_function().run
        except CapabilityError as error:
            self._frozen[op.id] = error
        self._ops[op.id] = op
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
        """Let go of the tensors that take no weak reference; called when tracing ends."""
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
        """A tensor is gone: its id will be that of another one."""
        entry = self._bound.get(reference.key)
        if entry is not None and entry[0] is reference:
            del self._bound[reference.key]


class _Reference(weakref.ref[Any]):
    """A weak reference that knows the id of what it refers to."""

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


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    yield from itertools.chain.from_iterable(map(_leaves, value))


def _plain(value: Any) -> Any:
    """An argument as plain data, so that it keeps nothing alive."""
    if isinstance(value, _SCALARS) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return getattr(value, "__qualname__", None) or _short(value)


def _short(value: Any) -> str:
    try:
        text = str(value)
    except Exception:
        # What describes an argument must not stop the program.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
