"""The gradient of a replaced operator, for gradients that are built after the copy.

The outputs of a replacement leave it through one ``IdentityN``, whose gradient function is that of
the operator as a whole: the tool's ``replace_backward_op``, or else the gradient of the replacement
itself, between the routines that act on the whole operator. ``tf.gradients`` and tapes find it like
any other gradient function.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
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
    scopes: tuple[weakref.ref[LiveScope], ...]
    op_id: str
    key: str
    count: int
    positions: tuple[int, ...]
    inputs: int
    captured: int


def leave(
    dispatcher: GraphDispatcher,
    building: Building,
    state: ForwardState,
    captured: Sequence[Any],
) -> list[Any]:
    """Add the node by which the outputs of a replacement leave it. Returns its outputs.

    Args:
        state: the state of the operator, with inputs and outputs of its replacement.
        captured: the tensors that the replacement captures.
    """
    assert state.replaced is not None
    given, outputs = state.replaced
    positions = tuple(i for i, tensor in enumerate(given) if has_gradient(tensor))
    scopes = tuple(weakref.ref(scope) for scope in building.scopes)
    with building.graph.gradient_override_map({"IdentityN": REPLACED}):
        node = _internals.identity_n([*outputs, *(given[i] for i in positions), *captured])
    sizes = len(outputs), positions, len(given), len(captured)
    replaced = ReplacedOp(dispatcher, scopes, state.op_id, state.key, *sizes)
    _internals.annotate(building.graph, node[0].op.name, replaced)
    return list(node[: len(outputs)])


def _replaced(op: Any, *gradients: Any) -> list[Any]:
    """The gradient function of the node: gradients for inputs and captured tensors, none else."""
    found: ReplacedOp = _internals.annotation(op.graph, op.name)
    outputs, inputs = list(op.inputs)[: found.count], list(op.inputs)[found.count :]
    captured = [inputs.pop() for _ in range(found.captured)][::-1]
    of_captured: list[Any] = [None] * found.captured
    known: list[Any] = list(gradients[: found.count])
    alive = [s for s in (reference() for reference in found.scopes) if s is not None and s.alive]
    plan = found.dispatcher.plan(found.op_id, key=found.key) if alive else None
    building = Building(_internals.default_graph(), tuple(alive), needs_gradient=True)
    template: list[Any] = [None] * found.inputs
    for position, tensor in zip(found.positions, inputs, strict=True):
        template[position] = tensor
    building.template = building.likes = template
    with found.dispatcher.build(building):
        if plan and (plan.before_backward or plan.replace_backward):
            # Routines get tensors; the gradient of an operator that gathers rows is none.
            known = [None if g is None else tf.convert_to_tensor(g) for g in known]
        for action in plan.before_backward if plan else ():
            known = found.dispatcher.run(action, known)
        if plan and plan.replace_backward is not None:
            result = replaced_gradients(found.dispatcher, plan.replace_backward, known, template)
            result = checked(result, plan.replace_backward, gradient_shapes(template))
        else:
            result = list(template)
            pairs = [(y, g) for y, g in zip(outputs, known, strict=True) if g is not None]
            ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
            own = differentiate(ys, [*inputs, *captured], gs, op.graph)
            of_captured = own[len(inputs) :]
            for position, gradient in zip(found.positions, own, strict=False):
                result[position] = gradient
        if plan and plan.after_backward:
            result = [None if g is None else tf.convert_to_tensor(g) for g in result]
        for action in plan.after_backward if plan else ():
            result = found.dispatcher.run(action, result)
    own_inputs = [result[position] for position in found.positions]
    return [None] * found.count + own_inputs + of_captured


tf.RegisterGradient(REPLACED)(_replaced)
