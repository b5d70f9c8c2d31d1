"""Formulas of PyTorch's own counter, ``torch.utils.flop_counter``, for operators without one here.

Programs add to it by ``torch.utils.flop_counter.register_flop_formula``. Its formulas take the
arguments of the operator with shapes in place of tensors, and the shape of the result as
``out_val``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from amanda_tools._internals import declared_arguments
from amanda_tools._operators.signature import CallShapes


def torch_formula(op: Any) -> Callable[[CallShapes], int | None] | None:
    """Return PyTorch's formula of an operator; None without one.

    Args:
        op: ``context.get_op()``: an operator of ``torch.ops``, or a function of PyTorch.
    """
    torch, counter = sys.modules.get("torch"), sys.modules.get("torch.utils.flop_counter")
    if torch is None or counter is None:
        return None
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, type(torch.ops.aten.mm)):
        packet = getattr(torch.ops.aten, str(getattr(op, "__name__", "")), None)
    found = counter.flop_registry.get(packet)
    if found is None:
        return None

    def flops(call: CallShapes) -> int | None:
        args, kwargs = _arguments(packet, call)
        out = call.outputs[0] if len(call.outputs) == 1 else call.outputs
        try:
            return int(found(*args, **kwargs, out_val=out))
        except (AttributeError, AssertionError, RuntimeError) as error:
            # One that takes tensors (get_raw=True), or refuses these.
            raise LookupError(str(error)) from error

    return flops


def _arguments(packet: Any, call: CallShapes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call as PyTorch declares them, shapes in place of tensors."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    position, names = 0, call.signature.names
    for argument in declared_arguments(packet):
        value = call.attributes.get(argument.name, argument.default)
        if argument.is_list:
            # The tensors of a list are inputs of one name.
            end = position
            while end < len(names) and names[end] == names[position]:
                end += 1
            value, position = list(call.inputs[position:end]), end
        elif argument.is_tensor:
            value = call.inputs[position] if position < len(call.inputs) else None
            position += 1
        if argument.is_keyword:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs
