"""The state of a graph copy while operators are added to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import tensorflow as tf

from amanda.inline import Counter
from amanda.inline.steps import StepKind, lowered
from amanda.interface.action import Action
from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.gradient_order import is_sum
from amanda_tensorflow.graphs.passes import InnerPasses, RunningModules
from amanda_tensorflow.operators.types import (
    CALLS,
    CONTROL_FLOW,
    ROUTING,
    UNROUTABLE,
    takes_reference,
)


class Releasable(Protocol):
    """A node of the copy that holds a tool until it is released."""

    def release(self) -> None:
        """Let go of the tool: the scope is over."""


@attrs.define(eq=False)
class Building:
    """A copy under construction.

    A routine that returns nothing becomes a node without outputs. Operators after it have to wait
    for it by control dependencies: those that read one of the tensors at its point (`late`), or
    the operator that is added next (`controls`).

    Attributes:
        graph: the copy's graph.
        scopes: the scopes whose tools act on it; empty while nothing is added.
        needs_gradient: whether the copy may be differentiated.
        takes_feeds: whether a run may be given the value of any tensor, whose operator must not
            run then: what waits for a tensor reads it.
        anchors: the operators that a node without inputs waits for.
        controls: nodes without outputs that the next operator has to wait for.
        late: by ``id`` of a tensor, nodes without outputs that its readers have to wait for.
        looks: the names of those among them that only look at gradients. What computes with the
            tensor does not wait for them, so that TensorFlow's optimizers may rewrite it; what
            reads its results does in turn: an operator with state, or the end of the function.
        template: for the replacement that is inserted next, a tensor of the type of each
            output; None for outputs that nobody reads.
        likes: likewise, a tensor of the shape of each output, where it is known.
        takes_reference: whether the operator that is added writes to one of its inputs.
        is_routing: whether the operator that is added routes values in a loop or branch of
            TensorFlow 1, where some of them may never arrive.
        is_changed: whether anything was inserted.
        entries: the operators by which values enter loops of TensorFlow 1.
        inner_passes: tells of the iterations within its runs; None where nobody is told.
        modules: tells of the modules that its runs enter and leave; None where nobody is told.
        segments: where that is not None, by ``id`` of a site and name of a vanilla operator, which
            operators of the copy were added for it: how many the copy had before and after.
        telling: by the same, the loops and branches whose bodies tell of modules.
        tells_modules: whether any mark at a module was inserted.
        may_change: whether a routine may have changed an input or output of a forward operator.
        is_replaced: whether an operator was replaced, perhaps by one with another shape.
        has_python: whether any inserted node calls Python.
        routines: the nodes that do.
        runs_once: whether each operator runs at most once in a run of the graph, so that counters
            need no nodes.
        counts: pairs of a counter and an operator of the copy whose executions it counts.
    """

    graph: Any
    scopes: tuple[LiveScope, ...]
    needs_gradient: bool
    takes_feeds: bool = False
    anchors: Sequence[Any] = ()
    controls: list[Any] = attrs.field(factory=list)
    late: dict[int, list[Any]] = attrs.field(factory=dict)
    looks: set[str] = attrs.field(factory=set)
    template: Sequence[Any] = ()
    likes: Sequence[Any] = ()
    takes_reference: bool = False
    is_routing: bool = False
    is_changed: bool = False
    entries: list[Any] = attrs.field(factory=list)
    inner_passes: InnerPasses | None = None
    modules: RunningModules | None = None
    segments: dict[tuple[int, str], tuple[int, int]] = attrs.field(factory=dict)
    telling: set[tuple[int, str]] = attrs.field(factory=set)
    tells_modules: bool = False
    may_change: bool = False
    is_replaced: bool = False
    has_python: bool = False
    routines: list[Releasable] = attrs.field(factory=list)
    runs_once: bool = False
    counts: list[tuple[Counter, Any]] = attrs.field(factory=list)
    _counting: list[Counter] | None = None

    def begin(self, kind: str) -> None:
        """Note the type of the operator that is added next."""
        self.takes_reference = takes_reference(kind)
        self.is_routing = kind in ROUTING
        self._counting = [] if self.runs_once else None

    def count(self, action: Action) -> bool:
        """Note a counter of the operator that is added; False if the action is to be a node."""
        if self._counting is None or (step := lowered(action)).kind is not StepKind.COUNT:
            return False
        self._counting.append(step.routine)
        return True

    def forget(self) -> None:
        """Let go of counters, and of a copy in which nothing was inserted: it is not needed."""
        self.counts.clear()
        self.segments.clear()
        if not self.is_changed:
            self.graph = None

    def close(self) -> None:
        """Note that no routine of the operator follows."""
        self._counting = None

    def end(self, op: Any) -> None:
        """Note that an operator has been added to the copy, with all its routines."""
        self.counts += [(counter, op) for counter in self._counting or ()]
        self._counting = None

    def absorb(self, inner: Building) -> None:
        """Note what was inserted into a body or branch of the copy."""
        self.is_changed |= inner.is_changed
        self.may_change |= inner.may_change
        self.is_replaced |= inner.is_replaced
        self.has_python |= inner.has_python
        self.tells_modules |= inner.tells_modules
        self.routines += inner.routines

    def changes_in(self, add: Callable[[], None]) -> bool:
        """True if a routine may have changed forward values among the operators that `add` adds."""
        before, self.may_change = self.may_change, False
        try:
            add()
            return self.may_change
        finally:
            self.may_change |= before

    def late_nodes(self, tensors: Iterable[Any]) -> list[Any]:
        """The nodes that readers of these tensors have to wait for."""
        if not self.late:
            return []
        return [node for tensor in tensors for node in self._late_at(tensor)]

    def _late_at(self, tensor: Any) -> Sequence[Any]:
        """The nodes that readers of a tensor have to wait for, also where no replay has added it.

        Without recursion: graphs are deeper than Python's stack.
        """
        waiting = [tensor] if self.looks and not self.entries else []
        while waiting:
            last = waiting[-1]
            is_known = id(last) in self.late
            above = [] if is_known else [t for t in last.op.inputs if id(t) not in self.late]
            waiting += above
            if not above:
                waiting.pop()
                if not is_known:
                    self.late[id(last)] = self._passed_on(last.op)
        return self.late.get(id(tensor), ())

    def _passed_on(self, op: Any) -> list[Any]:
        """The nodes that only look at what an operator reads, and that it does not wait for."""
        nodes = [node for tensor in op.inputs for node in self.late.get(id(tensor), ())]
        return self.last_of([n for n in nodes if n.name in self.looks], op.control_inputs)

    def last_of(self, nodes: Iterable[Any], waited: Iterable[Any] = ()) -> list[Any]:
        """Nodes without those that others of them, or `waited`, are or wait for."""
        found = {node.name: node for node in nodes}
        for before in [
            *waited,
            *(before for node in found.values() for before in node.control_inputs),
        ]:
            found.pop(before.name, None)
        return [*found.values()]

    def split_looks(self, kind: str, op: Any, nodes: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Nodes that an operator is to wait for, and those that its readers wait for instead.

        Args:
            kind: the type of the operator.
            op: the vanilla operator.
        """
        hard, looks = list[Any](), list[Any]()
        computes = bool(op.outputs) and kind not in _BARRIERS and not _internals.is_stateful(op)
        # A sum of three adds them in an order that depends on which of them nobody holds any more
        # (2.16 to 2.21): who looks at them has to be done.
        computes = computes and not is_sum(op)
        for node in nodes:
            (looks if computes and node.name in self.looks else hard).append(node)
        return hard, looks

    def earlier(self) -> list[Any]:
        """The nodes without outputs of earlier routines at this point (contract rule 9)."""
        return [] if self.is_routing else list(self.controls)

    def awaited(self, tensors: list[Any], readers: Iterable[Any] = ()) -> list[Any]:
        """Let the readers of these tensors wait for the nodes without outputs.

        Args:
            readers: the vanilla operators that read them.

        Returns:
            The tensors to read instead; the same ones, unless a reader routes values.
        """
        valued = [t for t in tensors if has_value(t)]
        if not self.controls or not valued:
            return tensors
        controls = self.take_controls()
        if not self.takes_feeds and not any(op.type in ROUTING for op in readers):
            for tensor in valued:
                self.late.setdefault(id(tensor), []).extend(controls)
            return tensors
        # An operator that routes values in a loop of TensorFlow 1 must not wait for others: an
        # identity in front of it does. Where a tensor may be fed, that identity is.
        return [identity_after(t, controls) if has_value(t) else t for t in tensors]

    def enter(self, op: Any) -> None:
        """Note an operator by which a value enters a loop of TensorFlow 1."""
        self.entries.append(op)
        if self.takes_feeds:
            # A later run may add routines, when this one has been executed.
            _internals.run_in_order(op)

    def enter_loop(self, made: Iterable[Any], tensors: Iterable[Any]) -> None:
        """Let operators without inputs run in the loop of TensorFlow 1 where others read them.

        Args:
            made: operators that were added for a routine.
            tensors: the tensors at its point.
        """
        if not self.entries:
            return
        anchors = [tensor.op for tensor in tensors if tensor is not None] or self.anchors
        for op in made:
            if anchors and not op.inputs and not op.control_inputs:
                _internals.add_control_input(op, anchors[0])

    def wait_at_outputs(self) -> None:
        """Let the outputs of a body or branch wait for the nodes that their readers wait for.

        The runtime may leave out what is only a control output of a branch, or of a condition.
        """
        graph = self.graph
        for index, tensor in enumerate(graph.outputs):
            nodes = self.late_nodes([tensor])
            if nodes:
                graph.outputs[index] = identity_after(tensor, nodes)

    def take_controls(self) -> list[Any]:
        """The nodes without outputs to wait for; they are forgotten."""
        controls, self.controls = self.controls, []
        return controls


WeakScopes = tuple[weakref.ref[LiveScope], ...]


def weak_scopes(building: Building) -> WeakScopes:
    """References to the scopes of a copy, for what may outlive them."""
    return tuple(map(weakref.ref, building.scopes))


def alive(scopes: WeakScopes) -> tuple[LiveScope, ...]:
    """The scopes among these that have not ended."""
    found = (reference() for reference in scopes)
    return tuple(scope for scope in found if scope is not None and scope.alive)


def identity_after(tensor: Any, nodes: Sequence[Any]) -> Any:
    """The value of a tensor, for which readers wait until some nodes have run."""
    with tf.control_dependencies(nodes):
        new = _internals.identity(tensor)
    if tensor.dtype in UNROUTABLE:
        _internals.copy_handle_data(tensor, new)
    return new


_BARRIERS = CALLS | CONTROL_FLOW | ROUTING
"""Types of operators that run others, or route values: they wait for all nodes."""


def has_value(tensor: Any) -> bool:
    """True if there is a tensor, and it is no reference to a variable."""
    return tensor is not None and not _internals.is_reference(tensor.dtype)
