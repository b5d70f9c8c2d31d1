"""Gradients that a graph holds already: their forward operators, and the changes that tools make.

Where forward and backward operators are in one graph, the gradient was built for the vanilla
operators. While such a graph is replayed,

* the operators of a gradient call (one call of a gradient function) read the tensors that the
  forward operator has computed with in the copy (contract rule 7);
* the gradients that the call receives and returns pass through the routines that act on the
  forward operator as a whole (contract rule 8);
* where the forward operator was replaced, or a routine takes part in differentiation, the gradient
  is derived anew in the copy, and the operators of the call are left out (contract rule 6).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import EMPTY_PLAN, ActionPlan
from amanda.errors import CapabilityError
from amanda.interface.action import Action
from amanda.interface.calls import KnownTensor
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import (
    ForwardOp,
    GradientCall,
    TensorName,
    forward_op,
    position_in,
    tensor_name,
)
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.frames import is_in_loop
from amanda_tensorflow.graphs.known_graphs import GraphIds
from amanda_tensorflow.graphs.replacement_captures import ReplacementCaptures
from amanda_tensorflow.graphs.shared_tensors import shared_tensor
from amanda_tensorflow.graphs.sites import ForwardState, LazyAttributes, OpSite
from amanda_tensorflow.graphs.sliced_gradients import SlicedGradients, indexing_ops
from amanda_tensorflow.graphs.variable_origins import ReadVariable, parameter_of, value_of
from amanda_tensorflow.graphs.vjp import after_routines, gradients_before, product
from amanda_tensorflow.operators.description import input_names
from amanda_tensorflow.operators.gradient_shapes import checked, gradient_shapes
from amanda_tensorflow.operators.types import is_op

Tensors = list[Any]


@attrs.frozen(eq=False)
class ForwardTensor(KnownTensor):
    """A forward tensor as a backward analysis reads it: called, it gives the tensor of the copy.

    Args:
        value: gives the value of the variable or constant behind a vanilla tensor of a site.
        site: where the operator is.
        vanilla: the vanilla tensor.
        copies: gives the tensors of the copy for the operator's inputs, or for its outputs; None if
            they are in another graph.
        index: its position among these.
    """

    _value: Callable[[OpSite, Any], Any]
    _site: OpSite
    _vanilla: Any
    _copies: Callable[[], Sequence[Any] | None]
    _index: int

    def __call__(self) -> Any:
        """The tensor of the copy; None if it is in another graph."""
        found = self._copies()
        return found[self._index] if found else None

    def constant(self) -> Any:
        """The value of a variable or constant; None for other tensors."""
        return self._value(self._site, self._vanilla)

    def parameter_name(self) -> str | None:
        """The path of a parameter that is neither cast nor reshaped; None for others."""
        return parameter_of(self._site, self._vanilla, exact=True)


@attrs.define(eq=False)
class ForwardView:
    """The forward operator of a gradient call.

    Attributes:
        op_id: its id.
        key: the key of its records.
        depth: 1 for the gradient of the operator itself, 2 for the gradient of that gradient, ...
        names: the declared names of its inputs.
        inputs, outputs: its tensors.
        likes: the vanilla inputs.
        plan: its plan, if `depth` is 1: actions on the whole operator act on its first gradient.
        state: the state of its replay, if it is in the same copy.
    """

    op_id: str
    key: str
    depth: int
    names: Sequence[str] = ()
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    likes: Sequence[Any] = ()
    plan: ActionPlan | None = None
    state: ForwardState | None = None


@attrs.define(eq=False)
class GradientWork:
    """The gradients of one gradient call after the changes that tools make.

    Attributes:
        outputs: the gradients that the call receives, by position.
        inputs: those that it returns, by position; None until one of them is read.
    """

    outputs: Tensors
    inputs: Tensors | None = None


class GraphGradients:
    """The gradients of one copy.

    Args:
        ids: the ids of the graphs that have been met.
        read: reads a variable.
        rewrite_branches: instruments the loops and branches among the operators that were added
            to the copy since it had this many.

    Attributes:
        captures: the tensors that replacements capture.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        building: Building,
        ids: GraphIds,
        read: ReadVariable,
        rewrite_branches: Callable[[int], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._building = building
        self._ids = ids
        self._read = read
        self._rewrite_branches = rewrite_branches
        self._views: dict[GradientCall, ForwardView] = {}
        self._sums: dict[str, GradientCall | None] = {}
        self._targets: dict[GradientCall, Any] = {}
        self._sites: dict[int, OpSite] = {}
        self.captures = ReplacementCaptures(self.of_outputs)

    def is_dead(self, site: OpSite, op: Any) -> bool:
        """True if an operator is part of a gradient that is derived anew."""
        call = site.log.owners.get(op.name)
        if call is None:
            return False
        there = site.site_of(call.forward.graph())
        state = None if there is None else there.states.get(call.forward.name)
        if state is None or state.replaced is None:
            return False
        return op.name not in indexing_ops(site, call)

    # -- the forward operators --------------------------------------------

    def owner(self, site: OpSite, op: Any) -> GradientCall | None:
        """The gradient call that an operator is a part of; None for forward operators.

        Operators that a gradient function computes again and then differentiates, as that of
        ``tf.recompute_grad`` does, are forward operators.
        """
        call = site.log.owners.get(op.name)
        if call is not None and site.is_recomputed(op.name, call):
            return None
        if call is None and op.type == "AddN" and site.producers:
            return self._sum(site, op)
        return call

    def _sum(self, site: OpSite, op: Any) -> GradientCall | None:
        """A gradient call for an addition of gradients, if `op` is one.

        It belongs to the operator whose output gradient it sums; a sum for a leaf belongs to the
        first operator that reads the leaf.
        """
        key = f"{id(site)}:{op.name}"
        if key in self._sums:
            return self._sums[key]
        made: GradientCall | None = None
        calls = [site.producers.get(tensor_name(tensor)) for tensor in op.inputs]
        if all(calls):
            last = max((call for of in calls for call in of or ()), key=site.position)
            target = self._differentiated(last, op.inputs)
            if target is not None:
                is_leaf = not is_op(target.op.type)
                forward = last.forward if is_leaf else ForwardOp.of(target.op)
                made = GradientCall(forward, (), (), (op.name,))
                self._targets[made] = target
        self._sums[key] = made
        return made

    def _differentiated(self, call: GradientCall, gradients: Iterable[Any]) -> Any:
        """The input of a call's forward operator whose gradient one of `gradients` is."""
        op = forward_op(call)
        names = {tensor_name(tensor) for tensor in gradients}
        if op is not None:
            for name, tensor in zip(call.grad_inputs, op.inputs, strict=False):
                if name in names:
                    return tensor
        return None

    def view(self, site: OpSite, call: GradientCall) -> ForwardView | None:
        """The forward operator of a gradient call; None if it has no id."""
        found = self._views.get(call)
        if found is None:
            found = self._found(site, call)
            if found is not None:
                # None is not kept: in a loop of TensorFlow 1 the forward operator may come later.
                self._views[call] = found
        return found

    def _found(self, site: OpSite, call: GradientCall) -> ForwardView | None:
        """The forward operator, looked for in this copy and then in graphs that were run before."""
        forward, depth = call.forward, 1
        here: OpSite = site
        while True:
            there = here.site_of(forward.graph())
            if there is None:
                return self._known(site, forward, depth)
            if forward.name not in there.log.owners:
                break
            forward, depth, here = there.log.owners[forward.name].forward, depth + 1, there
        state = there.states.get(forward.name)
        if state is None:
            return None
        op = there.graph.get_operation_by_name(forward.name)
        found = self._viewed(state.op_id, state.key, depth, op)
        if depth == 1:
            found.plan, found.state = state.plan, state
        found.inputs = self._seen(there, op.inputs, lambda: state.inputs)
        found.outputs = self._seen(there, op.outputs, lambda: state.outputs)
        return found

    def _known(self, site: OpSite, forward: ForwardOp, depth: int) -> ForwardView | None:
        """The forward operator in a graph that was run before; None if it has no id."""
        graph = forward.graph()
        known = self._ids.find(forward, self._sites)
        if known is None or known.site is None or graph is None:
            return None
        found = self._viewed(known.op_id, known.key, depth + known.depth, known.source)
        if found.depth == 1:
            found.plan = self._dispatcher.plan(known.op_id, key=known.key)
        op = graph.get_operation_by_name(forward.name)
        for name in ("inputs", "outputs"):
            vanilla, there = getattr(known.source, name), getattr(op, name)
            copies = partial(_captured, site, there, len(vanilla))
            setattr(found, name, self._seen(known.site, vanilla, copies))
        return found

    def _seen(
        self, site: OpSite, vanilla: Sequence[Any], copies: Callable[[], Sequence[Any] | None]
    ) -> list[ForwardTensor]:
        """The inputs or outputs of a forward operator as backward analyses read them."""
        told = self.value_of, site
        return [ForwardTensor(*told, tensor, copies, i) for i, tensor in enumerate(vanilla)]

    def _viewed(self, op_id: str, key: str, depth: int, op: Any) -> ForwardView:
        names = input_names(op.type, len(op.inputs), LazyAttributes(op))
        return ForwardView(op_id, key, depth, names, likes=op.inputs)

    def value_of(self, site: OpSite, tensor: Any) -> Any:
        """The value of the variable or constant behind a vanilla tensor; None for others."""
        return value_of(site, tensor, self._read)

    def parameter_of(self, site: OpSite, name: TensorName) -> str | None:
        """The path of the parameter whose gradient a tensor of this name is; None for others.

        The gradient of a sum hands its own on: that of the sum is then that of the parameter.
        """
        for call in site.producers.get(name, ()):
            view = self.view(site, call)
            inputs = view.inputs if view else ()
            for gradient, tensor in zip(call.grad_inputs, inputs, strict=False):
                if gradient == name and (found := tensor.parameter_name()):
                    return str(found)
        return None

    def is_own(self, site: OpSite, call: GradientCall) -> bool:
        """True if a call differentiates an inserted operator, or one that is none to tools."""
        forward = site.root(call.forward)
        graph = forward.graph()
        if graph is None:
            return False
        if self._ids.is_copy(graph):
            return True
        return not is_op(graph.get_operation_by_name(forward.name).type)

    # -- tensors ----------------------------------------------------------

    def seen_by(self, site: OpSite, call: GradientCall, tensor: Any) -> Any:
        """The tensor of the copy that the operators of a gradient call read for a vanilla one."""
        name = tensor_name(tensor)
        if name in call.grad_outputs:
            return self._grad_output(site, call, call.grad_outputs.index(name))
        used = self._used(site, call, tensor)
        if used is not None:
            return used
        if call in site.producers.get(name, ()):
            return site.tensors.get(id(tensor))
        return self.final(site, tensor, self._targets.get(call))

    def _used(self, site: OpSite, call: GradientCall, tensor: Any) -> Any:
        """The tensor that the forward operator has computed with, or computed, for `tensor`."""
        there = site.site_of(call.forward.graph())
        if there is None:
            return None
        if there is not site and there.is_stacked:
            # It runs in another loop of TensorFlow 1; a call hands the tensor over.
            return None
        saved = there.saved.get(call.forward.name, {}).get(id(tensor))
        if saved is not None:
            return self._merged(
                site,
                saved,
                f"the function that {call.forward.name} calls in a loop of TensorFlow 1 computes "
                "with a tensor that a routine changes, and its gradient, which is in the graph, "
                "reads the tensor once; build the loop with "
                "tf.compat.v1.enable_control_flow_v2()",
            )
        state = there.states.get(call.forward.name)
        if state is None or not state.used:
            return None
        outer = tensor if there is site else site.externals.get(id(tensor))
        if outer is None or (id(outer) in there.fed and outer.op.name == call.forward.name):
            return None
        if state.replaced is None and id(outer) in state.several:
            # In a loop of TensorFlow 1, where the gradient cannot be derived anew.
            return self._merged(
                site,
                state.several[id(outer)],
                f"op {state.op_id} reads {outer.name} twice in a loop of TensorFlow 1, and a "
                "routine changes it at one place: its gradient, which is in the graph, reads it "
                "once; build the loop with tf.compat.v1.enable_control_flow_v2(), or let the "
                "routine change both inputs alike",
            )
        return state.used.get(id(outer))

    def final(self, site: OpSite, tensor: Any, target: Any = None) -> Any:
        """The tensor of the copy that operators outside of gradient calls read for a vanilla one.

        Args:
            target: the forward tensor whose gradient the reader takes it for, if it is known.
        """
        name = tensor_name(tensor)
        if name not in site.producers:
            return site.tensors.get(id(tensor))
        return self._version(site, name, site.producers[name], target)

    def _grad_output(self, site: OpSite, call: GradientCall, position: int) -> Any:
        """A gradient that a call receives, after the changes that tools make."""
        work = self._work(site, call)
        if work is not None:
            return work.outputs[position]
        return self._given(site, call, position)

    def _given(self, site: OpSite, call: GradientCall, position: int) -> Any:
        """A gradient that a call receives, before changes for that call."""
        name = call.grad_outputs[position]
        return None if name is None else self._version(site, name, *_origin(site, call, position))

    def _version(
        self, site: OpSite, name: TensorName, calls: Sequence[GradientCall], target: Any
    ) -> Any:
        """The gradient after every instrumented gradient call that returns it."""
        last = _last(site, name, calls, target)
        while len(last) == 1:
            [call] = last
            if self._work(site, call) is not None:
                return self._grad_input(site, call, name, position_in(call, name, target))
            if name not in call.grad_outputs:
                break
            # It hands on what it is given. Without recursion: many in a row may do so.
            calls, target = _origin(site, call, call.grad_outputs.index(name))
            last = _last(site, name, calls, target)
        if len(last) > 1:
            values = [self._version(site, name, [call], target) for call in last]
            names = ", ".join(dict.fromkeys(call.forward.name for call in last))
            return self._shared(site, name, values, f"ops {names}")
        return site.tensors.get(id(site.tensor(name)))

    def _grad_input(self, site: OpSite, call: GradientCall, name: TensorName, position: int) -> Any:
        """The gradient of this name that a call returns.

        Args:
            position: of the input whose gradient it is; -1 if the reader does not tell.

        Raises:
            CapabilityError: it is the gradient of several inputs, and one of them is gone. At run
                time: they are changed differently.
        """
        if position >= 0:
            return self._returned(site, call, position)
        positions = [i for i, other in enumerate(call.grad_inputs) if other == name]
        positions = [i for i in positions if _is_returned(site, call, i)] or positions
        values = [self._returned(site, call, i) for i in positions]
        return self._shared(site, name, values, f"inputs {positions} of op {call.forward.name}")

    def _shared(self, site: OpSite, name: TensorName, values: Tensors, what: str) -> Any:
        """Merge gradients that are one tensor in the vanilla graph."""
        return self._merged(
            site,
            values,
            f"the gradients of {what} are one tensor in the graph, {name[0]}, and a routine "
            "changes one of them: what reads it outside of the gradient cannot be told which "
            "one it wants",
        )

    def _merged(self, site: OpSite, values: Tensors, message: str) -> Any:
        """Merge tensors that are one tensor in the vanilla graph.

        Args:
            message: of the error if their values differ.
        """
        if all(value is values[0] for value in values):
            return values[0]
        key = tuple(map(id, values))
        if key not in site.shared_tensors:
            site.shared_tensors[key] = shared_tensor(values, self._building, message)
        return site.shared_tensors[key]

    def _returned(self, site: OpSite, call: GradientCall, position: int) -> Any:
        """A gradient that a call returns, after the changes that tools make."""
        work = self._work(site, call)
        if work is None:
            return self._raw(site, call, position)
        if work.inputs is None:
            work.inputs = self._finished(site, call, work)
        return work.inputs[position]

    def _raw(self, site: OpSite, call: GradientCall, position: int) -> Any:
        """A gradient that a call returns, before the changes that tools make."""
        name = call.grad_inputs[position]
        if name is None:
            return None
        if name in call.grad_outputs:
            return self._grad_output(site, call, call.grad_outputs.index(name))
        return site.tensors.get(id(site.tensor(name)))

    # -- the changes that tools make --------------------------------------

    def _work(self, site: OpSite, call: GradientCall) -> GradientWork | None:
        """The changed gradients of a call; None if tools change none of them."""
        if call not in site.gradients:
            view = self.view(site, call)
            if view is None:
                return None
            work = None
            if _has_changes(view):
                # Else those of a deep network would be changed within each other.
                for earlier in self._unchanged_before(site, call):
                    self._work(site, earlier)
                work = self._begun(site, call, view)
            site.gradients[call] = work
        found: GradientWork | None = site.gradients[call]
        return found

    def _unchanged_before(self, site: OpSite, call: GradientCall) -> list[GradientCall]:
        """The calls whose changes are yet to be made before those of a call, the first one first.

        They are those that have changes, and whose gradients reach the call.
        """
        found = set[GradientCall]()
        left = [(call, position) for position in range(len(call.grad_outputs))]
        seen = set(left)
        while left:
            receiver, at = left.pop()
            name = receiver.grad_outputs[at]
            if name is None:
                continue
            for other in _last(site, name, *_origin(site, receiver, at)):
                view = self.view(site, other)
                if site.gradients.get(other) is not None:
                    continue
                received: Iterable[int] = ()
                if view is not None and _has_changes(view):
                    found.add(other)
                    received = range(len(other.grad_outputs))
                elif name in other.grad_outputs:
                    received = [other.grad_outputs.index(name)]
                new = [(other, i) for i in received if (other, i) not in seen]
                seen.update(new)
                left += new
        return sorted(found, key=site.position)

    def of_outputs(self, site: OpSite, call: GradientCall) -> Tensors:
        """The gradients of the outputs of a call's forward operator, after the changes; dense."""
        work = self._work(site, call)
        if work is None:
            found = [self._given(site, call, i) for i in range(len(call.grad_outputs))]
        else:
            found = list(work.outputs)
            if self._is_replaced(site, call):
                return found
        return SlicedGradients(site, call.output_slices, found).made_dense()

    def _is_replaced(self, site: OpSite, call: GradientCall) -> bool:
        """True if the gradient of a call's forward operator is derived anew."""
        view = self.view(site, call)
        return view is not None and view.state is not None and view.state.replaced is not None

    def _begun(self, site: OpSite, call: GradientCall, view: ForwardView) -> GradientWork:
        """Change the gradients that a call receives."""
        gradients = [self._given(site, call, i) for i in range(len(call.grad_outputs))]
        actions = view.plan.before_backward if view.plan else ()
        self._refuse_in_loop(site, call, view)
        segments = view.state.after if view.state else ()
        routines = view.state.routines if view.state else ()
        replaces = view.plan is not None and view.plan.replace_backward is not None
        with tf.name_scope(f"amanda/{call.forward.name}/grad_outputs/"):
            slices = SlicedGradients(site, call.output_slices, gradients)
            is_whole = bool(segments) or replaces or self._is_replaced(site, call)
            gradients = slices.made_dense(None if is_whole else actions)
            for segment in reversed(segments):
                gradients = after_routines(routines, gradients, partial(gradients_before, segment))
            for action in actions:
                gradients = self._dispatcher.run(action, gradients)
            if not self._is_replaced(site, call):
                # The operators of the call read the parts, and know no other gradient.
                gradients = slices.put_back(gradients, self._building, call)
            gradients = self._building.awaited(gradients)
        return GradientWork(gradients)

    def _refuse_in_loop(self, site: OpSite, call: GradientCall, view: ForwardView) -> None:
        """Refuse to derive a gradient anew in a loop of TensorFlow 1, which stacks what it reads.

        Raises:
            CapabilityError: it would have to be.
        """
        state, op = view.state, forward_op(call)
        there = site.site_of(call.forward.graph())
        if not self._building.entries or state is None or op is None or there is None:
            return
        actions = _differentiated_actions(view.plan)
        is_changed_call = view.plan is None and state.replaced is not None
        is_stacked = there is not site and there.is_stacked
        if (actions or is_changed_call) and (is_stacked or is_in_loop(op)):
            changes = f"{actions[0].routine} changes" if actions else "a routine acts within"
            raise CapabilityError(
                f"{changes} op {view.op_id} in a loop of TensorFlow 1, whose "
                "gradient is in the graph and cannot be derived anew there; build the loop with "
                "tf.compat.v1.enable_control_flow_v2(), or give the gradient of a replacement by "
                "replace_backward_op"
            )

    def _finished(self, site: OpSite, call: GradientCall, work: GradientWork) -> Tensors:
        """Change the gradients that a call returns. Returns them by position."""
        view = self.view(site, call)
        assert view is not None
        wanted = [self._is_wanted(site, name) for name in call.grad_inputs]
        plan, state = view.plan or EMPTY_PLAN, view.state
        replaced = None if state is None else state.replaced
        before = () if state is None else state.before
        replace = plan.replace_backward
        gradients = self._wanted_gradients(site, call, wanted, replaced)
        with tf.name_scope(f"amanda/{call.forward.name}/grad_inputs/"):
            slices = SlicedGradients(site, call.input_slices, gradients, replaced is not None)
            is_whole = replace is not None or bool(before)
            gradients = slices.made_dense(None if is_whole else plan.after_backward)
            if replace is not None:
                outputs = SlicedGradients(
                    site, call.output_slices, work.outputs, replaced is not None
                )
                gradients = self._supplied(replace, outputs.made_dense(), gradients)
            elif state is not None and replaced is not None:
                gradients = self._derived_anew(site, call, state, work.outputs, wanted)
                gradients = slices.as_tensors(gradients)
            for action in plan.after_backward:
                gradients = self._dispatcher.run(action, gradients)
            for segment in reversed(before):
                gradients = gradients_before(segment, gradients)
            gradients = slices.put_back(gradients, self._building, call)
            return self._building.awaited(gradients)

    def _wanted_gradients(
        self, site: OpSite, call: GradientCall, wanted: Sequence[bool], replaced: Any
    ) -> list[Any]:
        """Return the gradients that a call returns in the copy; None for those that nobody reads.

        Args:
            replaced: inputs and outputs of the operator's replacement, if it was replaced: its own
                gradient is not in the copy, and the inputs stand for it.
        """
        own = partial(self._raw, site, call) if replaced is None else replaced[0].__getitem__
        return [own(i) if is_wanted else None for i, is_wanted in enumerate(wanted)]

    def _supplied(self, replace: Action, outputs: Tensors, likes: Tensors) -> Tensors:
        """Return the gradients that a replacement of the operator's backward gives.

        Args:
            outputs: the gradients of the operator's outputs.
            likes: tensors with the shapes of the results.
        """
        building = self._building
        building.template = building.likes = likes
        gradients = replaced_gradients(self._dispatcher, replace, outputs, likes)
        return checked(gradients, replace, gradient_shapes(building.likes))

    def _derived_anew(
        self,
        site: OpSite,
        call: GradientCall,
        state: ForwardState,
        outputs: Tensors,
        wanted: Sequence[bool],
    ) -> Tensors:
        """Return the gradients of an operator's replacement, derived in the copy.

        Args:
            outputs: the gradients of its outputs.
            wanted: for each input, whether its gradient is read.
        """
        replaced = state.replaced
        assert replaced is not None
        before = _internals.count_operations(self._building.graph)
        gradients = after_routines(
            state.routines, outputs, lambda given: product(*replaced, given, wanted)
        )
        gradients = self.captures.added(site, call, replaced[0], gradients)
        self._rewrite_branches(before)
        return gradients

    def _is_wanted(self, site: OpSite, name: TensorName | None) -> bool:
        """True if a gradient is read. Others are not derived: TensorFlow would prune them, too."""
        if name is None:
            return False
        tensor = site.tensor(name)
        return bool(tensor.consumers()) or any(tensor is output for output in site.outputs)


def _differentiated_actions(plan: ActionPlan | None) -> list[Action]:
    """Return the actions of a plan that take part in the operator's gradient."""
    if plan is None:
        return []
    actions = [a for a in (*plan.before, *plan.after) if a.differentiable]
    if plan.replace is not None and plan.replace_backward is None:
        actions.insert(0, plan.replace)
    return actions


def is_changed(view: ForwardView) -> bool:
    """True if tools change the gradients of an operator as a whole."""
    plan, state = view.plan, view.state
    if plan and (plan.before_backward or plan.after_backward or plan.replace_backward):
        return True
    return state is not None and bool(state.before or state.after or state.replaced)


def _has_changes(view: ForwardView) -> bool:
    """True if tools change the gradients of the call that has this forward operator."""
    return view.depth == 1 and is_changed(view)


def _origin(site: OpSite, call: GradientCall, position: int) -> tuple[Sequence[GradientCall], Any]:
    """The calls that return a gradient that a call receives, and the tensor whose gradient it is.

    Returns:
        Those made before the call, in order. The tensor is None if it is not known.
    """
    name, op = call.grad_outputs[position], forward_op(call)
    assert name is not None
    producers = site.producers.get(name, ())
    earlier = producers[: bisect.bisect_left(producers, site.position(call), key=site.position)]
    has_tensor = op is not None and position < len(op.outputs)
    return earlier, op.outputs[position] if has_tensor else None


def _last(
    site: OpSite, name: TensorName, calls: Sequence[GradientCall], target: Any
) -> Sequence[GradientCall]:
    """Of calls that return a gradient of this name, the last one; several if all may be meant.

    Args:
        target: the tensor whose gradient it is, if it is known.
    """
    if target is not None:
        for call in reversed(calls):
            if position_in(call, name, target) >= 0:
                return [call]
    ends = [call for call in calls if _ends(site, call, name)] if len(calls) > 1 else ()
    return ends if len(ends) > 1 else calls[-1:]


def _ends(site: OpSite, call: GradientCall, name: TensorName) -> bool:
    """True if a gradient of this name that a call returns may be read outside of gradient calls."""
    return any(
        other == name and _is_returned(site, call, i) for i, other in enumerate(call.grad_inputs)
    )


def _is_returned(site: OpSite, call: GradientCall, position: int) -> bool:
    """True if a gradient that a call returns may be read outside of gradient calls.

    It is not if the gradient of the operator that computes the input receives it. A function that
    TensorFlow derives from another one returns the gradients of that one's placeholders only.
    """
    op = forward_op(call)
    if op is None or position >= len(op.inputs):
        return True
    target, name = op.inputs[position], call.grad_inputs[position]
    if target.graph is not site.graph and target.op.type != "Placeholder":
        return False
    return not any(
        other.forward.graph() is target.graph
        and target.value_index < len(other.grad_outputs)
        and other.grad_outputs[target.value_index] == name
        for other in site.calls_of(target.op.name)
    )


def _captured(site: OpSite, tensors: Sequence[Any], count: int) -> Tensors | None:
    """The tensors of a forward graph as the backward function at `site` has captured them.

    Args:
        tensors: those of an operator of the forward graph.
        count: of the tensors that are wanted; None if the operator has others, as one that
            stands in for a replaced operator may.
    """
    if len(tensors) != count:
        return None
    inner = {id(outer): site.tensors.get(id(tensor)) for outer, tensor in site.captures}
    return [inner.get(id(tensor)) for tensor in tensors]
