"""Adds one operator to a copy: runs its analyses, and inserts its routines around it.

:class:`~amanda_tensorflow.graphs.replay.Replay` calls :meth:`Instrument.op` for each operator of a
vanilla graph that is one to tools.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import BackwardExecution, OpHandle
from amanda.engine.dispatch import OpExecution
from amanda.engine.plan import ActionPlan
from amanda.errors import CapabilityError, CoverageWarning
from amanda.interface.action import Action
from amanda.interface.specs import Phase
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import GradientCall
from amanda_tensorflow.gradient_map.recovery import is_plumbing
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.frames import is_in_loop
from amanda_tensorflow.graphs.gradient_order import restore_order
from amanda_tensorflow.graphs.gradients import ForwardView, GraphGradients
from amanda_tensorflow.graphs.iterations import GraphIterations
from amanda_tensorflow.graphs.known_graphs import GraphIds, IdentifiedOp
from amanda_tensorflow.graphs.op_call import GraphBackwardCall, GraphOpCall
from amanda_tensorflow.graphs.replacement_captures import ReplacementCapture, captured_tensors
from amanda_tensorflow.graphs.replacement_gradients import leave
from amanda_tensorflow.graphs.run_time_routines import RunTimeRoutine, is_routable
from amanda_tensorflow.graphs.sites import ForwardState, GraphSegment, LazyAttributes, OpSite
from amanda_tensorflow.graphs.variable_origins import ReadVariable, WriteVariable, variable_origin
from amanda_tensorflow.keras_layers.module_names import is_plain_module
from amanda_tensorflow.keras_layers.paths import LayerIds
from amanda_tensorflow.operators.description import NamedOperator, input_names
from amanda_tensorflow.operators.phases import phase_of_node
from amanda_tensorflow.operators.replacements import replaced_outputs
from amanda_tensorflow.operators.types import CONTROL_FLOW, DATASET_LOOPS, is_differentiable

Create = Callable[[OpSite, Any, Sequence[Any], Sequence[Any]], Any]
"""Adds a vanilla operator to the copy, given its site, its inputs there and nodes to wait for."""

AMBIGUOUS = "backward ops loaded, or built before `import amanda`, whose forward op is ambiguous"
UNOWNED = "backward ops of no forward op in the scope"
SCOPE = "amanda"
"""Name scope of all operators that are inserted into a copy."""


class Instrument:
    """Adds the operators of one copy, with the routines around them.

    Args:
        dispatcher: core's side of the driver.
        building: the copy.
        ids: the ids of the graphs that have been met.
        read: reads a variable.

    Attributes:
        keys: the keys of the forward operators that the copy depends on.
        ambiguous: names of the backward operators whose forward operator is ambiguous.
        write: writes a variable of a session; None in functions.
        create: adds operators to the copy; set by the replay.
        rewrite_op: instruments the bodies of a loop or branch in a gradient that was derived in
            the copy; set by the replay.
    """

    def __init__(
        self, dispatcher: GraphDispatcher, building: Building, ids: GraphIds, read: ReadVariable
    ) -> None:
        self.dispatcher = dispatcher
        self.building = building
        self.ids = ids
        self.read = read
        self.write: WriteVariable | None = None
        self.gradients = GraphGradients(dispatcher, building, ids, read, self.rewrite_branches)
        self.keys: list[str] = []
        self.ambiguous: list[str] = []
        self.create: Create = _nothing_is_replayed
        self.rewrite_op: Callable[[Any], None] | None = None
        self._counts: collections.Counter[str] = collections.Counter()

    @contextmanager
    def building_copy(self) -> Iterator[None]:
        """Within it, routines are inserted into this copy."""
        with self.dispatcher.build(self.building):
            yield

    def warn(self, name: str) -> None:
        """List the ambiguous operators of the graph of this name, if tools would see them."""
        if self.ambiguous and any(s.analyses_backward() for s in self.building.scopes):
            shown = ", ".join(self.ambiguous[:8]) + (", ..." if len(self.ambiguous) > 8 else "")
            warnings.warn(
                f"{name} was loaded, or traced before `import amanda`: of {len(self.ambiguous)} of "
                f"its operators it cannot be told whose gradient they are, and they are not "
                f"instrumented ({shown})",
                CoverageWarning,
                stacklevel=2,
            )

    # -- other graphs -----------------------------------------------------

    def called(self, site: OpSite, op: Any, graph: Any) -> OpSite:
        """The site of the function that `op` calls, replayed in place of the call."""
        call = site.log.owners.get(op.name)
        ids = f"{site.ids}/{op.name}"
        # The gradient of its operators may be in another function, which is replayed later.
        layer_ids = LayerIds(site.path(op), site.layer_ids.counts)
        self.ids.add_body(graph, ids, layer_ids, {})
        forward = None
        if call is not None:
            outer = site.site_of(call.forward.graph())
            forward = None if outer is None else outer.children.get(call.forward.name)
        return OpSite(
            graph,
            ids=ids,
            layer_ids=layer_ids,
            prefix=f"{site.prefix}{op.name}/",
            parent=site,
            forward=forward,
            is_gradient=call is not None or site.is_backward,
            is_stacked=site.is_stacked or site.is_stacked_at(op.name),
            device=op.device or site.device,
            iterations=None if site.iterations is None else GraphIterations.of(graph),
        )

    def branch(
        self, site: OpSite, op: Any, source: Any, label: str, graph: Any
    ) -> tuple[OpSite, Instrument]:
        """The site of a body or branch of `op`, and the instrument that adds its operators.

        Args:
            source: the vanilla graph of the body.
            label: tells the bodies of `op` apart in ids.
            graph: the copy of the body.
        """
        inner = OpSite(
            source,
            ids="/".join(filter(None, (site.ids, op.name, label))),
            layer_ids=LayerIds(site.path(op), site.layer_ids.counts),
            is_gradient=op.name in site.log.owners or site.is_backward,
        )
        count = len(source.inputs)
        if op.type in DATASET_LOOPS:
            count = len(op.get_attr("Targuments"))
        outer = list(op.inputs)[len(op.inputs) - count :]
        own = source.inputs[len(source.inputs) - count :]
        is_loop = op.type.endswith("While")
        for index, (placeholder, tensor) in enumerate(zip(own, outer, strict=True)):
            passed = index < len(source.outputs) and source.outputs[index] is placeholder
            if not is_loop or tensor.dtype == tf.resource or passed:
                inner.sources[id(placeholder)] = (site, tensor)
        handles = {k: variable_origin(*outer, exact=True) for k, outer in inner.sources.items()}
        known = {k: v for k, v in handles.items() if isinstance(v, _internals.EagerTensor)}
        self.ids.add_body(source, inner.ids, inner.layer_ids, known)
        building = Building(graph, self.building.scopes, needs_gradient=True)
        building.inner_passes, building.modules = self.building.inner_passes, self.building.modules
        instrument = Instrument(self.dispatcher, building, self.ids, self.read)
        instrument.keys, instrument.write = self.keys, self.write
        return inner, instrument

    def gradient_branch(self, source: Any, graph: Any) -> tuple[OpSite, Instrument]:
        """As :meth:`branch`, for a body in a gradient that was derived in the copy."""
        building = Building(graph, self.building.scopes, needs_gradient=True)
        instrument = Instrument(self.dispatcher, building, self.ids, self.read)
        instrument.keys = self.keys
        return OpSite(source, ids=source.name, is_gradient=True), instrument

    def rewrite_branches(self, since: int) -> None:
        """Instrument the loops and branches in a gradient that was derived in the copy.

        Args:
            since: how many operators the copy had before the gradient.
        """
        assert self.rewrite_op is not None
        added = _internals.operations_since(self.building.graph, since)
        restore_order(self.building.graph, added)
        for op in added:
            if op.type in CONTROL_FLOW:
                self.rewrite_op(op)

    # -- operators --------------------------------------------------------

    def inputs(self, site: OpSite, op: Any) -> list[Any]:
        """The inputs of an operator in the copy; None for a tensor that is not there yet."""
        call = self.gradients.owner(site, op)
        if call is None:
            return [self.final(site, tensor) for tensor in op.inputs]
        return [self.gradients.seen_by(site, call, tensor) for tensor in op.inputs]

    def final(self, site: OpSite, tensor: Any) -> Any:
        """The tensor of the copy that forward operators read for a vanilla one."""
        if site.producers:
            return self.gradients.final(site, tensor)
        return site.tensors.get(id(tensor))

    def op(self, site: OpSite, op: Any, inputs: Sequence[Any]) -> None:
        """Add an operator, with the routines around it."""
        call, added = self.gradients.owner(site, op), NewOp(site, op, inputs)
        self.building.begin(op.type)
        with self.building.graph.name_scope(f"{SCOPE}/{site.prefix}{op.name}/"):
            if op.name in site.log.ambiguous:
                self._not_owned(AMBIGUOUS)
                self.ambiguous.append(op.name)
                self._vanilla(added)
            elif call is not None:
                self._backward(added, call)
            elif (site.is_backward and op.name not in site.log.owners) or is_plumbing(op):
                self._vanilla(added)
            else:
                self._forward(added)
        self.building.close()

    def _vanilla(self, added: NewOp) -> None:
        """Add an operator that tools do not see."""
        new = self.create(added.site, added.source, added.inputs, ())
        self.plain(added.site, added.source, new)

    def plain(self, site: OpSite, op: Any, new: Any) -> None:
        """Note an operator that was added without routines."""
        site.ops[op.name] = new
        for old, tensor in zip(op.outputs, new.outputs, strict=True):
            site.put(old, tensor)

    def _settled(self, added: NewOp, new: Any, outputs: Sequence[Any]) -> None:
        """Note an operator that was added, and its outputs after the routines."""
        self.building.end(new)
        site, op = added.site, added.source
        site.ops[op.name] = new
        for old, tensor in zip(op.outputs, outputs, strict=True):
            site.put(old, tensor)
        nodes = [t.op for t in outputs if t.op is not new]
        controls = self.building.take_controls()
        controls += [node for t in outputs for node in self.building.late.get(id(t), ())]
        if nodes or controls:
            site.after[op.name] = [*nodes, *controls]
        if added.known is not None:
            self.ids.note(self.building.graph, new, added.known)

    # -- forward ----------------------------------------------------------

    def _forward(self, added: NewOp) -> None:
        """Add a forward operator, with the routines around it."""
        site, op = added.site, added.source
        op_id, key = site.op_id(op), site.key(op)
        self.keys.append(key)
        state = added.state = site.states[op.name] = ForwardState(op_id, key)
        added.known = IdentifiedOp(op_id, key, 0, site, op)
        plan = self.dispatcher.plan(op_id, key=key)
        execution: OpExecution | None = None
        if plan is None:
            execution = self.dispatcher.begin(self._call(added, op_id))
            plan = execution.plan
        if site.log.is_recovered:
            refuse_unknown_gradients(site, op, plan)
        new, used, outputs = self._executed(added, plan)
        if execution is not None:
            plan = execution.finish(outputs)
        state.plan = plan
        self._end(added, new, used, outputs)

    def _end(self, added: NewOp, new: Any, used: list[Any], computed: list[Any]) -> None:
        """Insert the routines after a forward operator that was added.

        Args:
            new: the operator, or the last one of its replacement.
            used: what it has computed with.
            computed: what it has computed.
        """
        building, plan = self.building, added.state.plan
        building.anchors = [new]
        before = len(building.routines)
        added.state.after, outputs = self._run(plan.after, computed)
        final = self._awaited(added, used, computed, outputs, before)
        for output, tensor in zip(computed, final, strict=True):
            if tensor is not output:
                self.dispatcher.note_substitute(output, tensor, plan.op_id)
        if plan.replace is not None:
            added.known = None
        self._settled(added, new, final)

    def _run(
        self, actions: Sequence[Action], tensors: list[Any]
    ) -> tuple[Sequence[GraphSegment], list[Any]]:
        """Insert routines. Returns the changes by differentiable ones, and the tensors."""
        segments = []
        for action in actions:
            if not action.differentiable:
                tensors = self.dispatcher.run(action, tensors)
                continue
            old = separate(tensors, action.positions(len(tensors)))
            tensors = self.dispatcher.run(action, old)
            changed = [i for i, t in enumerate(tensors) if t is not old[i]]
            segments.append(
                GraphSegment(changed, [old[i] for i in changed], [tensors[i] for i in changed])
            )
        return segments, tensors

    def _wait_for_read(self, inputs: Sequence[Any], used: Sequence[Any]) -> None:
        """The next operator reads `used` instead of `inputs`: it waits for the same nodes."""
        replaced = [old for old, new in zip(inputs, used, strict=True) if old is not new]
        self.building.controls += self.building.late_nodes(replaced)

    def _awaited(
        self,
        added: NewOp,
        inputs: Sequence[Any],
        computed: Sequence[Any],
        outputs: list[Any],
        since: int,
    ) -> list[Any]:
        """Let all who read an operator's outputs wait for the routines after it.

        The gradient reads what the operator has computed, and in a run that nothing else reads the
        runtime would leave the routines out.

        Args:
            inputs: what the operator has computed with.
            computed: what it has computed.
            outputs: these tensors after the routines.
            since: how many routines the copy had before them.

        Returns:
            The tensors that other operators read.
        """
        building, op, state = self.building, added.source, added.state
        inserted = building.routines[since:]
        nodes = [routine.op for routine in inserted if isinstance(routine, RunTimeRoutine)]
        nodes += [node for node in building.controls if node not in nodes]
        state.routines = nodes
        readers = list(readers_of(op))
        final = building.awaited(outputs, readers)
        saved = list(computed)
        if any(new is not old for new, old in zip(final, saved, strict=True)):
            building.controls += nodes
            saved = building.awaited(saved, readers)
        state.note_used(op, list(inputs), saved)
        return final

    def _executed(self, added: NewOp, plan: ActionPlan) -> tuple[Any, list[Any], list[Any]]:
        """Add a forward operator or its replacement behind the routines before it.

        Returns:
            The operator; what it computes with, and what it computes.
        """
        site, op, state, inputs = added.site, added.source, added.state, list(added.inputs)
        self.building.anchors = [c for o in op.control_inputs if (c := site.ops.get(o.name))]
        state.before, used = self._run(plan.before, inputs)
        self._wait_for_read(inputs, used)
        waits = self.building.take_controls()
        if plan.replace is not None:
            new, outputs = self._replaced(added, plan.replace, used, waits)
            return new, used, outputs
        is_looped = self.building.entries and is_in_loop(op)  # of TensorFlow 1
        given, derives_anew = used, is_ambiguous(site, op, used) and not is_looped
        if derives_anew:
            given = separate(used)
        new = self.create(site, op, given, waits)
        if derives_anew:
            state.replaced = given, list(new.outputs)
        return new, used, list(new.outputs)

    def _replaced(
        self, added: NewOp, action: Action, inputs: list[Any], waits: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Insert the replacement of an operator. Returns its operator and its outputs."""
        site, op, state = added.site, added.source, added.state
        _refuse_references(op, action)
        controls = [c for o in op.control_inputs for c in site.controls(o)]
        self.building.template = list(op.outputs)
        self.building.may_change = True
        with tf.control_dependencies([*controls, *waits]):
            given = separate(inputs)
            before = _internals.count_operations(self.building.graph)
            result = self.dispatcher.replace(action, given)
            outputs = replaced_outputs(result, action, len(op.outputs), tf.is_tensor)
        made = _internals.operations_since(self.building.graph, before)
        self.building.enter_loop(made, given)
        outputs = [_internals.identity(t) for t in outputs]
        state.replaced = given, outputs
        captured = captured_tensors(made, given)
        self.gradients.captures.note(ReplacementCapture(site, op.name, outputs, captured))
        if not outputs:
            # Who waits for the operator waits for all that takes its place.
            with tf.control_dependencies([*controls, *waits, *made]):
                return tf.no_op(), []
        if self.building.needs_gradient:
            outputs = leave(self.dispatcher, self.building, state, captured)
        return outputs[0].op, outputs

    def _call(self, added: NewOp, op_id: str) -> GraphOpCall:
        site, op, inputs = added.site, added.source, added.inputs
        attributes = LazyAttributes(op)
        return GraphOpCall(
            op=NamedOperator.of(op),
            op_id=op_id,
            inputs=inputs,
            names=input_names(op.type, len(inputs), attributes),
            attributes=attributes,
            module=site.module(op),
            own_key=site.key(op),
            phase=_phase(site, op),
            site=site,
            source=op,
            read=self.read,
            write=self.write,
        )

    # -- backward ---------------------------------------------------------

    def _backward(self, added: NewOp, call: GradientCall) -> None:
        """Add a backward operator, a part of this gradient call."""
        site, op, building = added.site, added.source, self.building
        inputs = list(added.inputs)
        forward = self.gradients.view(site, call)
        if forward is None:
            if not self.gradients.is_own(site, call):
                self._not_owned(UNOWNED)
            self._vanilla(added)
            return
        key = f"{forward.op_id}{'/grad' * forward.depth}/{op.type}"
        backward_id = f"{key}:{self._counts[key]}"
        self._counts[key] += 1
        self.keys.append(forward.key)
        added.state = site.states[op.name] = ForwardState(forward.op_id, forward.key)
        added.known = IdentifiedOp(forward.op_id, forward.key, forward.depth, site, op)
        execution = self._execution(added, call, forward, backward_id)
        before, after = execution.needed()
        used = list(execution.before(inputs)) if before else inputs
        self._wait_for_read(inputs, used)
        new = self.create(site, op, used, building.take_controls())
        building.anchors = [new]
        final = list(new.outputs)
        routines = len(building.routines)
        if after:
            building.template = building.likes = final
            final = list(execution.after(final, used))
        final = self._awaited(added, used, new.outputs, final, routines)
        self._settled(added, new, final)

    def _execution(
        self, added: NewOp, call: GradientCall, forward: ForwardView, backward_id: str
    ) -> BackwardExecution:
        """The backward operator as core is told of it."""
        site, op = added.site, added.source
        position = {name: i for i, name in enumerate(call.grad_inputs) if name is not None}
        names = [""] * len(op.outputs)
        for index in range(len(op.outputs)):
            at = position.get((op.name, index), len(forward.names))
            names[index] = forward.names[at] if at < len(forward.names) else ""
        scopes = self.building.scopes
        tensors = forward.inputs, forward.outputs
        handle = OpHandle(forward.op_id, scopes, *tensors, forward.key)
        view = NamedOperator(op.type, backward_id)
        parameter = functools.partial(self.gradients.parameter_of, site)
        likes = forward.likes
        described = GraphBackwardCall(view, backward_id, names, *tensors, op, likes, parameter)
        return BackwardExecution(self.dispatcher, handle, described)

    def _not_owned(self, why: str) -> None:
        """Count a backward operator whose forward operator is not known, if tools would see it."""
        if any(scope.analyses_backward() for scope in self.building.scopes):
            self.dispatcher.not_seen(why)


