"""What tools get to know of an operator: its name, its parameters, and what it consists of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from amanda_jax._internals import lowered


@attrs.frozen
class JaxOp:
    """An operator: a primitive, or a function of JAX that is jitted or has its own derivative.

    Attributes:
        jaxpr: what a jitted function consists of; None for others.
        ranks: of a primitive's inputs.
    """

    __name__: str
    jaxpr: Any = None
    ranks: tuple[int, ...] = ()


def described(
    name: str, args: Sequence[Any], params: Mapping[str, Any]
) -> tuple[JaxOp, inspect.Signature, Mapping[str, Any]]:
    """A primitive that binds: the operator, its parameters, and its attributes."""
    shown = params
    if name == "jit":
        name, shown = params["name"], {}
        told = params["jaxpr"].jaxpr.debug_info.arg_names
    elif "subfuns" in params:
        # A function with a derivative of its own.
        info, shown = params["subfuns"][0].debug_info, {}
        name, told = info.func_name, info.arg_names
    else:
        told = _names(name, tuple(shown))
    jaxpr = getattr(params.get("jaxpr"), "jaxpr", None)
    op = JaxOp(name.strip("_"), jaxpr, tuple(np.ndim(lowered(x)) for x in args))
    names = [path.split("[")[0] for path in told or ()]
    return op, _signature(names, len(args), tuple(shown)), shown


@functools.cache
def _names(primitive: str, attributes: tuple[str, ...]) -> list[str]:
    """The names of the tensors that a primitive takes, as ``jax.lax`` has them."""
    try:
        found = inspect.signature(getattr(jax.lax, primitive)).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return []
    named = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [name for name in named if name not in attributes]


def _signature(names: Sequence[str], count: int, attributes: Sequence[str]) -> inspect.Signature:
    """Tensors by position, and attributes by keyword."""
    kinds = inspect.Parameter
    names = names[:count]
    if len(set(names)) == count:
        tensors = [kinds(name, kinds.POSITIONAL_ONLY) for name in names]
    else:
        rest = names[0] if len(set(names)) == 1 else "operands"
        tensors = [kinds(rest, kinds.VAR_POSITIONAL)]
    return inspect.Signature(tensors + [kinds(name, kinds.KEYWORD_ONLY) for name in attributes])
