"""Actions on an operator as a whole: routines on the gradients of its inputs and outputs.

Where one autograd node sees all of them, it is hooked. Where the outputs or
inputs belong to several nodes, they pass through an identity in which their
gradients meet. View operators work on an alias that autograd knows as a view
(an identity ``Function`` would cut the views off from what they show), and
in-place operators are hooked where their inputs' gradients leave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amanda.engine.backward import OpHandle, replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.errors import RoutineResultError
from amanda.interface.action import Action, ActionKind
from amanda_torch import _internals
from amanda_torch.autograd.functions import AmandaGradients
from amanda_torch.autograd.nodes import (
    Edge,
    is_accumulation,
    is_edge,
    new_nodes,
    set_alias,
)
from amanda_torch.thread.local import muted


class WholeOperator:
    """Routines on the gradients of an operator's inputs or outputs, in one graph."""

    __slots__ = ("_dispatcher", "_handle", "_kind")

    def __init__(self, dispatcher: Dispatcher, handle: OpHandle, kind: ActionKind) -> None:
        self._dispatcher = dispatcher
        self._handle = handle
        self._kind = kind

    def run(self, gradients: list[Any]) -> list[Any]:
        """The gradients after the routines of all scopes that have not ended."""
        if self._dispatcher.is_paused():
            return gradients
        with muted():
            for _, record in self._handle.records():
                for action in record.actions(self._kind):
                    gradients = self._dispatcher.run(action, gradients)
        return gradients

    def replace(
        self, gradients: list[Any], grad_outputs: list[Any], shapes: Sequence[Any] = ()
    ) -> list[Any]:
        """The gradients that the replacement supplies, where it has not ended.

        Args:
            shapes: the shape of each input that needs a gradient, None for others.
        """
        if not self._dispatcher.is_paused():
            for _, record in self._handle.records():
                for action in record.actions(ActionKind.REPLACE_BACKWARD_OP):
                    with muted():
                        gradients = replaced_gradients(
                            self._dispatcher, action, grad_outputs, gradients
                        )
                    _check_shapes(action, gradients, shapes)
        return gradients


def _check_shapes(action: Action, gradients: Sequence[Any], shapes: Sequence[Any]) -> None:
    for index, (gradient, shape) in enumerate(zip(gradients, shapes, strict=False)):
        if shape is None or gradient is None or gradient.shape == shape:
            continue
        raise RoutineResultError(
            f"{action.routine} replaces the backward of op {action.op_id} and must return a "
            f"gradient of shape {tuple(shape)} for its input {index}, got one of shape "
            f"{tuple(gradient.shape)}"
        )


class _Selected:
    """Calls a whole-operator routine where only some positions have a gradient."""

    __slots__ = ("_count", "_positions", "_whole")

    def __init__(self, whole: WholeOperator, positions: Sequence[int], count: int) -> None:
        self._whole = whole
        self._positions = positions
        self._count = count

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        full: list[Any] = [None] * self._count
        for position, gradient in zip(self._positions, gradients, strict=True):
            full[position] = gradient
        full = self._whole.run(full)
        return [full[position] for position in self._positions]


def gather_inputs(whole: WholeOperator, values: list[Any]) -> list[Any]:
    """`values` passed through an identity in which their gradients meet."""
    positions = [i for i, t in enumerate(values) if t is not None and t.requires_grad]
    return _gathered(whole, values, positions) if positions else values


def _gathered(whole: WholeOperator, values: list[Any], positions: Sequence[int]) -> list[Any]:
    change = _Selected(whole, positions, len(values))
    results = _internals.apply_function(AmandaGradients, change, *[values[i] for i in positions])
    values = list(values)
    for position, result in zip(positions, results, strict=True):
        values[position] = result
    return values


def hook_outputs(whole: WholeOperator, outputs: list[Any], start: int) -> list[Any]:
    """Let the routines see the output gradients together.

    An output that the operator only handed on (``x.to(x.dtype)``) has no
    backward operator.
    """
    positions = [i for i, tensor in enumerate(outputs) if _is_made(tensor, start)]
    if not positions:
        return outputs
    nodes = {outputs[i].grad_fn for i in positions}
    if len(nodes) > 1:
        return _gathered(whole, outputs, positions)
    (node,) = nodes
    numbers = {i: outputs[i].output_nr for i in positions}
    count = len(outputs)

    def before(grad_outputs: tuple[Any, ...]) -> Any:
        full = [grad_outputs[numbers[i]] if i in numbers else None for i in range(count)]
        changed = whole.run(full)
        if changed is full:
            return None
        result = list(grad_outputs)
        for position, number in numbers.items():
            result[number] = changed[position]
        return tuple(result)

    node.register_prehook(before)
    return outputs


