"""The graphs whose operators have ids: for gradients that are built and run later."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping
from typing import Any

import attrs

from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import ForwardOp
from amanda_tensorflow.graphs.sites import Site


@attrs.frozen(eq=False)
class IdentifiedOp:
    """A forward operator, or an operator of its gradient, of a graph that was run before.

    Attributes:
        op_id: the forward operator's id.
        depth: 0 for the forward operator, 1 for one of its gradient, ...
        site, source: where it comes from; its values are read there.
    """

    op_id: str
    depth: int
    site: Site | None = None
    source: Any = None


@attrs.define(eq=False)
class _KnownGraph:
    """What is known of one vanilla graph: see :meth:`GraphIds.ids_of`."""

    ids: str = ""
    captured: Mapping[int, Any] = attrs.field(factory=dict)


class GraphIds:
    """Ids by graph. Vanilla graphs are held weakly; a copy remembers its operators itself."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[Any, _KnownGraph] = weakref.WeakKeyDictionary()
        self._names: collections.Counter[str] = collections.Counter()

    def ids_of(self, graph: Any, name: str, captured: Mapping[int, Any]) -> str:
        """What the ids of a vanilla graph's operators begin with.

        Args:
            name: the graph's name; the second one of that name is called ``name@1``.
            captured: the concrete tensors that its placeholders stand for.
        """
        known = self._graphs.get(graph)
        if known is None:
            count = self._names[name]
            self._names[name] += 1
            known = self._graphs[graph] = _KnownGraph(f"{name}@{count}" if count else name)
        known.captured = captured
        return known.ids

    def add_body(self, graph: Any, ids: str) -> None:
        """Note a vanilla body or branch; a gradient that was built before refers to it."""
        self._graphs[graph] = _KnownGraph(ids)

    def note(self, graph: Any, op: Any, what: IdentifiedOp) -> None:
        """Note an operator of an instrumented copy."""
        _internals.known_ops(graph, make=True)[op.name] = what

    def is_copy(self, graph: Any) -> bool:
        """Whether a graph is an instrumented copy: what has no id in it was inserted."""
        return _internals.known_ops(graph) is not None

    def find(self, forward: ForwardOp, sites: dict[int, Site]) -> IdentifiedOp | None:
        """An operator of a graph that was run before; None if it is not known.

        Args:
            sites: those of vanilla graphs that were asked for before, by the graph's id.
        """
        graph: Any = forward.graph()
        if graph is None:
            # It was let go of.
            return None
        ops: dict[str, IdentifiedOp] | None = _internals.known_ops(graph)
        if ops is not None:
            return ops.get(forward.name)
        known = self._graphs.get(graph)
        if known is None:
            return None
        site = sites.get(id(graph))
        if site is None:
            site = sites[id(graph)] = Site(graph, known.ids, captured=dict(known.captured))
        depth, root = 0, forward
        while root.graph() is graph and root.name in site.log.owners:
            root, depth = site.log.owners[root.name].forward, depth + 1
        if root.graph() is not graph:
            return None
        source = site.named(root.name)
        return IdentifiedOp(site.op_id(source), depth, site, source)