@attrs.define(eq=False)
class NewOp:
    """An operator that is added to the copy.

    Attributes:
        site: where the vanilla operator is.
        source: that operator.
        inputs: its inputs in the copy.
        state: of an operator that tools see, its state.
        known: its ids; None for one that has none.
    """

    site: OpSite
    source: Any
    inputs: Sequence[Any]
    state: Any = None
    known: IdentifiedOp | None = None


def _nothing_is_replayed(*args: Any) -> Any:
    raise AssertionError("no replay has begun")


def separate(tensors: Sequence[Any], only: Container[int] | None = None) -> list[Any]:
    """Identities of tensors: one that an operator reads twice then has two gradients.

    Tensors that have no gradient stay: behind an identity a constant would not be one any more,
    and ``EmptyTensorList`` and others need it.

    Args:
        only: the positions to copy; None for all.
    """
    return [
        _internals.identity(t)
        if is_routable(t) and is_differentiable(t) and (only is None or i in only)
        else t
        for i, t in enumerate(tensors)
    ]


def refuse_unknown_gradients(site: OpSite, op: Any, plan: ActionPlan) -> None:
    """Refuse actions on the gradient of an operator that was built before `import amanda`.

    Raises:
        CapabilityError: the plan has such actions, and the graph holds the gradient.
    """
    whole = [*plan.before_backward, *plan.after_backward]
    whole += [action for action in (plan.replace_backward, plan.replace) if action is not None]
    whole += [action for action in (*plan.before, *plan.after) if action.differentiable]
    if whole and site.calls_of(op.name):
        raise CapabilityError(
            f"{whole[0].routine} acts on the gradient of op {whole[0].op_id}, which was loaded, "
            "or built before `import amanda`, so that it is not known exactly; import amanda "
            "before the function is traced or the gradient is added to the graph"
        )


