"""One graph at one place of an instrumented copy, and the values that it reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.plan import ActionPlan
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import (
    ForwardOp,
    GradientCall,
    GradientLog,
    TensorName,
    is_older,
    log_of,
)
from amanda_tensorflow.gradient_map.recovery import completed
from amanda_tensorflow.operators.types import attributes_of, named_with_type
from amanda_tensorflow.operators.variable_views import VIEWS, Step, step_of

_LOOK_THROUGH = frozenset(
    {"Identity", "Cast", "ReadVariableOp", "Enter", "RefEnter", "EnsureShape"}
)
"""Operators whose output is, as a parameter, what their first input is."""


@attrs.frozen(eq=False)
class Segment:
    """What one differentiable routine has changed.

    Attributes:
        positions: of the tensors that it changed.
        old: these tensors as it was given them, each one standing for itself alone.
        new: what it gave.
    """

    positions: Sequence[int]
    old: list[Any]
    new: list[Any]


@attrs.define(eq=False)
class ForwardState:
    """What the replay of one operator has left for the operators of its gradient.

    Attributes:
        op_id: the forward operator's id.
        plan: its plan, if it has one.
        used: a source tensor's id to the tensor of the copy that its gradient sees
            instead: what the operator computed with, and what it gave.
        inputs, outputs: the tensors of the copy that it computed with and gave.
        before, after: what differentiable routines have changed around it.
        replaced: what its replacement was given, and what that gave.
    """

    op_id: str
    plan: ActionPlan | None = None
    used: dict[int, Any] = attrs.field(factory=dict)
    inputs: list[Any] = attrs.field(factory=list)
    outputs: list[Any] = attrs.field(factory=list)
    before: list[Segment] = attrs.field(factory=list)
    after: list[Segment] = attrs.field(factory=list)
    replaced: tuple[list[Any], list[Any]] | None = None

    def note_used(self, op: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note what the gradient of `op` has to see in place of its tensors."""
        self.inputs, self.outputs = list(inputs), list(outputs)
        pairs = [*zip(op.inputs, inputs, strict=True), *zip(op.outputs, outputs, strict=True)]
        self.used = {id(old): new for old, new in pairs}


