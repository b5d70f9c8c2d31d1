"""The order in which a graph is replayed."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda_tensorflow.gradient_map.recording import (
    GradientCall,
    TensorName,
    tensor_name,
)
from amanda_tensorflow.graphs.sites import Site

_BACK_EDGES = {"Merge": "NextIteration", "RefMerge": "RefNextIteration"}


def ordered(site: Site, roots: Iterable[Any]) -> list[Any]:
    """The operators that `roots` need, each after what it needs.

    A backward operator comes after the forward operator that it belongs to, and
    after all gradients that its gradient function was given: what tools want of
    that operator is known by then. Where this cannot be (version 1 loops), the
    order of the data alone holds.
    """
    roots = list(roots)
    done = site.ops
    order = _sorted(roots, lambda op: [*_wishes(site, op), *_needs(op)], done)
    if _is_valid(order, done):
        return order
    return _sorted(roots, _needs, done)


def _needs(op: Any) -> list[Any]:
    """The operators that come first in any order."""
    skipped = _BACK_EDGES.get(op.type)
    sources = [tensor.op for tensor in op.inputs]
    if skipped is not None:
        sources = [source for source in sources if source.type != skipped]
    return [*sources, *op.control_inputs]


def _wishes(site: Site, op: Any) -> Iterator[Any]:
    """The operators that should come first."""
    log, graph = site.log, site.graph
    if not log.calls:
        return
    call = log.owners.get(op.name)
    if call is not None:
        if call.forward.graph() is graph:
            yield site.named(call.forward.name)
        yield from _operators(site, call.grad_outputs)
    for tensor in op.inputs:
        for producer in site.producers.get(tensor_name(tensor), ()):
            if producer is call:
                continue
            yield from _call_needs(site, producer)


def _call_needs(site: Site, call: GradientCall) -> Iterator[Any]:
    """What is needed to know the final gradients of a gradient call."""
    if call.forward.graph() is site.graph:
        yield site.named(call.forward.name)
    yield from _operators(site, call.grad_outputs)
    yield from _operators(site, call.grad_inputs)


def _operators(site: Site, names: Sequence[TensorName | None]) -> Iterator[Any]:
    for name in names:
        if name is not None:
            yield site.named(name[0])


def _sorted(roots: Sequence[Any], before: Any, done: Mapping[str, Any]) -> list[Any]:
    """Depth first, without recursion; an operator that is being visited is not waited for.

    Args:
        done: operators that are there already, by name.
    """
    order: list[Any] = []
    seen = set(done)
    waiting_roots = collections.deque(roots)
    while waiting_roots:
        root = waiting_roots.popleft()
        if root.name in seen:
            continue
        seen.add(root.name)
        stack = [(root, iter(before(root)))]
        while stack:
            op, sources = stack[-1]
            for source in sources:
                if source.name not in seen:
                    seen.add(source.name)
                    stack.append((source, iter(before(source))))
                    break
            else:
                order.append(op)
                stack.pop()
                if op.type in _BACK_EDGES:
                    # The end of a loop is needed, and comes later.
                    waiting_roots.extend(tensor.op for tensor in op.inputs)
    return order


def _is_valid(order: Sequence[Any], done: Mapping[str, Any]) -> bool:
    """Whether each operator comes after those that it cannot do without."""
    seen = set(done)
    for op in order:
        if any(source.name not in seen for source in _needs(op)):
            return False
        seen.add(op.name)
    return True