def is_ambiguous(site: OpSite, op: Any, inputs: Sequence[Any]) -> bool:
    """True if the gradient in the graph cannot tell two inputs of the operator apart.

    The vanilla operator reads one tensor twice, and routines have changed one of the two. The
    gradient is derived anew then.
    """
    seen: dict[int, Any] = {}
    if not any(seen.setdefault(id(t), n) is not n for t, n in zip(op.inputs, inputs, strict=True)):
        return False
    return bool(site.calls_of(op.name))


def readers_of(op: Any) -> Iterator[Any]:
    """The vanilla operators that read the outputs of an operator."""
    return (reader for tensor in op.outputs for reader in tensor.consumers())


def _refuse_references(op: Any, action: Action) -> None:
    """Refuse to replace an operator that returns a variable of TensorFlow 1 itself.

    Raises:
        CapabilityError: it does.
    """
    if any(tensor.dtype.base_dtype != tensor.dtype for tensor in op.outputs):
        raise CapabilityError(
            f"{action.routine} replaces op {action.op_id}, a {op.type} that returns a reference to "
            "a variable, which no other tensor can stand for; replace the operators that use the "
            "variable, or create it with use_resource=True"
        )


def _phase(site: OpSite, op: Any) -> Phase:
    """The phase of a forward operator."""
    layer = site.path(op).layer
    in_module = layer is not None and is_plain_module(layer())
    return phase_of_node(op, layer is not None and not in_module, in_module)
