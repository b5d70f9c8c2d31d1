"""Operators that run others: control flow, checkpoints and jitted functions, one operator at a time.

Each function gets the arguments and the parameters of a primitive, and binds the operators within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from amanda_jax._internals import lowered, scanned


def jit(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """A jitted function."""
    return list(jaxpr_as_fun(params["jaxpr"])(*args))


def checkpoint(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """``jax.checkpoint``, which keeps its values."""
    return list(jaxpr_as_fun(ClosedJaxpr(params["jaxpr"], ()))(*args))


def cond(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """``jax.lax.cond`` and ``switch``: the branch that is taken."""
    index, *rest = args
    return list(jaxpr_as_fun(params["branches"][int(lowered(index))])(*rest))


def while_loop(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """``jax.lax.while_loop``."""
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body = args[:tests], args[tests : tests + steps]
    carry = list(args[tests + steps :])
    goes_on, body = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])
    while bool(lowered(goes_on(*of_test, *carry)[0])):
        carry = list(body(*of_body, *carry))
    return carry


def scan(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """``jax.lax.scan`` and ``map``: step by step, the results stacked."""
    fixed, carry, columns = scanned(args, params)
    carries, length, step = len(carry), params["length"], jaxpr_as_fun(params["jaxpr"])
    made: list[list[Any]] = [[] for _ in params["jaxpr"].out_avals[carries:]]
    for place in reversed(range(length)) if params["reverse"] else range(length):
        row = [jax.lax.index_in_dim(column, place, keepdims=False) for column in columns]
        found = step(*fixed, *carry, *row)
        carry = list(found[:carries])
        for column, value in zip(made, found[carries:], strict=True):
            column.insert(0 if params["reverse"] else length, value)
    kinds = params["jaxpr"].out_avals[carries:]
    return carry + [
        jnp.stack(column) if length else jnp.zeros((0, *kind.shape), kind.dtype)
        for column, kind in zip(made, kinds, strict=True)
    ]


INSIDE: Mapping[str, Callable[..., list[Any]]] = {
    "jit": jit,
    "remat2": checkpoint,
    "cond": cond,
    "while": while_loop,
    "scan": scan,
}
"""By name of the primitive what runs it."""


def runs_inside(primitive: str, params: Mapping[str, Any]) -> bool:
    """True if the operators of a primitive can run one by one: not where ``vmap`` has given each
    example a condition of its own."""
    is_shared = primitive != "while" or not params["cond_jaxpr"].out_avals[0].shape
    return primitive in INSIDE and is_shared


def holds_operators(params: Mapping[str, Any]) -> bool:
    """True if a primitive runs others."""
    return any(hasattr(value, "eqns") for value in params.values())
