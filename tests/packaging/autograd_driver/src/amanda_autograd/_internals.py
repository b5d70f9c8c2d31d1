"""The private symbols of autograd that the driver needs, seen in autograd 1.9.1."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
from autograd.extend import Box, VJPNode

PRIMITIVE: types.CodeType = anp.add.__code__
"""The code that all operators share: they are closures of one function."""


def vanilla_of(operator: Any) -> Any:
    """A function that does what an operator does, whatever code that has later."""
    names = operator.__globals__, operator.__name__, operator.__defaults__, operator.__closure__
    vanilla = types.FunctionType(operator.__code__, *names)
    vanilla.__kwdefaults__ = operator.__kwdefaults__
    return vanilla


_STUB = """
def make({0}):
    def stub(*args, **kwargs):
        if 0: {0}
        called = "called"
        return called(*args, **kwargs)
    return stub.__code__
"""


def code_calling(called: Callable[..., Any]) -> types.CodeType:
    """Code that calls `called` with its own arguments, for an operator.

    A function takes only code with as many free variables as it has. Its globals are autograd's, so
    that `called` is a constant.
    """
    made: dict[str, Any] = {}
    exec(_STUB.format(", ".join(PRIMITIVE.co_freevars)), made)
    code: types.CodeType = made["make"](*PRIMITIVE.co_freevars)
    constants = tuple(called if value == "called" else value for value in code.co_consts)
    return code.replace(co_consts=constants, co_name=PRIMITIVE.co_name)


def node_in(box: Box, trace: int) -> Any:
    """The node of a box; None if it belongs to another trace than `trace`."""
    return box._node if box._trace == trace else None


def is_outermost(box: Box) -> bool:
    """Whether a backward pass alone differentiates it: no forward mode, no outer pass."""
    return isinstance(box._node, VJPNode) and not isinstance(box._value, Box)
