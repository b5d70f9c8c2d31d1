"""The topological order in which a graph is replayed, gradients after what they depend on."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amanda_tensorflow.gradient_map.recording import GradientCall, Slices, TensorName, tensor_name
from amanda_tensorflow.graphs.sites import OpSite

_BACK_EDGES = {"Merge": "NextIteration", "RefMerge": "RefNextIteration"}
"""In loops of TensorFlow 1, the operator that reads a back edge, and the one at its source."""


def ordered(site: OpSite, roots: Iterable[Any]) -> list[Any]:
    """The operators that `roots` need, these included, each after those that it needs.

    A backward operator also comes after its forward operator, and after all gradients that its
    gradient function was given: by then the plan of the forward operator is known. In loops of
    TensorFlow 1 this can be impossible; then only data and control dependencies count.
    """
    roots = list(roots)
    done = site.ops
    order = _sorted(roots, lambda op: [*_wishes(site, op), *_needs(op)], done)
    if _is_valid(order, done):
        return order
    return _sorted(roots, _needs, done)


def needed(roots: Sequence[Any]) -> list[Any]:
    """The operators that `roots` need, these included, in an order in which they can run."""
    return _sorted(roots, _needs, {})


def _needs(op: Any) -> list[Any]:
    """The operators whose outputs an operator reads or waits for, back edges of loops left out."""
    skipped = _BACK_EDGES.get(op.type)
    sources = [tensor.op for tensor in op.inputs]
    if skipped is not None:
        sources = [source for source in sources if source.type != skipped]
    return [*sources, *op.control_inputs]


def _wishes(site: OpSite, op: Any) -> Iterator[Any]:
    """The further operators that should come before an operator: see :func:`ordered`."""
    log, graph = site.log, site.graph
    if not log.calls:
        return
    call = log.owners.get(op.name)
    if call is not None:
        if call.forward.graph() is graph:
            yield site.named(call.forward.name)
        yield from _operators(site, call.grad_outputs)
        yield from _indexing(site, call.output_slices)
    for tensor in op.inputs:
        for producer in site.producers.get(tensor_name(tensor), ()):
            if producer is call:
                continue
            yield from _call_needs(site, producer)


def _call_needs(site: OpSite, call: GradientCall) -> Iterator[Any]:
    """The operators after which the gradients that a call hands on are final."""
    if call.forward.graph() is site.graph:
        yield site.named(call.forward.name)
    yield from _operators(site, call.grad_outputs)
    yield from _operators(site, call.grad_inputs)
    yield from _indexing(site, call.output_slices)
    yield from _indexing(site, call.input_slices)


def _operators(site: OpSite, names: Sequence[TensorName | None]) -> Iterator[Any]:
    """The operators that make these tensors."""
    for name in names:
        if name is not None:
            yield site.named(name[0])


def _indexing(site: OpSite, slices: Slices) -> Iterator[Any]:
    """The operators that make the indices and shapes of slices."""
    for _, *parts in slices.values():
        yield from _operators(site, parts)


def _sorted(roots: Sequence[Any], before: Any, done: Mapping[str, Any]) -> list[Any]:
    """A depth-first order; it does not wait for an operator that is being visited.

    Without recursion: graphs are deeper than Python's stack.

    Args:
        before: gives the operators that come before an operator.
        done: by name, the operators that are in the copy already.
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
                    # The source of a back edge is needed, too; it comes later.
                    waiting_roots.extend(tensor.op for tensor in op.inputs)
    return order


def _is_valid(order: Sequence[Any], done: Mapping[str, Any]) -> bool:
    """True if each operator comes after those that it reads or waits for."""
    seen = set(done)
    for op in order:
        if any(source.name not in seen for source in _needs(op)):
            return False
        seen.add(op.name)
    return True
