"""Sites: a vanilla graph at one place of an instrumented copy.

A function that is called twice is replayed twice, at two sites. A site maps the tensors and
operators of its graph to those of the copy, and knows the graph's gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from amanda.engine.plan import ActionPlan
from amanda_tensorflow.gradient_map.recording import (
    ForwardOp,
    GradientCall,
    GradientLog,
    TensorName,
    is_older,
    log_of,
)
from amanda_tensorflow.gradient_map.recovery import completed
from amanda_tensorflow.graphs.iterations import GraphIterations
from amanda_tensorflow.graphs.op_ids import key_of, scope_outside_layers
from amanda_tensorflow.keras_layers.paths import LayerIds
from amanda_tensorflow.keras_layers.recording import LayerCall, LayerPath
from amanda_tensorflow.labels import in_ids
from amanda_tensorflow.operators.description import attributes_of, module_of


@attrs.frozen(eq=False)
class GraphSegment:
    """The tensors before and after one differentiable routine.

    Attributes:
        positions: the positions of the tensors that it has changed.
        old: these tensors before it, copied, so that nobody else reads them.
        new: these tensors after it.
    """

    positions: Sequence[int]
    old: list[Any]
    new: list[Any]


_NOTHING: Mapping[int, Any] = {}


@attrs.define(eq=False)
class ForwardState:
    """The replay of a forward operator, as the operators of its gradient need it.

    Attributes:
        op_id: the forward operator's id.
        key: the key of its records.
        plan: its plan.
        used: by ``id`` of a vanilla input or output, the tensor of the copy that the operator
            has computed with or computed; its gradient reads that one.
        several: likewise, the tensors of an input that the operator reads several times, and that
            routines have changed at some of these places.
        inputs, outputs: these tensors, in order.
        before, after: changes by differentiable routines around it.
        replaced: inputs and outputs of its replacement, if it was replaced.
        routines: the nodes of the routines after it, for which a gradient that is derived anew
            waits.
    """

    op_id: str
    key: str
    plan: ActionPlan | None = None
    used: Mapping[int, Any] = _NOTHING
    several: Mapping[int, list[Any]] = _NOTHING
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    before: Sequence[GraphSegment] = ()
    after: Sequence[GraphSegment] = ()
    replaced: tuple[list[Any], list[Any]] | None = None
    routines: Sequence[Any] = ()

    def note_used(self, op: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note the tensors that `op` has computed with and computed."""
        self.inputs, self.outputs = list(inputs), list(outputs)
        pairs = [*zip(op.inputs, inputs, strict=True), *zip(op.outputs, outputs, strict=True)]
        self.used = {id(old): new for old, new in pairs}
        if any(self.used[id(old)] is not new for old, new in pairs):
            found: dict[int, dict[int, Any]] = {}
            for old, new in pairs:
                found.setdefault(id(old), {})[id(new)] = new
            self.several = {old: [*new.values()] for old, new in found.items() if len(new) > 1}


