"""Routines on the gradients of an operator as a whole: of all its outputs, or all its inputs.

Forward analyses record them (contract rule 8). If one autograd node gets or produces all of these
gradients, that node is hooked: :func:`hook_outputs`, :func:`hook_input_edges`. If they belong to
several nodes, the tensors pass through an identity that gathers their gradients:
:func:`gather_inputs`. View operators run on aliases that autograd knows as views
(:func:`aliases_of`), since an identity ``Function`` would cut views off from their base, and the
gradients of several views are met at the alias (:class:`ViewGradients`); in-place operators are
hooked at the nodes that produce the gradients of their inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from amanda.engine.backward import OperatorGradients
from amanda.errors import RoutineResultError
from amanda.interface.action import ActionKind
from amanda_torch import _internals
from amanda_torch.autograd.functions import AmandaGradients
from amanda_torch.autograd.nodes import (
    Edge,
    edge_of,
    is_accumulation,
    is_edge,
    new_nodes,
    node_name,
    set_alias,
)
from amanda_torch.autograd.substitution import alias_for
from amanda_torch.routines import RoutineDispatcher


class WholeOperator(OperatorGradients):
    """The routines on an operator's gradients as a whole, run with no function mode on."""

    __slots__ = ()
    _dispatcher: RoutineDispatcher

    def before(self, grad_outputs: list[Any]) -> list[Any]:
        """Run the routines on the gradients of the outputs."""
        return _internals.without_modes(super().before, grad_outputs)  # type: ignore[no-any-return]

    def after(self, grad_inputs: list[Any]) -> list[Any]:
        """Run the routines on the gradients of the inputs."""
        return _internals.without_modes(super().after, grad_inputs)  # type: ignore[no-any-return]

    def before_sums(self, grad_outputs: list[Any]) -> list[Any]:
        """Run :meth:`before` in an identity of several tensors, which sums gradients."""
        self._warn_of_sums()
        return self.before(grad_outputs)

    def after_sums(self, grad_inputs: list[Any]) -> list[Any]:
        """Run :meth:`after` in an identity of several tensors, which sums gradients."""
        self._warn_of_sums()
        return self.after(grad_inputs)

    def _warn_of_sums(self) -> None:
        """Warn that gradients of gradients of the tensors are summed in another order."""
        if torch.is_grad_enabled() and self.acts():
            self._dispatcher.warn_once(
                "routines on the gradients of whole operators may change the last bits of "
                "gradients of gradients, which autograd adds in another order",
                self._handle.op_id,
                "; routines at its backward operators do not",
            )

    def replaced(self, grad_outputs: list[Any], count: int) -> list[Any] | None:
        """The gradients of the `count` inputs that a replacement supplies; None without one."""
        return _internals.without_modes(super().replaced, grad_outputs, count)  # type: ignore[no-any-return]

    def acts(self) -> bool:
        """True if the scope is open, and the running backward pass is instrumented."""
        return bool(self._handle.records()) and not self._dispatcher.is_paused()

    def replaces(self) -> bool:
        """True if a replacement supplies the gradients in the backward pass that is running."""
        actions = self._handle.actions(ActionKind.REPLACE_BACKWARD_OP)
        return bool(actions) and not self._dispatcher.is_paused()

    def unreachable(self, index: int) -> RoutineResultError:
        """The error if routines supply a gradient for an output that the pass does not reach."""
        action = self._handle.actions(ActionKind.BEFORE_BACKWARD_OP)[0]
        return RoutineResultError(
            f"{action.routine} at op {action.op_id} must return None for the gradient of its "
            f"output {index}, which the backward pass does not reach"
        )

    def replaced_in(self, grad_outputs: list[Any], shapes: Sequence[Any]) -> list[Any]:
        """Return :meth:`replaced`, and check the shapes.

        Args:
            shapes: the shape of each input that needs a gradient, None for others.

        Raises:
            RoutineResultError: a gradient has another shape than its input.
        """
        gradients = self.replaced(grad_outputs, len(shapes)) or [None] * len(shapes)
        for index, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
            if shape is None or gradient is None or gradient.shape == shape:
                continue
            action = self._handle.actions(ActionKind.REPLACE_BACKWARD_OP)[0]
            raise RoutineResultError(
                f"{action.routine} replaces the backward of op {action.op_id} and must return a "
                f"gradient of shape {tuple(shape)} for its input {index}, got one of shape "
                f"{tuple(gradient.shape)}"
            )
        return gradients


