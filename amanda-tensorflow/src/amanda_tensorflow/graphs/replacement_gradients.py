"""Operators that a tool has replaced: their place in automatic differentiation.

The outputs of the replacement leave through one node whose gradient is that of
the operator as a whole: what the tool supplies for it, or that of the
replacement itself, between the routines that act on the whole operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.errors import RoutineResultError, described
from amanda.interface.action import Action
from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.sites import ForwardState

REPLACED = "AmandaReplacedOp"


@attrs.frozen(eq=False)
class ReplacedOp:
    """A replaced operator of a copy.

    Attributes:
        dispatcher: core's side of the driver.
        scopes: those of the copy.
        op_id: the operator's id.
        count: how many outputs it has.
        positions: which of its inputs may have a gradient.
        inputs: how many inputs it has.
        borrowed: how many tensors it uses besides.
    """

    dispatcher: GraphDispatcher
    scopes: tuple[weakref.ref[LiveScope], ...]
    op_id: str
    count: int
    positions: tuple[int, ...]
    inputs: int
    borrowed: int


def outputs_of(result: Any, action: Action, op: Any) -> list[Any]:
    """What a replacement has given, as a list.

    Raises:
        RoutineResultError: it is not what the vanilla operator would give.
    """
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(outputs) != len(op.outputs) or not all(tf.is_tensor(t) for t in outputs):
        raise RoutineResultError(
            f"{action.routine} replaces op {action.op_id} and must return its "
            f"{len(op.outputs)} output tensors, got {described(result)}"
        )
    return outputs


def leave(
    dispatcher: GraphDispatcher,
    building: Building,
    state: ForwardState,
    borrowed: Sequence[Any],
) -> list[Any]:
    """The outputs of a replacement as they leave the operator.

    Args:
        state: the operator's, with what its replacement was given and gave.
        borrowed: what that uses besides.
    """
    assert state.replaced is not None
    given, outputs = state.replaced
    positions = tuple(i for i, tensor in enumerate(given) if is_differentiable(tensor))
    scopes = tuple(weakref.ref(scope) for scope in building.scopes)
    with building.graph.gradient_override_map({"IdentityN": REPLACED}):
        node = _internals.identity_n([*outputs, *(given[i] for i in positions), *borrowed])
    replaced = ReplacedOp(
        dispatcher, scopes, state.op_id, len(outputs), positions, len(given), len(borrowed)
    )
    _internals.annotate(building.graph, node[0].op.name, replaced)
    return list(node[: len(outputs)])


def is_differentiable(tensor: Any) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor is not None and (tensor.dtype.is_floating or tensor.dtype.is_complex)


def _replaced(op: Any, *gradients: Any) -> list[Any]:
    """The gradients of a replaced operator's inputs; its outputs pass none on."""
    found: ReplacedOp = _internals.annotation(op.graph, op.name)
    outputs, inputs = list(op.inputs)[: found.count], list(op.inputs)[found.count :]
    borrowed = [inputs.pop() for _ in range(found.borrowed)][::-1]
    of_borrowed: list[Any] = [None] * found.borrowed
    known: list[Any] = list(gradients[: found.count])
    alive = [s for s in (reference() for reference in found.scopes) if s is not None and s.alive]
    plan = found.dispatcher.plan(found.op_id) if alive else None
    building = Building(_internals.default_graph(), tuple(alive), needs_gradient=True)
    template: list[Any] = [None] * found.inputs
    for position, tensor in zip(found.positions, inputs, strict=True):
        template[position] = tensor
    building.template = building.likes = template
    with found.dispatcher.build(building):
        for action in plan.before_backward if plan else ():
            known = found.dispatcher.run(action, known)
        if plan and plan.replace_backward is not None:
            result = replaced_gradients(found.dispatcher, plan.replace_backward, known, template)
        else:
            result = list(template)
            own = _own_gradients(op.graph, outputs, [*inputs, *borrowed], known)
            of_borrowed = own[len(inputs) :]
            for position, gradient in zip(found.positions, own, strict=False):
                result[position] = gradient
        for action in plan.after_backward if plan else ():
            result = found.dispatcher.run(action, result)
    own_inputs = [result[position] for position in found.positions]
    return [None] * found.count + own_inputs + of_borrowed


def _own_gradients(
    graph: Any, outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
    result: list[Any] = _internals.gradients_in_graph(
        [y for y, _ in pairs],
        list(inputs),
        grad_ys=[g for _, g in pairs],
        stop_gradients=list(inputs),
        src_graph=graph,
    )
    return result


tf.RegisterGradient(REPLACED)(_replaced)