@attrs.define(eq=False)
class Site:
    """A graph that is being replayed at one place of a copy.

    A called function is replayed in its caller's graph, a body of a loop or a
    branch in a graph of its own.

    Attributes:
        graph: the vanilla graph.
        ids: what the ids of its operators begin with.
        prefix: what the names of its operators begin with in the copy.
        parent: the site of the caller, if it is replayed into the caller's graph.
        sources: a placeholder's id to the caller's site and tensor it stands for.
        captured: a placeholder's id to the concrete tensor it stands for.
        forward: the site of the function whose gradient this one computes.
        is_gradient: whether it is run by a part of a gradient.
        tensors: a vanilla tensor's id to the tensor of the copy.
        ops: a vanilla operator's name to the operator of the copy.
        after: a vanilla operator's name to nodes of the copy that run after it.
        states: by name, what is known of a forward operator.
        children: the sites of called functions by the name of the call.
        gradients: what has been done for a gradient call.
        skipped: operators that were left out, because nobody seemed to need them.
        device: the device of operators that name none.
        fetched: the tensors that a session may be asked for.
        is_backward: whether all of it computes gradients of another graph.
        fed: ids of tensors that are given from outside, whatever makes them.
    """

    graph: Any
    ids: str
    prefix: str = ""
    parent: Site | None = None
    sources: dict[int, tuple[Site, Any]] = attrs.field(factory=dict)
    captured: dict[int, Any] = attrs.field(factory=dict)
    forward: Site | None = None
    is_gradient: bool = False
    device: str = ""
    tensors: dict[int, Any] = attrs.field(factory=dict)
    ops: dict[str, Any] = attrs.field(factory=dict)
    after: dict[str, list[Any]] = attrs.field(factory=dict)
    states: dict[str, ForwardState] = attrs.field(factory=dict)
    children: dict[str, Site] = attrs.field(factory=dict)
    gradients: dict[GradientCall, Any] = attrs.field(factory=dict)
    skipped: dict[str, Any] = attrs.field(factory=dict)
    fetched: Sequence[Any] = ()
    fed: set[int] = attrs.field(factory=set)
    log: GradientLog = attrs.field(init=False)
    producers: dict[TensorName, list[GradientCall]] = attrs.field(init=False)
    externals: dict[int, Any] = attrs.field(init=False)
    is_backward: bool = attrs.field(init=False)
    _named: dict[str, Any] = attrs.field(init=False)
    _differentiated: dict[str, int] = attrs.field(init=False)
    _order: dict[GradientCall, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.refresh()

    def refresh(self, fetched: Sequence[Any] = ()) -> None:
        """Look again at what the graph holds: the user may have added to it."""
        self.fetched = [*self.fetched, *fetched]
        self._named = {op.name: op for op in self.graph.get_operations()}
        self.log = log_of(self.graph)
        if not self.is_gradient or is_older(self.graph):
            self.log = completed(self.graph, self.log, self._named)
        self.producers = {}
        self._order = {call: index for index, call in enumerate(self.log.calls)}
        self._differentiated = {}
        for call in self.log.calls:
            if call.forward.graph() is self.graph:
                self._differentiated.setdefault(call.forward.name, self._order[call])
            for name in call.grad_inputs:
                if name is not None:
                    self.producers.setdefault(name, []).append(call)
        self.externals = {id(inner): outer for outer, inner in self.captures}
        self.is_backward = self.is_gradient or any(
            call.forward.graph() is not self.graph for call in self.log.calls
        )

    @property
    def captures(self) -> Sequence[tuple[Any, Any]]:
        """Pairs of a tensor from outside that the graph uses, and its placeholder in it."""
        return getattr(self.graph, "captures", ())

    @property
    def outputs(self) -> Sequence[Any]:
        """The tensors that the graph gives, where it says so."""
        return getattr(self.graph, "outputs", ()) or self.fetched

    @property
    def root_ids(self) -> str:
        """What the ids of the outermost graph begin with."""
        return self.ids if self.parent is None else self.parent.root_ids

    def position(self, call: GradientCall) -> int:
        """When a gradient call was made, among all of the graph."""
        return self._order[call]

    def put(self, old: Any, new: Any) -> None:
        """Note the tensor of the copy that stands for a vanilla one."""
        if id(old) not in self.fed:
            self.tensors[id(old)] = new

    def is_recomputed(self, name: str, owner: GradientCall) -> bool:
        """Whether a part of a gradient call is differentiated within that call."""
        differentiated = self._differentiated.get(name)
        return differentiated is not None and differentiated < self._order[owner]

    def controls(self, op: Any) -> list[Any]:
        """What to wait for in the copy instead of a vanilla operator."""
        if self.ops.get(op.name) is None:
            return []
        return [self.ops[op.name], *self.after.get(op.name, ())]

    def named(self, name: str) -> Any:
        """A vanilla operator by name."""
        return self._named[name]

    def tensor(self, name: TensorName) -> Any:
        """A vanilla tensor by name."""
        return self._named[name[0]].outputs[name[1]]

    def op_id(self, op: Any) -> str:
        """The id of one of its forward operators."""
        name = named_with_type(op.name, op.type)
        if name != op.name and name in self._named:
            # tf.tensordot makes a Reshape called `Tensordot` beside `Tensordot/Reshape`.
            name = f"{op.name}:{op.type}"
        return f"{self.ids}/{name}"

    def root(self, forward: ForwardOp) -> ForwardOp:
        """The forward operator whose gradient's gradient is meant, of whatever order."""
        while forward.graph() is self.graph and forward.name in self.log.owners:
            forward = self.log.owners[forward.name].forward
        return forward

    def site_of(self, graph: Any) -> Site | None:
        """The site of a graph that this one computes gradients of, if it is in the copy."""
        site: Site | None = self
        while site is not None:
            if site.graph is graph:
                return site
            site = site.forward
        return None


class LazyAttributes(Mapping[str, Any]):
    """The attributes of an operator of a graph, read when somebody asks for them."""

    def __init__(self, op: Any) -> None:
        self._op = weakref.ref(op)
        self._known: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._known is None:
            op = self._op()
            self._known = {} if op is None else attributes_of(op)
        return self._known

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


ReadVariable = Callable[[Any, Any], Any]
"""Gives the value of a variable: called with its concrete handle, or with the operator of
the graph that makes it, and its dtype or None."""


def value_of(site: Site, tensor: Any, read: ReadVariable, dtype: Any = None) -> Any:
    """The value of a tensor that is a variable's, a constant or captured; None for others.

    Args:
        dtype: the type in which a variable is read.
    """
    op = tensor.op
    kind = op.type
    if kind == "Const":
        with _internals.eager_mode():
            return tf.constant(tf.make_ndarray(op.get_attr("value")))
    if kind in ("VarHandleOp", "VariableV2", "Variable"):
        return read(op, dtype)
    if kind == "Placeholder":
        return _placeholder_value(site, tensor, read, dtype)
    if kind not in _LOOK_THROUGH and kind not in VIEWS:
        return None
    step = Step(kind, tensor.dtype) if kind == "Cast" else _view(tensor)
    if step is None and kind in VIEWS:
        return None
    reads = tensor.dtype if kind == "ReadVariableOp" else dtype
    value = value_of(site, op.inputs[0], read, reads)
    if value is None or step is None:
        return value
    with _internals.eager_mode():
        return step.of(value)


def _view(tensor: Any) -> Step | None:
    """What an operator of :data:`VIEWS` does; None if it is not known, or is another operator."""
    op = tensor.op
    if op.type not in VIEWS:
        return None
    return step_of(op.type, op.inputs[0], tensor, lambda: tf.get_static_value(op.inputs[1]))


def variable_view(site: Site, tensor: Any) -> tuple[Step, ...]:
    """The reshapes and transpositions between a variable and a tensor, from the variable on."""
    op = tensor.op
    if op.type == "Placeholder" and id(tensor) in site.sources:
        return variable_view(*site.sources[id(tensor)])
    if op.type not in _LOOK_THROUGH and op.type not in VIEWS:
        return ()
    step = _view(tensor)
    before = variable_view(site, op.inputs[0])
    return before if step is None else (*before, step)


def variable_key(site: Site, tensor: Any) -> Hashable | None:
    """What tells the variable whose value or handle a tensor is; None for others."""
    op = tensor.op
    if op.type in ("VarHandleOp", "VariableV2", "Variable"):
        return site.root_ids, op.name
    if op.type in _LOOK_THROUGH or _view(tensor) is not None:
        return variable_key(site, op.inputs[0])
    if op.type != "Placeholder":
        return None
    if id(tensor) in site.sources:
        return variable_key(*site.sources[id(tensor)])
    concrete = site.captured.get(id(tensor))
    if concrete is None or concrete.dtype != tf.resource:
        return None
    return _internals.handle_key(concrete)


def _placeholder_value(site: Site, tensor: Any, read: ReadVariable, dtype: Any) -> Any:
    if id(tensor) in site.sources:
        caller, outer = site.sources[id(tensor)]
        return value_of(caller, outer, read, dtype)
    concrete = site.captured.get(id(tensor))
    if concrete is None or concrete.dtype != tf.resource:
        return concrete
    return read(concrete, dtype)
