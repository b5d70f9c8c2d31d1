"""The graphs that have been met, with what makes the ids of their operators.

A gradient that is built later refers to the operators of earlier graphs, and continues their ids
(:mod:`amanda_tensorflow.graphs.op_ids`).
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping
from typing import Any

import attrs

from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import ForwardOp
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.keras_layers.paths import LayerIds
from amanda_tensorflow.keras_layers.recording import LayerPath


@attrs.frozen(eq=False)
class IdentifiedOp:
    """A forward operator, or a backward operator, of a graph that was run before.

    Attributes:
        op_id: the forward operator's id.
        key: the key of its records.
        depth: 0 for the forward operator, 1 for an operator of its gradient, 2 for one of the
            gradient of that, ...
        site: the vanilla graph that it comes from, through which values of variables are read.
        source: the operator of that graph.
    """

    op_id: str
    key: str
    depth: int
    site: OpSite | None = None
    source: Any = None


@attrs.define(eq=False)
class _KnownGraph:
    """A vanilla graph; for the attributes see :meth:`GraphIds.ids_of`."""

    ids: str = ""
    captured: Mapping[int, Any] = attrs.field(factory=dict)
    layer_ids: LayerIds = attrs.field(factory=LayerIds)


class GraphIds:
    """The ids of one driver. Vanilla graphs are held weakly; a copy keeps its operators' ids."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[Any, _KnownGraph] = weakref.WeakKeyDictionary()
        self._names: collections.Counter[str] = collections.Counter()

    def ids_of(self, graph: Any, name: str, captured: Mapping[int, Any]) -> str:
        """The prefix of the ids of a vanilla graph's operators.

        Args:
            name: the graph's name; the second graph of that name is called ``name@1``.
            captured: by ``id`` of a placeholder, the concrete tensor that it stands for.
        """
        known = self._graphs.get(graph)
        if known is None:
            count = self._names[name]
            self._names[name] += 1
            known = self._graphs[graph] = _KnownGraph(f"{name}@{count}" if count else name)
        known.captured = captured
        return known.ids

    def layer_ids(self, graph: Any, base: LayerPath | None = None) -> LayerIds:
        """New ids for the operators that layers have made in a graph of :meth:`ids_of`, to which
        gradients refer from now on.

        Args:
            base: the layers that call the graph.
        """
        made = self._graphs[graph].layer_ids = LayerIds(base)
        return made

    def add_body(
        self, graph: Any, ids: str, layer_ids: LayerIds, captured: Mapping[int, Any]
    ) -> None:
        """Note the ids of a vanilla body or branch, to which a gradient may refer.

        Args:
            captured: as that of :meth:`ids_of`.
        """
        self._graphs[graph] = _KnownGraph(ids, captured, layer_ids)

    def note(self, graph: Any, op: Any, identified: IdentifiedOp) -> None:
        """Note an operator of an instrumented copy."""
        _internals.known_ops(graph, make=True)[op.name] = identified

    def is_copy(self, graph: Any) -> bool:
        """True if a graph is an instrumented copy; its operators without id were inserted."""
        return _internals.known_ops(graph) is not None

    def find(self, forward: ForwardOp, sites: dict[int, OpSite]) -> IdentifiedOp | None:
        """An operator of a graph that was run before; None if it has no id.

        Args:
            sites: by ``id`` of a vanilla graph, the sites that were made for earlier calls.
        """
        graph: Any = forward.graph()
        if graph is None:
            # The graph is gone.
            return None
        ops: dict[str, IdentifiedOp] | None = _internals.known_ops(graph)
        if ops is not None:
            return ops.get(forward.name)
        known = self._graphs.get(graph)
        if known is None:
            return None
        site = sites.get(id(graph))
        if site is None:
            site = sites[id(graph)] = OpSite(
                graph, known.ids, known.layer_ids, captured=dict(known.captured)
            )
        depth, root = 0, forward
        while root.graph() is graph and root.name in site.log.owners:
            root, depth = site.log.owners[root.name].forward, depth + 1
        if root.graph() is not graph:
            # A function that computes a gradient of another one, of which no copy was needed.
            found = self.find(root, sites)
            if found is None:
                return None
            source = site.named(forward.name)
            return IdentifiedOp(found.op_id, found.key, found.depth + depth, site, source)
        source = site.named(root.name)
        return IdentifiedOp(site.op_id(source), site.key(source), depth, site, source)
