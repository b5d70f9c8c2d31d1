"""The replay engine: makes an instrumented copy of a graph, operator by operator.

::

    instrument = Instrument(dispatcher, building, ids, read)
    with instrument.building_copy():
        Replay(graph, instrument).function(site)        # a function; .body(site, roots) a graph

The operators of the vanilla graph are created again in the copy, in topological order; operators
with actions are created between their routines (:mod:`amanda_tensorflow.graphs.instrument`). Calls
of functions are replayed in place, as TensorFlow's own inliner does, so that an operator and its
gradient are always in one graph; bodies of loops and branches become functions of their own. The
vanilla graph is only read.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import tensorflow as tf

from amanda.errors import CapabilityError
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building, identity_after
from amanda_tensorflow.graphs.executions import count_runs, counts_statically, moved
from amanda_tensorflow.graphs.frames import ENTRIES, run_in_order
from amanda_tensorflow.graphs.gradient_order import is_sum, note_loop, vanilla_order
from amanda_tensorflow.graphs.instrument import Instrument, separate
from amanda_tensorflow.graphs.marks import Marks
from amanda_tensorflow.graphs.model_inputs import ModelInputs
from amanda_tensorflow.graphs.module_marks import ModuleMarks
from amanda_tensorflow.graphs.running_vanilla import falling_back
from amanda_tensorflow.graphs.shapes import with_shapes
from amanda_tensorflow.graphs.sites import ForwardState, OpSite
from amanda_tensorflow.graphs.topological_order import ordered
from amanda_tensorflow.graphs.xla import refuse_compiled_only, warn_about_xla
from amanda_tensorflow.operators.types import CALLS, CONTROL_FLOW, UNROUTABLE, is_op, runs_functions

_UNIQUE = itertools.count()

Changes = Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]]]
"""Maps type and attributes of a vanilla operator to those of the new one."""


class Replay:
    """Makes a copy of a graph.

    Args:
        graph: the graph to add to; it is the default graph while operators are added.
        instrument: adds the operators that are operators to tools.
        replace: callable (site, op) that returns the builder of a substitute operator, or None
            where an operator like the vanilla one is added.
        model: reads the inputs that a run gives to its model; None to read nothing.
    """

    def __init__(
        self,
        graph: Any,
        instrument: Instrument,
        replace: Callable[[OpSite, Any], Callable[[Sequence[Any]], Any] | None] | None = None,
        model: ModelInputs | None = None,
    ) -> None:
        self._graph = graph
        self._replace = replace
        self._model = model
        self._instrument = instrument
        self._marks: Marks | None = None
        self._boundaries: dict[int, list[tuple[int, Any]]] = {}
        instrument.create = self.create
        instrument.rewrite_op = self.rewrite_branches

    # -- functions --------------------------------------------------------

    def function(self, site: OpSite, outputs: int | None = None, is_branch: bool = False) -> None:
        """Make the copy's graph a function with the signature of the site's.

        Args:
            outputs: how many outputs it has; None for all of the graph's. A tape adds some to a
                graph that the function does not return.
            is_branch: whether a loop or branch runs it.
        """
        source, graph, building = site.graph, self._graph, self._instrument.building
        self._placeholders(site)
        self._begin_marks(site)
        self.body(site)
        with graph.as_default(), _internals.stop_recording():
            graph.outputs = [
                self._returned(self.final(site, tensor), tensor)
                for tensor in source.outputs[:outputs]
            ]
            if is_branch:
                building.wait_at_outputs()
        ends = [new for op in source.control_outputs for new in site.controls(op)]
        ends += building.late_nodes(graph.outputs)
        ends += self._end_marks(site, ends)
        ends += self._module_marks(site, ends, is_branch)
        if self._model is not None and building.is_changed:
            ends += self._model.read(building, site)
        elif self._model is not None:
            self._model.look(site)
        graph.control_outputs = list(dict.fromkeys(ends))
        graph.structured_outputs = source.structured_outputs
        graph.structured_input_signature = source.structured_input_signature
        _internals.share_variables(source, graph)

    def _placeholders(self, site: OpSite) -> None:
        """Add the placeholders of a function."""
        graph = self._graph
        with graph.as_default(), tf.name_scope(""):
            for tensor in site.graph.inputs:
                inner = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)
                _internals.copy_handle_data(tensor, inner)
                graph.inputs.append(inner)
                site.tensors[id(tensor)] = inner
                site.ops[tensor.op.name] = inner.op

    def _begin_marks(self, site: OpSite) -> None:
        """Add the mark with which an iteration begins, where runs of the copy are iterations."""
        passes, iterations = self._instrument.building.inner_passes, site.iterations
        if passes is None or iterations is None or not (site.passing or iterations.ends):
            return
        marks = self._marks = Marks(self._instrument.building)
        if site.passing == "pass":
            told = iterations.trains, iterations.differentiates
            marks.add(partial(passes.begin, site.ids, *told))
            self._note_boundary(site, -1)

    def _end_marks(self, site: OpSite, ends: Sequence[Any]) -> list[Any]:
        """Add the mark with which an iteration ends; returns the last mark, if there is one.

        Args:
            ends: operators that run though nothing reads them.
        """
        graph, marks = self._graph, self._marks
        if marks is None:
            return []
        passes, iterations = self._instrument.building.inner_passes, site.iterations
        assert passes is not None
        assert iterations is not None
        if site.passing:
            is_pass = site.passing == "pass"
            end = partial(passes.end, site.ids, iterations.trains)
            marks.add(end if is_pass else passes.step)
            self._note_boundary(site, _internals.count_operations(site.graph) + 1)
        marks.add_waits([*(tensor.op for tensor in graph.outputs), *ends])
        if site.passing:
            # The runtime may leave out what nothing reads, and begin the next run of a loop's body.
            with graph.as_default(), _internals.stop_recording():
                graph.outputs = [identity_after(t, [marks.last]) for t in graph.outputs]
        marks.finish([*(tensor.op for tensor in graph.outputs), *ends])
        return [marks.last]

    def _note_boundary(self, site: OpSite, position: int) -> None:
        """Note the place of the last mark among the operators of its site."""
        assert self._marks is not None
        self._boundaries.setdefault(id(site), []).append((position, self._marks.last))

    def _module_marks(self, site: OpSite, ends: Sequence[Any], is_branch: bool) -> list[Any]:
        """Add the marks at modules of a function; returns the last one, if there is one.

        Args:
            ends: operators that run though nothing reads them.
        """
        graph = self._graph
        roots = [*(tensor.op for tensor in graph.outputs), *ends]
        last = self.module_marks(site, roots)
        if last is None:
            return []
        if is_branch:
            # The runtime may leave out what nothing reads, and begin the next run of a loop's body.
            with graph.as_default(), _internals.stop_recording():
                graph.outputs = [identity_after(t, [last]) for t in graph.outputs]
        return [last]

    def module_marks(
        self, site: OpSite, roots: Iterable[Any], fed: Container[int] = frozenset()
    ) -> Any:
        """Add the marks at modules; returns the operator that runs after them, None without any.

        Args:
            roots: operators of the copy that a run executes, and others for their sake.
            fed: ``id`` of tensors that a run is given, whichever operator makes them.
        """
        building = self._instrument.building
        if building.modules is None:
            return None
        with _internals.stop_recording():
            return ModuleMarks(building, self._boundaries).add(site, roots, fed)

    def _returned(self, new: Any, old: Any) -> Any:
        """A tensor of the copy with the static shape of the vanilla one, which the user sees."""
        if new.dtype not in UNROUTABLE and new.shape.rank is None:
            new.set_shape(old.shape)
        return new

    # -- operators --------------------------------------------------------

    def body(self, site: OpSite, only: Iterable[Any] | None = None) -> None:
        """Add the operators of a site to the copy.

        Args:
            only: some operators, added with those that they need; None for all.
        """
        operations = site.graph.get_operations()
        roots = operations if only is None else only
        late: list[tuple[Any, int, Any]] = []
        order, boundaries = self._with_boundaries(site, ordered(site, roots))
        building = self._instrument.building
        with self._graph.as_default(), _internals.stop_recording(), self._counting(site, order):
            for op in order:
                self._pass_boundary(site, boundaries.get(op.name))
                if op.name in site.ops or op.name in site.skipped:
                    continue
                if self._instrument.gradients.is_dead(site, op):
                    site.skipped[op.name] = op
                else:
                    with self._marks.after() if self._marks else nullcontext():
                        self._add(site, op, late)
            for op, index, tensor in late:
                _internals.update_input(site.ops[op.name], index, site.tensors[id(tensor)])
        is_function = site.parent is None and not building.takes_feeds
        if is_function and building.entries and building.has_python:
            run_in_order(self._graph, building.entries)

    def _with_boundaries(
        self, site: OpSite, order: Sequence[Any]
    ) -> tuple[Sequence[Any], dict[str, int]]:
        """The operators in the order of iterations, and those before which some have ended.

        Args:
            order: the operators, each after those that it needs.
        """
        ends = site.iterations.ends if site.iterations is not None and self._marks else ()
        if not ends:
            return order, {}
        position = {op.name: i for i, op in enumerate(site.graph.get_operations())}
        part: dict[str, int] = {}
        for op in order:
            own = bisect.bisect_right(ends, position[op.name])
            needed = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            part[op.name] = max([own, *(part.get(before.name, 0) for before in needed)])
        parts = sorted(order, key=lambda op: part[op.name])
        boundaries, last = dict[str, int](), 0
        for op in parts:
            if part[op.name] > last:
                boundaries[op.name], last = part[op.name] - last, part[op.name]
        return parts, boundaries

    def _pass_boundary(self, site: OpSite, ended: int | None) -> None:
        """Tell that some iterations have ended before the operator that is added next."""
        passes = self._instrument.building.inner_passes
        for _ in range(ended or 0):
            assert passes is not None
            assert self._marks is not None
            self._marks.add(partial(passes.go_on, site.root_ids))
            assert site.iterations is not None
            passed = len(self._boundaries.get(id(site), ())) - (site.passing == "pass")
            self._note_boundary(site, site.iterations.ends[passed])

    @contextmanager
    def _counting(self, site: OpSite, order: Sequence[Any]) -> Iterator[None]:
        """Within it, operators that run once in each run of the copy have counters, not nodes."""
        building = self._instrument.building
        outer = building.runs_once
        is_once = site.parent is None or outer
        building.runs_once = is_once and counts_statically(order)
        try:
            yield
        finally:
            building.runs_once = outer

    def final(self, site: OpSite, tensor: Any) -> Any:
        """The tensor of the copy for a vanilla one, as it is returned or fetched."""
        final = self._instrument.final(site, tensor)
        if final is None and site.skipped:
            self._revive(site, [tensor])
            final = self._instrument.final(site, tensor)
        return final

    def _revive(self, site: OpSite, tensors: Iterable[Any]) -> None:
        """Add the operators of these tensors, which were left out, after all."""
        for tensor in tensors:
            op = site.skipped.pop(tensor.op.name, None)
            if op is not None:
                for before in op.control_inputs:
                    self._revive(site, before.outputs)
                self._add(site, op, [])

    def _add(self, site: OpSite, op: Any, late: list[tuple[Any, int, Any]]) -> None:
        """Add an operator.

        Args:
            late: gets operators, with index and vanilla tensor of an input that comes later.
        """
        callees = self._callees(op)
        if callees is None or runs_functions(op.type):
            self._instrument.dispatcher.not_seen(f"functions that {op.type} runs in a graph")
        building = self._instrument.building
        begin = self._graph.version
        inputs, is_complete = self._inputs(site, op, late)
        if callees and (op.type in CALLS or op.type in callees):
            ((callee,),) = callees.values()
            if not (callee.must_compile and self._compiled(site, op, callee, inputs)):
                self._call(site, op, callee, inputs)
        elif callees:
            self._branches(site, op, inputs, callees)
        elif is_op(op.type) and is_complete:
            self._instrument.op(site, op, inputs)
        else:
            self._instrument.plain(site, op, self.create(site, op, inputs))
        if building.modules is not None:
            building.segments[id(site), op.name] = begin, self._graph.version

    def _inputs(
        self, site: OpSite, op: Any, late: list[tuple[Any, int, Any]]
    ) -> tuple[list[Any], bool]:
        """Return the inputs of an operator in the copy, and whether they are all there.

        An input may come later: the back edge of a loop of TensorFlow 1. Any other input stands in
        for it meanwhile.

        Args:
            late: gets the operator, with index and vanilla tensor of each such input.
        """
        inputs = self._instrument.inputs(site, op)
        if site.skipped and any(tensor is None for tensor in inputs):
            self._revive(site, [t for t, new in zip(op.inputs, inputs, strict=True) if new is None])
            inputs = self._instrument.inputs(site, op)
        missing = [i for i, tensor in enumerate(inputs) if tensor is None]
        for index in missing:
            late.append((op, index, op.inputs[index]))
            inputs[index] = next(tensor for tensor in inputs if tensor is not None)
        return inputs, not missing

    def create(
        self,
        site: OpSite,
        op: Any,
        inputs: Sequence[Any],
        waits: Sequence[Any] = (),
        changes: Changes | None = None,
    ) -> Any:
        """Add an operator like a vanilla one.

        Args:
            inputs: its inputs in the copy.
            waits: nodes of the copy that it has to wait for besides.
        """
        graph = self._graph
        substitute = None if self._replace is None else self._replace(site, op)
        order = vanilla_order(site.producers, op) if is_sum(op) else None
        if order is not None:
            inputs = [inputs[index] for index in order]
            self._instrument.building.is_changed = True
        building = self._instrument.building
        late = [*building.late_nodes(inputs), *waits]
        waits, looks = building.split_looks(op.type, op, late)
        controls = self._controls(site, op, inputs, waits)
        with graph.control_dependencies(None), _internals.waiting_for(graph, controls):
            if substitute is not None:
                return substitute(inputs)
            new = self._node_like(site, op, inputs, changes)
        if looks:
            looks = building.last_of(looks)
            building.late.update({id(tensor): list(looks) for tensor in new.outputs})
        self._note_added(site, op, new)
        return new

    def _note_added(self, site: OpSite, op: Any, new: Any) -> None:
        """Give an operator of the copy the device of the vanilla one, and note it."""
        if self._marks is not None:
            self._marks.note(new)
        if new.type in ENTRIES:
            self._instrument.building.enter(new)
        device = op.device or site.device
        if device:
            _internals.set_device(new, device)
        for old, tensor in zip(op.outputs, new.outputs, strict=True):
            if old.dtype in UNROUTABLE:
                _internals.copy_handle_data(old, tensor)

    def _node_like(
        self, site: OpSite, op: Any, inputs: Sequence[Any], changes: Changes | None
    ) -> Any:
        """Return a new operator in place of a vanilla one; arguments of :meth:`create`."""
        graph, kind, attributes = self._graph, op.type, _internals.attributes_proto(op)
        self._relocate(site, attributes)
        if changes is not None:
            kind, attributes = changes(kind, attributes)
        return with_shapes(
            op,
            inputs,
            lambda: _internals.create_op_in(
                graph,
                kind,
                list(inputs),
                [tensor.dtype for tensor in op.outputs],
                input_types=_reference_types(op),
                name=_internals.unique_name(graph, site.prefix + op.name) + "/",
                attrs=attributes,
                op_def=op.op_def if kind == op.type else None,
                compute_device=False,
            ),
        )

    def _controls(
        self, site: OpSite, op: Any, inputs: Sequence[Any], waits: Sequence[Any]
    ) -> list[Any]:
        """The control dependencies of a new operator, `waits` last; arguments of :meth:`create`."""
        controls = [new for before in op.control_inputs for new in site.controls(before)]
        if self._marks is not None:
            controls += self._marks.before(op.type, inputs, [*controls, *waits])
        return [*controls, *waits]

    def _relocate(self, site: OpSite, attributes: dict[str, Any]) -> None:
        """Let attributes name frames, and in ``_class`` (colocation) operators, of the copy."""
        if not site.prefix:
            return
        if "frame_name" in attributes:
            # Two calls of one function run two loops.
            frame = site.prefix.encode() + attributes["frame_name"].s
            attributes["frame_name"] = _internals.AttrValue(s=frame)
        found = attributes.get("_class")
        if found is None:
            return
        names = [bytes(name) for name in found.list.s]
        moved = [
            b"loc:@" + site.ops[name[5:].decode()].name.encode()
            for name in names
            if name.startswith(b"loc:@") and name[5:].decode() in site.ops
        ]
        if moved:
            attributes["_class"] = _internals.AttrValue(
                list=_internals.AttrValue.ListValue(s=moved)
            )
        else:
            del attributes["_class"]

    # -- functions that operators run -------------------------------------

    def _callees(self, op: Any) -> dict[str, list[Any]] | None:
        """By attribute, the functions whose operators are replayed with `op`; mostly none.

        Returns:
            None if the graph does not know one of them: `op` runs as it is.
        """
        is_call = op.type in CALLS or _internals.is_function_call(op)
        if not is_call and op.type not in CONTROL_FLOW:
            return {}
        callees = _internals.callees_of(op)
        is_unknown = any(None in functions for functions in callees.values())
        return None if is_unknown else callees

    def _call(self, site: OpSite, op: Any, callee: Any, inputs: Sequence[Any]) -> None:
        """Replay a called function in place of the call.

        Two nodes keep the call's control dependencies: operators without inputs wait for ``start``,
        and operators that wait for the call wait for ``done``.

        Args:
            inputs: its inputs in the copy.
        """
        inner = self._instrument.called(site, op, callee.graph)
        site.children[op.name] = inner
        inner.side_effects = callee.side_effects
        given = separate(inputs) if callee.is_differentiated_as_one else inputs
        for tensor, outer, new in zip(callee.graph.inputs, op.inputs, given, strict=True):
            inner.sources[id(tensor)] = (site, outer)
            inner.tensors[id(tensor)] = new
            inner.ops[tensor.op.name] = new.op
        waits = [new for before in op.control_inputs for new in site.controls(before)]
        start = self._node(f"{site.prefix}{op.name}/amanda/start", waits) if waits else None
        size = _internals.count_operations(self._graph)
        is_changed = self._instrument.building.changes_in(lambda: self.body(inner))
        if start is not None:
            self._delay(start, size)
        outputs = self._end_call(site, op, inner)
        if inner.is_stacked and is_changed:
            pairs = zip(op.outputs, inner.graph.outputs, strict=False)
            versions = {id(old): inner.versions(tensor) for old, tensor in pairs}
            site.saved[op.name] = {old: found for old, found in versions.items() if found}
        if is_changed and callee.is_differentiated_as_one:
            self._derive_anew(site, op, given, outputs)

    def _delay(self, start: Any, since: int) -> None:
        """Let operators without inputs that were added since then wait for a node."""
        for new in _internals.operations_since(self._graph, since):
            if not new.inputs and not new.control_inputs:
                _internals.add_control_input(new, start)

    def _end_call(self, site: OpSite, op: Any, inner: OpSite) -> list[Any]:
        """Connect the outputs of a called function to what reads those of the call; return them."""
        outputs = [self.final(inner, tensor) for tensor in inner.graph.outputs[: len(op.outputs)]]
        ends = [new for o in inner.side_effects for new in inner.controls(o)]
        done = self._node(f"{site.prefix}{op.name}/amanda/done", [*ends, *(t.op for t in outputs)])
        site.ops[op.name] = done
        for old, tensor in zip(op.outputs, outputs, strict=True):
            site.put(old, tensor)
        return outputs

    def _derive_anew(
        self, site: OpSite, op: Any, given: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Derive the gradient of a call, loop or branch in the copy.

        The gradient in the graph is that of the vanilla functions.

        Args:
            given: its inputs in the copy, which nothing else reads.
            outputs: its outputs in the copy.
        """
        state = site.states[op.name] = ForwardState(site.op_id(op), site.key(op))
        state.replaced = list(given), list(outputs)

    def _compiled(self, site: OpSite, op: Any, callee: Any, inputs: Sequence[Any]) -> bool:
        """Replay a call of a function that XLA compiles as such a call.

        Returns:
            False if the function cannot be compiled any more: it runs Python, or its gradient,
            which is in the graph, has changed.
        """
        branch = self._branch(site, op, callee, "", callee.attributes)
        building = branch.building
        is_differentiated = bool(site.calls_of(op.name))
        if building.has_python or (building.may_change and is_differentiated):
            name = callee.graph.name
            with falling_back(self._instrument.dispatcher, building, f"function {name}") as made:
                refuse_compiled_only(callee.graph, building)
            if made.is_made:
                warn_about_xla(name)
                return False
            new = self.create(site, op, inputs)
            note_loop(new, op)
            _internals.differentiate_as(new, callee.graph, callee)
            self._instrument.plain(site, op, new)
            return True

        def changes(kind: str, attributes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            attributes["f"] = _internals.renamed(attributes["f"], [branch.function.name])
            return kind, attributes

        new = self.create(site, op, inputs, changes=changes)
        note_loop(new, op)
        _internals.differentiate_as(new, branch.graph, callee)
        moved(building, self._instrument.building, new)
        self._instrument.plain(site, op, new)
        return True

    def _node(self, name: str, waits: Sequence[Any]) -> Any:
        """A NoOp that waits for other nodes."""
        graph = self._graph
        with graph.control_dependencies(None), graph.control_dependencies(list(waits)):
            return graph.create_op("NoOp", [], [], name=graph.unique_name(name) + "/")

    def _made_branches(
        self, site: OpSite, op: Any, attribute: str, callees: Sequence[Any]
    ) -> list[Branch]:
        """Return the instrumented bodies of one attribute of a loop or branch.

        In ids they are called ``body``, or ``branches0``, ``branches1``, ...
        """
        if len(callees) == 1:
            return [self._branch(site, op, callees[0], attribute)]
        return [self._branch(site, op, of, f"{attribute}{i}") for i, of in enumerate(callees)]

    def _branches(
        self, site: OpSite, op: Any, inputs: Sequence[Any], callees: Mapping[str, Sequence[Any]]
    ) -> None:
        """Replay a loop or branch, with instrumented bodies.

        Args:
            callees: its vanilla bodies by attribute.
        """
        made = {name: self._made_branches(site, op, name, of) for name, of in callees.items()}
        buildings = [branch.building for several in made.values() for branch in several]
        has_python = any(building.has_python for building in buildings)

        def changes(kind: str, attributes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            for attribute, several in made.items():
                attributes[attribute] = _internals.renamed(
                    attributes[attribute], [branch.function.name for branch in several]
                )
            return (kind.removeprefix("Stateless") if has_python else kind), attributes

        is_stale = bool(site.calls_of(op.name)) and any(b.may_change for b in buildings)
        given = separate(inputs) if is_stale else inputs
        new = self.create(site, op, given, changes=changes)
        self._note_branches(new, made)
        note_loop(new, op)
        if is_stale:
            self._derive_anew(site, op, given, new.outputs)
        self._instrument.plain(site, op, new)
        if any(building.tells_modules for building in buildings):
            self._instrument.building.telling.add((id(site), op.name))

    def _note_branches(self, op: Any, made: Mapping[str, Sequence[Branch]]) -> None:
        """Let a loop or branch of the copy run in order if it runs Python, and know its bodies."""
        if any(branch.building.has_python for several in made.values() for branch in several):
            _internals.run_in_order(op)
        graphs = {name: [branch.graph for branch in several] for name, several in made.items()}
        _internals.remember_branches(op, graphs)

    def _branch(
        self,
        site: OpSite,
        op: Any,
        callee: Any,
        label: str,
        attributes: Mapping[str, Any] | None = None,
    ) -> Branch:
        """Make an instrumented body or branch of `op`.

        Args:
            callee: the vanilla function.
            label: tells the bodies of `op` apart in ids.
            attributes: those of the new function.
        """
        source = callee.graph
        graph = _internals.FuncGraph(_internals.unique_function_name(f"{source.name}_amanda"))
        graph.outer_graph = self._graph
        inner, instrument = self._instrument.branch(site, op, source, label, graph)
        if label and site.iterations is not None:
            inner.iterations, inner.passing = site.iterations.within(op, source)
        return self._made(callee, inner, instrument, label, attributes or {})

    def _made(
        self,
        callee: Any,
        inner: OpSite,
        instrument: Instrument,
        label: str,
        attributes: Mapping[str, Any],
    ) -> Branch:
        """Replay a body and make a function of it, which the copy's graph then knows.

        Args:
            label: tells the bodies of an operator apart; "" for a function that is called.
        """
        graph, building = instrument.building.graph, instrument.building
        with instrument.building_copy():
            Replay(graph, instrument).function(inner, is_branch=bool(label))
        if label:
            count_runs(building, is_loop=label == "body")
        _refuse_captures(graph)
        name = f"amanda_{next(_UNIQUE)}_{inner.graph.name}"
        function = _internals.function_from_graph(
            name, graph, dict(attributes), function_type=callee.function_type
        )
        _internals.add_function(self._graph, function)
        _internals.keep_alive(self._graph, (function, graph))
        self._instrument.building.absorb(building)
        return Branch(function, graph, building)

    def rewrite_branches(self, op: Any) -> None:
        """Instrument the bodies of a loop or branch in a gradient that was derived in the copy."""
        for attribute, callees in (self._callees(op) or {}).items():
            made = []
            for callee in callees:
                name = _internals.unique_function_name(f"{callee.graph.name}_amanda")
                graph = _internals.FuncGraph(name)
                graph.outer_graph = self._graph
                inner, instrument = self._instrument.gradient_branch(callee.graph, graph)
                made.append(self._made(callee, inner, instrument, attribute, {}))
            if any(branch.building.is_changed for branch in made):
                names = [branch.function.name for branch in made]
                _internals.set_functions(op, attribute, names)
                self._note_branches(op, {attribute: made})


@attrs.frozen(eq=False)
class Branch:
    """An instrumented body or branch.

    Attributes:
        function: its function.
        graph: the graph of that.
        building: what was inserted.
    """

    function: Any
    graph: Any
    building: Building


def _refuse_captures(graph: Any) -> None:
    """Refuse a body that captures tensors: its operator gives it no further inputs.

    Raises:
        CapabilityError: a traced routine uses a tensor from outside of the body.
    """
    if graph.external_captures:
        names = ", ".join(str(t.name if hasattr(t, "name") else t) for t in graph.external_captures)
        raise CapabilityError(
            f"a traceable routine in the loop or branch {graph.name} uses tensors from "
            f"outside of it ({names:.120}); let it use constants (numpy arrays), or leave out "
            "@amanda.traceable"
        )


def _reference_types(op: Any) -> list[Any] | None:
    """The types of all inputs, if some of them are references to variables; else None."""
    types = [tensor.dtype for tensor in op.inputs]
    if not any(_internals.is_reference(kind) for kind in types):
        return None
    return _internals.input_types(op)
