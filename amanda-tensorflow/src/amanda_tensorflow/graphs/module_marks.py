"""Marks at the calls of modules in a copy: nodes where each of them is entered and left.

The marks of a graph form a chain in the order in which the program has made its calls. The
operators of a module wait for the mark at its entry, and the mark at its exit waits for them;
others wait for nothing. A mark waits for no operator that does not run without it::

    marks = ModuleMarks(building, boundaries)
    last = marks.add(site, roots)           # runs after all others; None where there is none
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.executions import Ends, needed_by, sources
from amanda_tensorflow.graphs.iterations import bodies
from amanda_tensorflow.graphs.run_time_routines import insert_mark, is_routable
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.keras_layers.recording import LayerCall, TensorName, calls_in, layer_calls
from amanda_tensorflow.operators.types import CALLS, CONTROL_FLOW, ROUTING, is_op

Boundaries = Mapping[int, Sequence[tuple[int, Any]]]
"""By ``id`` of a site, its marks of iterations, each with how many operators come before it."""


def calls_modules(graph: Any) -> bool:
    """True if modules are called in a graph, or in the functions that it runs."""
    if calls_in(graph):
        return True
    return any(
        calls_modules(body)
        for op in graph.get_operations()
        if op.type in CALLS or op.type in CONTROL_FLOW
        for body in bodies(op)
    )


@attrs.define(eq=False)
class _CallOfModule:
    """A call of a module at a site.

    Attributes:
        call: the call as it was noted.
        site: the site of the call.
        caller: the call that has made this one; None for an outermost one.
        parts: the calls that this one makes.
        ops: the operators of the copy that this call runs itself.
        has_ops: True if this call runs operators itself in the vanilla graph.
    """

    call: LayerCall
    site: OpSite
    caller: _CallOfModule | None
    parts: list[_CallOfModule] = attrs.field(factory=list)
    ops: list[Any] = attrs.field(factory=list)
    has_ops: bool = False

    def runs(self) -> bool:
        """True if a run of the copy executes operators of this call or of its parts."""
        return bool(self.ops) or any(part.runs() for part in self.parts)

    def computes(self) -> bool:
        """True if this call or one of its parts has operators."""
        return self.has_ops or any(part.computes() for part in self.parts)


_Kind = Literal["enter", "leave", "op", "mark"]
_Event = tuple[tuple[int, int, int], _Kind, Any]
"""Something in the order of the program: its position, what it is, a call or an operator."""


class ModuleMarks:
    """The marks at modules of one graph of a copy.

    Args:
        building: the copy.
        boundaries: the marks of iterations that it has.
    """

    def __init__(self, building: Building, boundaries: Boundaries) -> None:
        assert building.modules is not None
        self._building = building
        self._boundaries = boundaries
        self._needed: Container[str] = ()
        self._fed: Container[int] = ()
        self._operations: Sequence[Any] = ()

    def add(self, site: OpSite, roots: Iterable[Any], fed: Container[int] = frozenset()) -> Any:
        """Add the marks to the copy, which is complete.

        Args:
            site: the outermost one.
            roots: operators of the copy that a run executes, and others for their sake.
            fed: ``id`` of tensors that a run is given, whichever operator makes them.

        Returns:
            The operator that runs after all marks; None without any.
        """
        roots = list(roots)
        graph = self._building.graph
        self._needed, self._fed = needed_by(roots, fed), fed
        self._operations = graph.get_operations()
        outputs = getattr(graph, "outputs", None) or [t for op in roots for t in op.outputs]
        chain = _Chain(self._building, Ends(graph, self._needed, outputs))
        for _, kind, what in self._events(site, None):
            if kind == "enter" and self._is_told(what):
                inputs = self._tensors(what, what.call.inputs)
                chain.enter(what, inputs)
            elif kind == "leave" and self._is_told(what):
                chain.leave(what, self._tensors(what, what.call.outputs))
            elif kind in ("op", "mark"):
                chain.run(what)
        return chain.last if self._building.tells_modules else None

    # -- what is called where ---------------------------------------------

    def _events(self, site: OpSite, around: _CallOfModule | None) -> list[_Event]:
        """The events at a site and at the sites of functions that it calls, in order.

        Args:
            around: the call of a module within which the site is.
        """
        if site.is_backward:
            return []
        operations = site.graph.get_operations()
        made = self._calls(site, around, operations)
        events: list[_Event] = []
        for call, found in made.items():
            events.append(((call.begin, 0, call.entered), "enter", found))
            events.append(((call.end, 0, call.left), "leave", found))
        innermost = layer_calls(site.graph)
        for index, op in enumerate(operations):
            own = innermost.get(op.name)
            owner = around if own is None else made.get(own, around)
            at = (index, 1, 0)
            child = site.children.get(op.name)
            if child is not None:
                events += [(at, kind, what) for _, kind, what in self._events(child, owner)]
            elif (id(site), op.name) in self._building.telling:
                new = site.ops[op.name]
                if new.name in self._needed:
                    events.append((at, "op", new))
            if owner is not None:
                self._note(owner, site, op)
        for position, mark in self._boundaries.get(id(site), ()):
            events.append(((position, -1, 0), "mark", mark))
        # A stable order: the events of a called function stay in theirs.
        events.sort(key=lambda event: event[0])
        return events

    def _calls(
        self, site: OpSite, around: _CallOfModule | None, operations: Sequence[Any]
    ) -> dict[LayerCall, _CallOfModule]:
        """The calls of modules at a site that tools are told of."""
        made: dict[LayerCall, _CallOfModule] = {}
        has_routes = not ROUTING.isdisjoint({op.type for op in operations})
        for call in sorted(calls_in(site.graph), key=lambda call: call.entered):
            if call.caller is not None and call.caller not in made:
                continue
            ops = operations[call.begin : call.end]
            if ops and ops[0].name in site.log.owners:
                # A gradient that computes a part of the forward pass again.
                continue
            if has_routes and any(map(_is_routed, ops)):
                continue
            caller = around if call.caller is None else made[call.caller]
            found = made[call] = _CallOfModule(call, site, caller)
            if caller is not None:
                caller.parts.append(found)
        return made

    def _note(self, owner: _CallOfModule, site: OpSite, op: Any) -> None:
        """Note the operators of the copy for a vanilla one that a call runs."""
        if op.name in site.log.owners or op.name in site.log.ambiguous or op.type in ROUTING:
            return
        if op.type in CALLS:
            owner.has_ops |= op.name not in site.children
            return
        if not (is_op(op.type) or op.type in CONTROL_FLOW):
            return
        owner.has_ops = True
        begin, end = self._building.segments.get((id(site), op.name), (0, 0))
        owner.ops += [new for new in self._operations[begin:end] if new.name in self._needed]

    def _is_told(self, called: _CallOfModule) -> bool:
        """True if a run enters a call: the run executes operators of it, or the call has none."""
        if called.computes():
            return called.runs()
        if called.caller is not None and not self._is_told(called.caller):
            return False
        return len(self._tensors(called, called.call.inputs)) == len(called.call.inputs)

    def _tensors(self, called: _CallOfModule, names: Sequence[TensorName]) -> list[Any]:
        """The tensors of the copy that a run computes or is given, among those of these names."""
        found = [called.site.tensors.get(id(called.site.tensor(name))) for name in names]
        return [t for t in found if is_routable(t) and self._is_known(t)]

    def _is_known(self, tensor: Any) -> bool:
        return tensor.op.name in self._needed or id(tensor) in self._fed


def _is_routed(op: Any) -> bool:
    """True if an operator is in a loop or branch of TensorFlow 1, or routes values there."""
    return op.type in ROUTING or _internals.control_flow_of(op) is not None


class _Chain:
    """The marks that have been added to a graph, each after the one before it.

    Args:
        building: the copy.
        ends: tells what to wait for instead of an operator.

    Attributes:
        last: the operator that runs after all others; None before the first.
    """

    def __init__(self, building: Building, ends: Ends) -> None:
        self._building = building
        self._ends = ends
        self.last: Any = None

    def enter(self, called: _CallOfModule, inputs: Sequence[Any]) -> None:
        """Add the mark before the operators of a call."""
        self._mark(called, False, inputs, [])
        own = {op.name for op in called.ops}
        for op in called.ops:
            if own.isdisjoint(sources(op)):
                _internals.add_control_input(op, self.last)

    def leave(self, called: _CallOfModule, outputs: Sequence[Any]) -> None:
        """Add the mark behind the operators of a call."""
        read = {name for op in called.ops for name in sources(op)}
        last = [op for op in called.ops if op.name not in read]
        self._mark(called, True, outputs, [end for op in last for end in self._ends.of(op)])

    def run(self, op: Any) -> None:
        """Let an operator of the copy, in which there are marks, run at this place."""
        if self.last is not None:
            _internals.add_control_input(op, self.last)
        self.last = self._ends.one(op)

    def _mark(
        self, called: _CallOfModule, is_exit: bool, tensors: Sequence[Any], ends: Sequence[Any]
    ) -> None:
        building, call = self._building, called.call
        waits = [*ends, *([] if self.last is None else [self.last])]
        path, modules = called.site.path_of(call), building.modules
        facts = {"id": path.text, "module": path.module.partition("/")[2]}
        assert modules is not None

        def tell(scopes: Sequence[LiveScope], values: Sequence[Any]) -> None:
            if is_exit:
                modules.leave(call, values)
            else:
                modules.enter(scopes, call, {**facts, "target": call.layer()}, values)

        self.last = insert_mark(building, tell, "amanda/module/", waits, tensors)
        building.tells_modules = True