class ReplacedGradients:
    """A tool's vector-Jacobian product of a whole operator, in one graph; for
    :class:`~amanda_torch.autograd.functions.AmandaOperator`.

    Args:
        positions: positions of the inputs that are tensors.
        values: the inputs.
    """

    def __init__(
        self, whole: WholeOperator, positions: Sequence[int], values: Sequence[Any]
    ) -> None:
        self._whole = whole
        self._positions = positions
        self._shapes = [
            value.shape if value is not None and value.requires_grad else None for value in values
        ]

    @property
    def applies(self) -> bool:
        """True if it supplies the gradients in the backward pass that runs."""
        return self._whole.replaces()

    def __call__(self, grad_outputs: list[Any]) -> list[Any]:
        """The gradients of the operator's tensor inputs."""
        gradients = self._whole.after(self._whole.replaced_in(grad_outputs, self._shapes))
        return [gradients[position] for position in self._positions]


Change = Callable[[list[Any]], list[Any]]
"""Function of several gradients that returns the gradients to use instead: the same list if none is
changed."""


class _Selected:
    """Changes the gradients at some positions; the others are None."""

    __slots__ = ("_change", "_count", "_positions")

    def __init__(self, change: Change, positions: Sequence[int], count: int) -> None:
        self._change = change
        self._positions = positions
        self._count = count

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        given = dict(zip(self._positions, gradients, strict=True))
        full = self._change([given.get(position) for position in range(self._count)])
        return [full[position] for position in self._positions]


def gather_inputs(
    change: Change,
    values: list[Any],
    *,
    in_order: bool = False,
    identity: type[torch.autograd.Function] = AmandaGradients,
) -> list[Any]:
    """Return `values`, passed through an identity whose gradients `change` gets together.

    Autograd accumulates the gradients of leaves in the order in which the identity gives them. In
    an operator that uses its inputs one after the other, in several nodes, the gradient of the last
    input comes first.

    Args:
        in_order: True if the gradient of the first input comes first.
        identity: class of the identity.
    """
    positions = [i for i, t in enumerate(values) if t is not None and t.requires_grad]
    if not in_order:
        positions.reverse()
    return _gathered(change, values, positions, identity) if positions else values


def _gathered(
    change: Change,
    values: list[Any],
    positions: Sequence[int],
    identity: type[torch.autograd.Function] = AmandaGradients,
) -> list[Any]:
    selected = _Selected(change, positions, len(values))
    tensors = [values[position] for position in positions]
    results = _internals.apply_function(identity, selected, *tensors)
    values = list(values)
    for position, result in zip(positions, results, strict=True):
        values[position] = alias_for(values[position], result)
    return values


def hook_outputs(
    whole: WholeOperator,
    outputs: list[Any],
    start: int,
    identity: type[torch.autograd.Function] = AmandaGradients,
) -> list[Any]:
    """Have routines get the gradients of all outputs together.

    An output that the operator has not made (``x.to(x.dtype)`` is `x`) has no backward operator.

    Args:
        identity: class of the identity, for outputs of several nodes.

    Returns:
        The outputs to use from now on.
    """
    positions = [i for i, tensor in enumerate(outputs) if _is_made(tensor, start)]
    if not positions:
        return outputs
    nodes = {outputs[i].grad_fn for i in positions}
    if len(nodes) > 1:
        return _gathered(whole.before_sums, outputs, positions, identity)
    (node,) = nodes
    numbers = {i: outputs[i].output_nr for i in positions}
    count = len(outputs)

    def before(grad_outputs: tuple[Any, ...]) -> Any:
        full = [grad_outputs[numbers[i]] if i in numbers else None for i in range(count)]
        changed = whole.before(full)
        if changed is full:
            return None
        result = list(grad_outputs)
        for position, number in numbers.items():
            result[number] = changed[position]
        return tuple(result)

    node.register_prehook(before)
    return outputs


def _is_made(tensor: Any, start: int) -> bool:
    """True if an output's autograd node is a new one."""
    node = tensor.grad_fn if tensor is not None and tensor.requires_grad else None
    return node is not None and _internals.node_sequence(node) >= start


_BEGUN = "amanda_begun_notes"
"""The :class:`PassNotes` that a backward pass has written to, and the number of the pass; all
threads that run the pass share the value; None outside of :func:`notes_dropped`."""