@attrs.define(eq=False)
class OpSite:
    """A vanilla graph that is replayed at one place of a copy.

    A called function is replayed in its caller's graph; the body of a loop, or a branch, in a
    graph of its own.

    Attributes:
        graph: the vanilla graph.
        ids: the prefix of the keys of its operators, and of the ids of those that no layer of
            Keras has made.
        layer_ids: the ids of those that layers have made.
        prefix: the prefix of the names of its operators in the copy.
        parent: the site of the caller, if it is replayed into the caller's graph.
        sources: by ``id`` of a placeholder, the caller's site and tensor that it stands for.
        captured: by ``id`` of a placeholder, the concrete tensor that it stands for.
        forward: the site of the function whose gradient this one computes.
        is_gradient: whether an operator of a gradient calls it.
        is_stacked: whether a loop of TensorFlow 1 runs it, and another loop its gradient, which
            then gets its tensors by stacks.
        saved: by name of a call of such a function, and by ``id`` of an output, the tensors that
            the function's operators use for it in the copy: one of them goes on a stack.
        iterations: those within its runs; None where nobody is told of them.
        passing: what tells of a run of the body as an iteration or a part of one; "" for nothing.
        tensors: by ``id`` of a vanilla tensor, the tensor of the copy.
        ops: by name of a vanilla operator, the operator of the copy; None if it stays where
            it is (in the user's session).
        after: by name of a vanilla operator, nodes of the copy that run after it.
        states: by name of a vanilla operator, its state.
        children: by name of a call, the site of the called function.
        side_effects: of a called function, the operators that run although nothing reads them.
        gradients: by gradient call, the changes that tools make to its gradients.
        shared_tensors: by the ids of several tensors, the one that stands for them.
        skipped: operators that were left out because nobody seemed to read them.
        device: the device of operators that name none.
        fetched: the tensors that a session may be asked for.
        fed: ``id`` of the tensors that a session is given, whichever operator makes them.
        log: the gradient calls that the graph holds.
        producers: by name of a tensor, the gradient calls that return it.
        externals: by ``id`` of a placeholder, the tensor of the outer graph that it captures.
        is_backward: whether the whole graph computes gradients of another one.
    """

    graph: Any
    ids: str
    layer_ids: LayerIds = attrs.field(factory=LayerIds)
    prefix: str = ""
    parent: OpSite | None = None
    sources: dict[int, tuple[OpSite, Any]] = attrs.field(factory=dict)
    captured: dict[int, Any] = attrs.field(factory=dict)
    forward: OpSite | None = None
    is_gradient: bool = False
    is_stacked: bool = False
    saved: dict[str, Mapping[int, list[Any]]] = attrs.field(factory=dict)
    device: str = ""
    iterations: GraphIterations | None = None
    passing: Literal["", "pass", "step"] = ""
    tensors: dict[int, Any] = attrs.field(factory=dict)
    ops: dict[str, Any] = attrs.field(factory=dict)
    after: dict[str, list[Any]] = attrs.field(factory=dict)
    states: dict[str, ForwardState] = attrs.field(factory=dict)
    children: dict[str, OpSite] = attrs.field(factory=dict)
    side_effects: Sequence[Any] = ()
    gradients: dict[GradientCall, Any] = attrs.field(factory=dict)
    shared_tensors: dict[tuple[int, ...], Any] = attrs.field(factory=dict)
    skipped: dict[str, Any] = attrs.field(factory=dict)
    fetched: Sequence[Any] = ()
    fed: set[int] = attrs.field(factory=set)
    log: GradientLog = attrs.field(init=False)
    producers: dict[TensorName, list[GradientCall]] = attrs.field(init=False)
    externals: dict[int, Any] = attrs.field(init=False)
    is_backward: bool = attrs.field(init=False)
    _knows_layers: bool = attrs.field(init=False)
    _named: dict[str, Any] = attrs.field(init=False)
    _differentiated: dict[str, int] = attrs.field(init=False)
    _order: dict[GradientCall, int] = attrs.field(init=False)
    _calls_of: dict[str, list[GradientCall]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.refresh()

    def refresh(self, fetched: Sequence[Any] = ()) -> None:
        """Read the graph again, as the user may have added to it.

        Args:
            fetched: further tensors that the session is asked for.
        """
        self.fetched = [*self.fetched, *fetched]
        self._knows_layers = False
        self._named = {op.name: op for op in self.graph.get_operations()}
        self.log = log_of(self.graph)
        if not self.is_gradient or is_older(self.graph):
            self.log = completed(self.graph, self.log, self._named)
        self.producers = {}
        self._order = {call: index for index, call in enumerate(self.log.calls)}
        self._differentiated = {}
        self._calls_of = {}
        for call in self.log.calls:
            self._calls_of.setdefault(call.forward.name, []).append(call)
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
        """The outputs of a function, or the tensors that a session is asked for."""
        return getattr(self.graph, "outputs", ()) or self.fetched

    @property
    def outermost(self) -> OpSite:
        """The site of the outermost graph into which it is replayed, by calls of functions."""
        return self if self.parent is None else self.parent.outermost

    @property
    def root_ids(self) -> str:
        """The prefix of the ids of the outermost graph."""
        return self.outermost.ids

    def position(self, call: GradientCall) -> int:
        """The position of a gradient call among all of the graph, in the order of their making."""
        return self._order[call]

    def is_stacked_at(self, name: str) -> bool:
        """True if the gradient of an operator of this name reads stacks of its tensors."""
        made = (made for call in self.calls_of(name) for made in call.ops)
        return any(self._named[other].type == "StackPushV2" for other in made)

    def versions(self, tensor: Any) -> list[Any]:
        """The tensors of the copy that operators use for a vanilla one."""
        found = [state.used.get(id(tensor)) for state in self.states.values()]
        found += [new for saved in self.saved.values() for new in saved.get(id(tensor), ())]
        return [*{id(new): new for new in found if new is not None}.values()]

    def calls_of(self, name: str) -> Sequence[GradientCall]:
        """The gradient calls that the graph holds of forward operators of this name."""
        return self._calls_of.get(name, ())

    def put(self, old: Any, new: Any) -> None:
        """Note the tensor of the copy for a vanilla one, unless that is fed."""
        if id(old) not in self.fed:
            self.tensors[id(old)] = new

    def is_recomputed(self, name: str, owner: GradientCall) -> bool:
        """True if a part of a gradient call is differentiated within that call."""
        differentiated = self._differentiated.get(name)
        return differentiated is not None and differentiated < self._order[owner]

    def controls(self, op: Any) -> list[Any]:
        """The operators of the copy to wait for instead of a vanilla one."""
        if self.ops.get(op.name) is None:
            return []
        return [self.ops[op.name], *self.after.get(op.name, ())]

    def named(self, name: str) -> Any:
        """The vanilla operator of this name."""
        return self._named[name]

    def tensor(self, name: TensorName) -> Any:
        """The vanilla tensor of this name."""
        return self._named[name[0]].outputs[name[1]]

    def op_id(self, op: Any) -> str:
        """The id of a forward operator of this graph."""
        self._read_layers()
        return self.layer_ids.op_id(op.name) or self.key(op)

    def path(self, op: Any) -> LayerPath:
        """The layers of Keras that have made an operator."""
        self._read_layers()
        return self.layer_ids.path(op.name)

    def path_of(self, call: LayerCall) -> LayerPath:
        """The path of a call of a layer of Keras in this graph."""
        return self.layer_ids.path_of(call)

    def module(self, op: Any) -> str:
        """The module path of an operator; of one that no layer has made, its name scope."""
        if module := self.path(op).module:
            return module
        is_other = self.op_id(op).startswith("/other/")
        return "other/step" if is_other else module_of(in_ids(op.name))

    def _read_layers(self) -> None:
        if not self._knows_layers:
            self._knows_layers = True
            others = self.log.owners.keys() | self.log.ambiguous
            self.layer_ids.read(
                self.graph,
                lambda op: op.name not in others,
                lambda op: scope_outside_layers(op, self.ids),
            )

    def key(self, op: Any) -> str:
        """The key of a forward operator: its name within all graphs that the driver has met."""
        return key_of(op, self.ids, self._named)

    def root(self, forward: ForwardOp) -> ForwardOp:
        """The forward operator at the root of a gradient of any order."""
        while forward.graph() is self.graph and forward.name in self.log.owners:
            forward = self.log.owners[forward.name].forward
        return forward

    def site_of(self, graph: Any) -> OpSite | None:
        """This site, or the one whose gradients it computes, that has this graph; else None."""
        site: OpSite | None = self
        while site is not None:
            if site.graph is graph:
                return site
            site = site.forward
        return None


class LazyAttributes(Mapping[str, Any]):
    """The attributes of an operator of a graph, read from the graph at first use."""

    __slots__ = ("_known", "_op")

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