def _is_made(tensor: Any, start: int) -> bool:
    """Whether an output's autograd node is a new one."""
    node = tensor.grad_fn if tensor is not None and tensor.requires_grad else None
    return node is not None and _internals.node_sequence(node) >= start


# -- the gradients of inputs, where no identity may come before the operator --


def aliases_of(values: list[Any]) -> list[Any]:
    """`values` with aliases in place of tensors that gradients are wanted for."""
    return [_alias(value) for value in values]


def _alias(value: Any) -> Any:
    if value is None or not value.requires_grad or value.layout is not torch.strided:
        return value
    alias = torch.ops.aten.alias.default(value)
    set_alias(alias.grad_fn)
    return alias


class InputGradients:
    """The hook at the place where an operator's input gradients leave it."""

    __slots__ = ("_count", "_dispatcher", "_grad_outputs", "_handle", "_kinds", "_positions")

    def __init__(
        self,
        dispatcher: Dispatcher,
        handle: OpHandle,
        kinds: Sequence[ActionKind],
        positions: dict[int, int],
        counts: tuple[int, int],
    ) -> None:
        self._dispatcher = dispatcher
        self._handle = handle
        self._kinds = kinds
        self._positions = positions
        self._count = counts[0]
        self._grad_outputs: list[Any] = [None] * counts[1]

    def note(self, places: Sequence[tuple[int, int]]) -> Any:
        """A prehook that keeps the gradients which one node gets of the outputs."""
        grad_outputs = self._grad_outputs

        def before(gradients: tuple[Any, ...]) -> None:
            for index, number in places:
                grad_outputs[index] = gradients[number]

        return before

    def after(self, grad_inputs: tuple[Any, ...], _: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        positions = self._positions
        full = [grad_inputs[positions[i]] if i in positions else None for i in range(self._count)]
        changed = full
        if ActionKind.REPLACE_BACKWARD_OP in self._kinds:
            whole = WholeOperator(self._dispatcher, self._handle, ActionKind.REPLACE_BACKWARD_OP)
            changed = whole.replace(changed, list(self._grad_outputs))
            self._grad_outputs[:] = [None] * len(self._grad_outputs)
        if ActionKind.AFTER_BACKWARD_OP in self._kinds:
            whole = WholeOperator(self._dispatcher, self._handle, ActionKind.AFTER_BACKWARD_OP)
            changed = whole.run(changed)
        if changed is full:
            return None
        result = list(grad_inputs)
        for index, place in positions.items():
            if result[place] is not None:
                result[place] = changed[index]
        return tuple(result)


def hook_input_edges(
    dispatcher: Dispatcher,
    handle: OpHandle,
    kinds: Sequence[ActionKind],
    edges: Sequence[Edge | None],
    outputs: Sequence[Any],
    start: int,
) -> bool:
    """Let routines change or supply the input gradients of an operator that has run.

    Args:
        edges: where the gradient of each input goes.
        start: the sequence number before the operator and its aliases.

    Returns:
        False if these gradients leave the operator through several nodes, so
        that no single hook sees them all; nothing is hooked then.
    """
    leaving: dict[Any, dict[int, int]] = {}
    for node in new_nodes(outputs, start, aliases=True):
        if not is_accumulation(node):
            places = _places(node, edges)
            if places:
                leaving[node] = places
    if len(leaving) != 1:
        return not leaving
    ((node, places),) = leaving.items()
    hook = InputGradients(dispatcher, handle, kinds, places, (len(edges), len(outputs)))
    makers: dict[Any, list[tuple[int, int]]] = {}
    for index, output in enumerate(outputs):
        if output.grad_fn is not None:
            makers.setdefault(output.grad_fn, []).append((index, output.output_nr))
    for maker, given in makers.items():
        maker.register_prehook(hook.note(given))
    node.register_hook(hook.after)
    return True


def _places(node: Any, edges: Sequence[Edge | None]) -> dict[int, int]:
    """Input position to the position of its gradient among those that `node` produces."""
    places: dict[int, int] = {}
    for place, (target, number) in enumerate(node.next_functions):
        for index, edge in enumerate(edges):
            if edge is not None and index not in places and is_edge(target, number, edge):
                places[index] = place
                break
    return places