def _begun() -> list[tuple[dict[int, Any], int]] | None:
    return _internals.kept_in_thread(_BEGUN) if _internals.is_kept_in_thread(_BEGUN) else None


@contextmanager
def notes_dropped() -> Iterator[None]:
    """Drop the remaining notes of a backward pass at its end: after an exception they would keep
    the graph alive."""
    if not PassNotes.are_taken:
        # A shared value costs time at each node of a pass.
        yield
        return
    outer, begun = _begun(), list[tuple[dict[int, Any], int]]()
    _internals.keep_in_thread(_BEGUN, begun)
    try:
        yield
    finally:
        for passes, task in begun:
            passes.pop(task, None)
        _internals.keep_in_thread(_BEGUN, outer)


class PassNotes(dict[int, dict[int, Any]]):
    """Gradients that hooks have noted, by the number of a backward pass.

    Attributes:
        are_taken: True once there is any object of this class in the process.
    """

    are_taken = False

    def __init__(self) -> None:
        super().__init__()
        PassNotes.are_taken = True

    def of_pass(self) -> dict[int, Any]:
        """The notes of the backward pass that runs."""
        task = _internals.graph_task()
        if task not in self:
            self[task] = {}
            if (begun := _begun()) is not None:
                begun.append((self, task))
        return self[task]


class ViewGradients:
    """The hooks on several views that an operator has made of one alias, each by a node.

    An identity ``Function`` would cut the views off from their base. So routines get the gradients
    of the views at the node of the alias, where they are joined. The nodes of the views have run by
    then: they run again if a routine has changed a gradient.

    Args:
        whole: the routines on the gradients of the views.
        count: the number of the views.
    """

    __slots__ = ("_count", "_passes", "_repeats", "_whole")

    def __init__(self, whole: WholeOperator, count: int) -> None:
        self._whole = whole
        self._count = count
        # The nodes of the views, and their gradients. The nodes are known here only while a pass
        # runs: they lead to the node of these hooks.
        self._passes = PassNotes()
        self._repeats = False

    def register(self, outputs: Sequence[Any], node: Any, start: int) -> None:
        """Hook the nodes of the views, and the node of the alias.

        Args:
            outputs: the views.
            start: the sequence number before the operator.
        """
        for index, output in enumerate(outputs):
            if _is_made(output, start):
                output.grad_fn.register_prehook(functools.partial(self._note, index))
        node.register_prehook(self._join)

    def _note(self, index: int, gradients: tuple[Any, ...]) -> None:
        """Prehook of a view."""
        if self._repeats or not self._whole.acts():
            return
        self._passes.of_pass()[index] = _internals.current_node(), gradients[0]

    def _join(self, gradients: tuple[Any, ...]) -> Any:
        """Prehook of the alias: the gradient to pass on instead, None for the same."""
        noted = self._passes.pop(_internals.graph_task(), None)
        if not noted:
            return None
        full = [noted[i][1] if i in noted else None for i in range(self._count)]
        changed = self._whole.before(full)
        if changed is full:
            return None
        return _internals.without_modes(self._repeated, noted, changed)

    def _repeated(self, noted: Mapping[int, tuple[Any, Any]], changed: Sequence[Any]) -> Any:
        """Run the nodes of the views again, with changed gradients."""
        given = {index: gradient for index, gradient in enumerate(changed) if gradient is not None}
        if given.keys() - noted.keys():
            raise self._whole.unreachable(min(given.keys() - noted.keys()))
        views = [GradientEdge(noted[index][0], 0) for index in given]
        alias = GradientEdge(_internals.current_node(), 0)
        self._repeats = True
        try:
            return torch.autograd.grad(
                views,
                [alias],
                list(given.values()),
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
            )
        finally:
            self._repeats = False


# -- the gradients of inputs, where no identity may come before the operator --


def aliases_of(values: list[Any]) -> list[Any]:
    """Return `values` with aliases in place of the tensors that need a gradient."""
    return [_alias(value) for value in values]


def _alias(value: Any) -> Any:
    if value is None or not value.requires_grad or value.layout is not torch.strided:
        return value
    with _internals.no_dispatch_modes():
        alias = torch.ops.aten.alias.default(value)
    set_alias(alias.grad_fn)
    # A class that overrides operators makes the alias by another node.
    alias = alias_for(value, alias)
    set_alias(alias.grad_fn)
    return alias


