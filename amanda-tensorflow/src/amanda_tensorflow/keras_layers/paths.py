"""The ids of operators that Keras layers make in graphs: those that they have in eager execution.

An id is ``<path of layers>/<type>:<k>``, where `k` counts the operators of that type that the layer
makes, in the order in which it makes them, which is the order in which eager execution runs them::

    ids = LayerIds()
    ids.read(graph, is_forward)
    ids.op_id("net_1/c1_1/convolution")     # "net/c1/Conv2D:0"; None outside of layers
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from amanda_tensorflow.keras_layers.module_names import name_within
from amanda_tensorflow.keras_layers.recording import LayerCall, LayerPath, layer_calls
from amanda_tensorflow.labels import LABELS


def path_of(call: LayerCall, base: LayerPath) -> LayerPath:
    """The path of a call of a layer in a graph that is called at `base`."""
    names = [part.name for part in call.layers()]
    outermost, around = call.layers()[0], None if base.layer is None else base.layer()
    if around is not None:
        # The graph was traced elsewhere, or within another graph that this module has called.
        names[0] = name_within(around, outermost.layer()) or names[0]
    texts = list(names)
    if not base.text:
        texts[0] = LABELS.label_of(outermost.layer, names[0])
    return LayerPath(
        "/".join(filter(None, (base.text, *texts))),
        "/".join(filter(None, (base.module, *names))),
        call.layer,
    )


class LayerIds:
    """The ids of the operators of one graph that are counted by type, as those of layers are.

    Args:
        base: the place at which the graph is called.
        counts: by scope and type, how many operators have ids already, in the graphs around.
    """

    def __init__(
        self,
        base: LayerPath | None = None,
        counts: collections.Counter[tuple[str, str]] | None = None,
    ) -> None:
        self.counts = collections.Counter() if counts is None else counts
        self._base = base or LayerPath()
        self._paths: dict[str, LayerPath] = {}
        self._ids: dict[str, str] = {}
        self._done = 0

    def read(
        self, graph: Any, is_forward: Callable[[Any], bool], outside: Callable[[Any], str | None]
    ) -> None:
        """Give ids to the operators that were added to the graph since the last time.

        Args:
            is_forward: whether an operator is a forward one; others have no id of their own.
            outside: gives the scope of an operator outside of layers in its id; None for one that
                is not counted by type.
        """
        calls, known = layer_calls(graph), dict[int, LayerPath]()
        operations = graph.get_operations()
        for op in operations[self._done :]:
            call, path = calls.get(op.name), self._base
            if call is not None:
                path = known.get(id(call)) or known.setdefault(id(call), path_of(call, self._base))
            if path.text:
                self._paths[op.name] = path
            if not is_forward(op):
                continue
            scope = f"{path.text}/" if path.text else outside(op)
            if scope is not None:
                self._ids[op.name] = f"{scope}{op.type}:{self.counts[scope, op.type]}"
                self.counts[scope, op.type] += 1
        self._done = len(operations)

    def path_of(self, call: LayerCall) -> LayerPath:
        """The path of a call of a layer in the graph."""
        return path_of(call, self._base)

    def op_id(self, name: str) -> str | None:
        """The id of the operator of this name; None for one that is not counted by type."""
        return self._ids.get(name)

    def path(self, name: str) -> LayerPath:
        """The layers that have made the operator of this name."""
        return self._paths.get(name, self._base)
