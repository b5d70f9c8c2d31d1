"""The private symbols of JAX 0.10 and 0.11 and of Flax 0.12 that the driver needs.

Every operator ends in ``Primitive.bind_with_trace(trace, ...)``. A trace computes values, or stages
them out for a compiler, or transforms: then it has a parent, and its values are in boxes (tracers).
A jitted function is compiled code behind a cache in C++, whose misses come to Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import core, custom_derivatives, pjit, shard_map, source_info_util
from jax._src.interpreters import ad, batching

LIBRARY = os.path.dirname(jax.__file__) + os.sep

DIFFERENTIATING = (ad.LinearizeTrace, ad.JVPTrace)
_BOXES = (ad.LinearizeTracer, ad.JVPTracer)

NamedScope = source_info_util.ExtendNameStackContextManager
"""What ``jax.named_scope`` returns."""

ShardMap = shard_map.ShardMapPrimitive
"""The class of the primitive that runs a function once for each device."""

UNUSED = custom_derivatives.SymbolicZero
"""The type of a gradient that does not exist, in the rule of a ``jax.custom_vjp``."""

PRIMITIVES = (
    core.Primitive,
    custom_derivatives.CustomJVPCallPrimitive,
    custom_derivatives.CustomVJPCallPrimitive,
)
"""The classes of operators that bind in a way of their own."""

IS_OPEN = core.config_ext.Config("amanda_scope", False, include_in_jit_key=True)
"""A part of the key of that cache: while it is set no function is found there."""

INFER, RUN = (pjit, "_infer_params"), (pjit, "_run_python_pjit")
"""What a jitted function calls where it is not found in the cache."""

BACKWARD = (ad, "backward_pass3")
BIND = "bind_with_trace"

LINEN_CALL = "_call_wrapped_method"
"""The method of ``flax.linen.Module`` that calls all others."""

NEEDED = {
    core: ("Primitive", "EvalTrace", "Tracer", "eval_trace", "set_current_trace", "trace_ctx"),
    **{kind: (BIND,) for kind in (*PRIMITIVES, ShardMap)},
    pjit: ("PjitParams", "_infer_params", "_run_python_pjit", "jit_p"),
    source_info_util: ("ExtendNameStackContextManager",),
    ad: (*(kind.__name__ for kind in (*DIFFERENTIATING, *_BOXES)), "Zero", "backward_pass3"),
    batching: ("BatchTrace", "BatchTracer"),
}


def problems() -> list[str]:
    """The symbols that this JAX lacks."""
    lacks = [(owner, n) for owner, names in NEEDED.items() for n in names if not hasattr(owner, n)]
    return [f"{owner.__name__} has no {name}" for owner, name in lacks]


class Inferred(pjit.PjitParams):  # type: ignore[misc]
    """How a jitted function is called, with what ``jax.jit`` was told."""

    info: Any


def is_primitive(function: Any) -> bool:
    """True for a function that JAX jits to run one primitive."""
    return bool(getattr(function, "_apply_primitive", False))


def compiled(inferred: Any, args: Sequence[Any]) -> Any:
    """The result of a jitted function that is called with these arrays."""
    found = pjit.jit_p.bind(*args, **inferred.params)
    return jax.tree.unflatten(inferred.out_tree, found)


def scanned(args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[list[Any]]:
    """The constants, the carried values and the columns among the arguments of ``jax.lax.scan``."""
    if "ft_in" in params:  # JAX 0.11
        return [list(part) for part in params["ft_in"].update(args).unpack()]
    constants = params["num_consts"]
    carries = constants + params["num_carry"]
    return list(args[:constants]), list(args[constants:carries]), list(args[carries:])


def current_trace() -> Any:
    """The trace that operators run under."""
    return core.trace_ctx.trace


def under(trace: Any) -> AbstractContextManager[Any]:
    """Within it, operators run under a trace."""
    manager: AbstractContextManager[Any] = core.set_current_trace(trace)
    return manager


def evaluating() -> AbstractContextManager[Any]:
    """Within it, operators compute values."""
    return under(core.eval_trace)


def stack(trace: Any) -> Iterator[Any]:
    """A trace and those below it."""
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def evaluates(trace: Any) -> bool:
    """True if a trace computes values, and stages nothing out."""
    *above, last = stack(trace)
    return isinstance(last, core.EvalTrace) and all(
        isinstance(t, (*DIFFERENTIATING, batching.BatchTrace)) for t in above
    )


def innermost(tensors: Iterable[Any]) -> Any:
    """Of the traces of tensors that are differentiated, that with most others below it."""
    return max((x._trace for x in tensors), key=lambda trace: len(list(stack(trace))))


def below(trace: Any) -> AbstractContextManager[Any]:
    """Within it, operators run as below a trace."""
    return under(trace.parent_trace)


def belongs(tensor: Any, trace: Any) -> bool:
    """True if a tensor is differentiated in this trace."""
    return getattr(tensor, "_trace", None) is trace


def without(tensor: Any, trace: Any) -> Any:
    """A tensor without the box of a trace."""
    return tensor.primal if belongs(tensor, trace) else tensor


def own_trace(trace: Any, args: Sequence[Any]) -> Any:
    """The trace that computes with these arguments: one that has a tracer among them."""
    for found in stack(trace):
        if not isinstance(found, DIFFERENTIATING):
            break
        traces = [x._trace for x in args if isinstance(x, core.Tracer)]
        if any(t is found or getattr(t, "tag", t) is found.tag for t in traces):
            break
    return found


def has_tangent(tensor: Any) -> bool:
    """True if forward-mode differentiation computes a tangent beside a tensor."""
    is_linear = isinstance(tensor, ad.LinearizeTracer) and not tensor._trace.is_vjp
    return is_linear or isinstance(tensor, ad.JVPTracer)


def _inner(tensor: Any) -> Any:
    """What a box holds; None for an array."""
    if isinstance(tensor, _BOXES):
        return tensor.primal
    return tensor.val if isinstance(tensor, batching.BatchTracer) else None


def lowered(tensor: Any) -> Any:
    """A tensor without the boxes of transformations: of ``vmap``, the whole batch."""
    while (inner := _inner(tensor)) is not None:
        tensor = inner
    return tensor


def is_batched(tensor: Any) -> bool:
    """True if ``vmap`` has hidden an axis of a tensor."""
    while tensor is not None:
        if isinstance(tensor, batching.BatchTracer):
            return True
        tensor = _inner(tensor)
    return False


def boxed_as(old: Any, value: Any) -> Any:
    """A value in the boxes that `old` has: its gradient is that of `old`."""
    if isinstance(old, _BOXES):
        return type(old)(old._trace, boxed_as(old.primal, value), old.tangent)
    if isinstance(old, batching.BatchTracer):
        value = boxed_as(old.val, value)
        return batching.BatchTracer(old._trace, value, old.batch_dim, old.source_info)
    return value


def is_differentiated(tensor: Any) -> bool:
    """True if operators on a tensor are recorded for a backward pass."""
    return isinstance(tensor, ad.LinearizeTracer) and bool(tensor._trace.is_vjp)


def is_leaf(tensor: Any) -> bool:
    """True if the program differentiates by a tensor."""
    return is_differentiated(tensor) and getattr(tensor.tangent, "parent", tensor) is None


def zero_of(tensor: Any) -> Any:
    """The gradient of a tensor that has none."""
    return ad.Zero(core.typeof(tensor).to_ct_aval())


def is_of_jax(jaxpr: Any) -> bool:
    """True if the function that a jaxpr was made of is JAX's own."""
    return f" at {LIBRARY}" in str(jaxpr.debug_info.func_src_info)
