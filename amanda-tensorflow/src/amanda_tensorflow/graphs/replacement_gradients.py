"""The gradient of a replaced operator, for gradients that are built after the copy.

The outputs of a replacement leave it through one ``IdentityN``, whose gradient function is that of
the operator as a whole: the tool's ``replace_backward_op``, or else the gradient of the replacement
itself, between the routines that act on the whole operator. ``tf.gradients`` and tapes find it like
any other gradient function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.engine.plan import EMPTY_PLAN
from amanda.interface.action import Action
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building, WeakScopes, alive, weak_scopes
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.sites import ForwardState
from amanda_tensorflow.graphs.vjp import differentiate
from amanda_tensorflow.operators.gradient_shapes import checked, gradient_shapes
from amanda_tensorflow.operators.types import has_gradient

REPLACED = "AmandaReplacedOp"
"""Name under which the gradient function is registered."""


@attrs.frozen(eq=False)
class ReplacedOp:
    """A replaced operator of a copy, as its gradient function needs it.

    Attributes:
        dispatcher: core's side of the driver.
        scopes: weak references to the scopes of the copy.
        op_id: the operator's id.
        key: the key of its records.
        count: how many outputs it has.
        positions: which of its inputs may have a gradient.
        inputs: how many inputs it has.
        captured: how many tensors the replacement captures besides.
    """

    dispatcher: GraphDispatcher
    scopes: WeakScopes
    op_id: str
    key: str
    count: int
    positions: tuple[int, ...]
    inputs: int
    captured: int


def leave(
    dispatcher: GraphDispatcher, building: Building, state: ForwardState, captured: Sequence[Any]
) -> list[Any]:
    """Add the node by which the outputs of a replacement leave it. Returns its outputs.

    Args:
        state: the state of the operator, with inputs and outputs of its replacement.
        captured: the tensors that the replacement captures.
    """
    assert state.replaced is not None
    given, outputs = state.replaced
    positions = tuple(i for i, tensor in enumerate(given) if has_gradient(tensor))
    with building.graph.gradient_override_map({"IdentityN": REPLACED}):
        node = _internals.identity_n([*outputs, *(given[i] for i in positions), *captured])
    sizes = len(outputs), positions, len(given), len(captured)
    replaced = ReplacedOp(dispatcher, weak_scopes(building), state.op_id, state.key, *sizes)
    _internals.annotate(building.graph, node[0].op.name, replaced)
    return list(node[: len(outputs)])


def _replaced(op: Any, *gradients: Any) -> list[Any]:
    """The gradient function of the node: gradients for inputs and captured tensors, none else."""
    found: ReplacedOp = _internals.annotation(op.graph, op.name)
    inputs = list(op.inputs)[found.count :]
    captured = [inputs.pop() for _ in range(found.captured)][::-1]
    scopes = alive(found.scopes)
    plan = (found.dispatcher.plan(found.op_id, key=found.key) if scopes else None) or EMPTY_PLAN
    building = Building(_internals.default_graph(), scopes, needs_gradient=True)
    template: list[Any] = [None] * found.inputs
    for position, tensor in zip(found.positions, inputs, strict=True):
        template[position] = tensor
    building.template = building.likes = template
    with found.dispatcher.build(building):
        known = list(gradients[: found.count])
        if plan.replace_backward is not None:
            known = _after_routines(found, plan.before_backward, _as_tensors(known))
            result = replaced_gradients(found.dispatcher, plan.replace_backward, known, template)
            result = checked(result, plan.replace_backward, gradient_shapes(template))
            of_captured: list[Any] = [None] * found.captured
        else:
            known = _after_routines(found, plan.before_backward, known)
            own = _derived(op, known, [*inputs, *captured])
            result, of_captured = list(template), own[len(inputs) :]
            for position, gradient in zip(found.positions, own, strict=False):
                result[position] = gradient
        result = _after_routines(found, plan.after_backward, result)
    own_inputs = [result[position] for position in found.positions]
    return [None] * found.count + own_inputs + of_captured


def _after_routines(
    found: ReplacedOp, actions: Sequence[Action], gradients: list[Any]
) -> list[Any]:
    """Return gradients after these routines, which get tensors.

    The gradient of an operator that gathers rows is no tensor, but slices.
    """
    if actions:
        gradients = _as_tensors(gradients)
    for action in actions:
        gradients = found.dispatcher.run(action, gradients)
    return gradients


def _as_tensors(gradients: Iterable[Any]) -> list[Any]:
    """Return gradients with slices made dense."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def _derived(op: Any, known: Sequence[Any], tensors: list[Any]) -> list[Any]:
    """Return the gradients of tensors, derived in the graph of the node.

    Args:
        known: those of its first inputs, the outputs of the replacement; None where there is none.
    """
    pairs = [(y, g) for y, g in zip(op.inputs, known, strict=False) if g is not None]
    return differentiate([y for y, _ in pairs], tensors, [g for _, g in pairs], op.graph)


tf.RegisterGradient(REPLACED)(_replaced)