class InputGradients:
    """The hook on the node that produces all gradients of an operator's inputs.

    Args:
        kinds: the kinds of actions to run.
        positions: input position to the position of its gradient at the node.
        counts: the numbers of inputs and of outputs.
        views: by input position, the view of the input that the node's gradient belongs to.
    """

    __slots__ = ("_count", "_grad_outputs", "_kinds", "_positions", "_views", "_whole")

    def __init__(
        self,
        whole: WholeOperator,
        kinds: Sequence[ActionKind],
        positions: dict[int, int],
        counts: tuple[int, int],
        views: Mapping[int, View] | None = None,
    ) -> None:
        self._views = views or {}
        self._whole = whole
        self._kinds = kinds
        self._positions = positions
        self._count = counts[0]
        self._grad_outputs: list[Any] = [None] * counts[1]

    def note(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return a prehook for a node that gets gradients of outputs: the posthook needs them.

        Args:
            places: position of each such output, and position of its gradient at the node.
        """
        grad_outputs, whole = self._grad_outputs, self._whole

        def before(gradients: tuple[Any, ...]) -> None:
            # Without a posthook the note would be kept as long as the graph.
            if whole.replaces():
                for index, number in places:
                    grad_outputs[index] = gradients[number]

        return before

    def after(self, grad_inputs: tuple[Any, ...], _: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        if not self._whole.acts():
            return None
        try:
            with _internals.no_dispatch_modes():
                return _internals.without_modes(self._changed, grad_inputs)
        finally:
            # The graph of a gradient leads back to this hook's node, in a cycle of C++.
            self._grad_outputs[:] = [None] * len(self._grad_outputs)

    def _changed(self, grad_inputs: tuple[Any, ...]) -> Any:
        positions, views = self._positions, self._views
        full = [grad_inputs[positions[i]] if i in positions else None for i in range(self._count)]
        for index, view in views.items():
            if full[index] is not None:
                full[index] = view.of_input(full[index])
        changed = full
        if ActionKind.REPLACE_BACKWARD_OP in self._kinds:
            supplied = self._whole.replaced(list(self._grad_outputs), self._count)
            changed = changed if supplied is None else supplied
        if ActionKind.AFTER_BACKWARD_OP in self._kinds:
            changed = self._whole.after(changed)
        if changed is full:
            return None
        result = list(grad_inputs)
        for index, place in positions.items():
            if result[place] is not None and changed[index] is not full[index]:
                new = changed[index]
                if index in views and new is not None:
                    new = views[index].of_view(new, result[place])
                result[place] = new
        return tuple(result)


class View:
    """A view of an input, transposed or reshaped: converts its gradient from and to that of the
    input.

    Args:
        shape: the shape of the input; None where the view is its transpose.
    """

    __slots__ = ("_shape",)

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def of_input(self, gradient: Any) -> Any:
        """Convert the gradient of the view to that of the input."""
        return gradient.t() if self._shape is None else gradient.reshape(self._shape)

    def of_view(self, gradient: Any, old: Any) -> Any:
        """Convert the gradient of the input to that of the view, which replaces `old`."""
        return gradient.t() if self._shape is None else gradient.reshape(old.shape)


_VIEW_NODES = {"TBackward0": False, "ViewBackward0": True, "UnsqueezeBackward0": True}
"""The nodes of the views of inputs that operators compute with; whether they reshape."""


class DelayedGradients:
    """Routines on the gradients of an operator's inputs, after the routines of all its nodes.

    One node of the operator produces the gradients of some inputs; the gradients of others pass
    through nodes of views behind it. An identity before all inputs would sum gradients in another
    order when gradients are differentiated. So it is before the views only: the gradients that the
    first node produces are withheld after all of its hooks, and the identity passes them on.

    Args:
        behind: positions of the inputs that the operator uses by views, and that need a gradient.
        in_order: True if the node produces the gradients of the other inputs in order, not
            backwards.
    """

    def __init__(
        self, whole: WholeOperator, values: Sequence[Any], behind: Sequence[int], in_order: bool
    ) -> None:
        self._whole = whole
        wanted = [i for i, value in enumerate(values) if value is not None and value.requires_grad]
        # Leaves get their gradients in this order.
        wanted = wanted if in_order else wanted[::-1]
        self._direct = [index for index in wanted if index not in behind]
        self._behind = behind
        self._change = _Selected(whole.after, (*self._direct, *behind), len(values))
        self.skipped = len(self._direct)
        # The gradients that are withheld, by input.
        self._withheld = PassNotes()

    def before_views(self, values: list[Any]) -> list[Any]:
        """The values to run the operator on."""
        values = list(values)
        tensors = [values[index] for index in (*self._direct, *self._behind)]
        results = _internals.apply_function(AmandaGradients, self, *tensors)
        for index, result in zip(self._behind, results, strict=True):
            values[index] = alias_for(values[index], result)
        return values

    def hook(self, values: Sequence[Any], outputs: Sequence[Any], start: int) -> None:
        """Withhold the gradients of the node that produces them, after all its other hooks.

        Args:
            values: the inputs.
            start: the sequence number before the operator.
        """
        edges = [edge_of(value) if i in self._direct else None for i, value in enumerate(values)]
        for node in new_nodes(outputs, start):
            if not is_accumulation(node) and (places := _places(node, edges)):
                handle = node.register_hook(functools.partial(self._withhold, places))
                # The program may add hooks until the node runs.
                node.register_prehook(functools.partial(_internals.run_last, handle))

    def _withhold(
        self, places: dict[int, int], produced: tuple[Any, ...], _: tuple[Any, ...]
    ) -> Any:
        """Posthook of the node."""
        if not self._whole.acts():
            return None
        self._withheld.of_pass().update({i: produced[place] for i, place in places.items()})
        withheld = places.values()
        return tuple(None if place in withheld else one for place, one in enumerate(produced))

    def __call__(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients of the direct inputs and of the inputs behind views."""
        withheld = self._withheld.pop(_internals.graph_task(), {})
        return self._change([*map(withheld.get, self._direct), *gradients])


def hook_input_edges(
    whole: WholeOperator,
    kinds: Sequence[ActionKind],
    edges: Sequence[Edge | None],
    outputs: Sequence[Any],
    start: int,
    values: Sequence[Any],
) -> bool:
    """Have routines change or supply the gradients of the inputs of an operator that has run.

    Args:
        edges: the edge of each input's gradient.
        values: the inputs.
        start: the sequence number before the operator and its aliases.

    Returns:
        False, with nothing hooked, if several nodes produce these gradients, so that no single hook
        sees all of them.
    """
    nodes = new_nodes(outputs, start, aliases=True)
    # The nodes that produce gradients of inputs, with the positions of the inputs.
    leaving = {
        node: places
        for node in nodes
        if not is_accumulation(node) and (places := _places(node, edges))
    }
    views = _looked_through(leaving, nodes, values) if len(leaving) > 1 else {}
    if len(leaving) != 1:
        return not leaving
    ((node, places),) = leaving.items()
    hook = InputGradients(whole, kinds, places, (len(edges), len(outputs)), views)
    makers: dict[Any, list[tuple[int, int]]] = {}
    for index, output in enumerate(outputs):
        if output.grad_fn is not None:
            makers.setdefault(output.grad_fn, []).append((index, output.output_nr))
    if ActionKind.REPLACE_BACKWARD_OP in kinds:
        for maker, given in makers.items():
            maker.register_prehook(hook.note(given))
    node.register_hook(hook.after)
    return True


def _looked_through(
    leaving: dict[Any, dict[int, int]], nodes: Sequence[Any], values: Sequence[Any]
) -> Mapping[int, View]:
    """Join the nodes of views of the inputs with the one node that they follow.

    Args:
        leaving: the nodes that produce gradients of inputs, with the positions of the inputs;
            joined nodes are removed.
        nodes: all nodes of the operator.

    Returns:
        The views by input position; empty if the nodes cannot be joined.
    """
    seen = [node for node in leaving if node_name(node) in _VIEW_NODES]
    for main in nodes:
        targets = [target for target, _ in main.next_functions]
        if {main, *seen} >= leaving.keys() and all(targets.count(node) == 1 for node in seen):
            break
    else:
        return {}
    views: dict[int, View] = {}
    for node in seen:
        is_reshaped = _VIEW_NODES[node_name(node)]
        for index in leaving.pop(node):
            leaving.setdefault(main, {})[index] = targets.index(node)
            views[index] = View(values[index].shape if is_reshaped else None)
    return views


def _places(node: Any, edges: Sequence[Edge | None]) -> dict[int, int]:
    """Map each input whose gradient `node` produces to the position of that gradient there."""
    places: dict[int, int] = {}
    for place, (target, number) in enumerate(node.next_functions):
        for index, edge in enumerate(edges):
            if edge is not None and index not in places and is_edge(target, number, edge):
                places[index] = place
                break
    return places
