"""What the runs of a function give to the model that they call, as tools see it when a pass ends.

Where the graph does not tell the shapes, a node reads the tensors in each run. It waits for
nothing, and nothing waits for it::

    model = ModelInputs()
    ...                                     # replay the site
    ends += model.read(building, site)      # the copy is complete
    model.take()                            # after a run: {"target": layer, "inputs": tensors}
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.op_call import PlacedTensor
from amanda_tensorflow.graphs.run_time_routines import insert_mark, is_routable
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.keras_layers.recording import LayerCall, calls_in, layer_calls

_AT_ONCE = 16
"""Of so many runs of a function at the same time the inputs are kept."""


class ModelInputs:
    """The inputs of the only outermost module that each run of a function calls.

    They are not known where it calls several, or one within a loop or branch.
    """

    def __init__(self) -> None:
        self._layer: Any = None
        self._told: Sequence[Any] = ()
        self._read: collections.deque[Sequence[Any]] = collections.deque(maxlen=_AT_ONCE)

    def look(self, site: OpSite) -> tuple[OpSite, Sequence[Any]] | None:
        """Look for the call, once the functions that a function calls are known.

        Returns:
            Its site, and the tensors that it is given there, unless the graph tells their shapes.
        """
        found = list(_outermost(site))
        if len(found) != 1:
            return None
        [(site, call)] = found
        tensors = [site.tensor(name) for name in call.inputs]
        self._layer = call.layer
        if any(not tensor.shape.is_fully_defined() for tensor in tensors):
            return site, tensors
        self._told = [PlacedTensor(tensor.shape, tensor.dtype, "") for tensor in tensors]
        return None

    def read(self, building: Building, site: OpSite) -> list[Any]:
        """Let runs of a copy, which is complete, read the tensors; return the node that does."""
        found = self.look(site)
        if found is None:
            return []
        site, tensors = found
        new = [site.tensors.get(id(tensor)) for tensor in tensors]
        if not all(map(is_routable, new)):
            return []
        read = self._read.append
        return [
            insert_mark(building, lambda scopes, values: read(values), "amanda/inputs/", [], new)
        ]

    def take(self) -> Mapping[str, Any]:
        """``target`` and ``inputs`` of the run that ends; nothing where they are not known."""
        inputs = self._told or (self._read.pop() if self._read else ())
        return {"target": self._layer(), "inputs": inputs} if inputs else {}


def _outermost(site: OpSite) -> Iterator[tuple[OpSite, LayerCall]]:
    """The outermost calls of modules of a function and of those that it calls, with their sites."""
    if site.is_backward:
        return
    operations, within = site.graph.get_operations(), layer_calls(site.graph)
    for call in calls_in(site.graph):
        ops = operations[call.begin : call.end]
        # A gradient may compute a part of the forward pass again.
        if call.caller is None and not (ops and ops[0].name in site.log.owners):
            yield site, call
    for name, child in site.children.items():
        if name not in within:
            yield from _outermost(child)
