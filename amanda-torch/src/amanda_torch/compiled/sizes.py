"""The shapes of tensors in a graph with symbolic sizes, computed from the graph's inputs.

Dynamo notes the result of each node, with sizes that are expressions of symbols; the values of
symbols are inputs, or sizes of inputs::

    sizes = SymbolicSizes(graph)
    run = sizes.note_run(inputs, held)
    run.note("relu", y)                     # what the node has given in this run
    one = run.sized(make, [x], [y])         # None: the inputs do not tell the sizes
    BySize(sizes, [one]).added(inputs)      # of what `make` gives for tensors of a later run
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from amanda.python.memo import Memo
from amanda_torch import _internals
from amanda_torch.compiled.deferred import Deferred
from amanda_torch.operators.calls import tensors_of


@attrs.frozen
class SymbolicSpec:
    """A tensor without values.

    Attributes:
        shape: numbers and expressions.
        dtype, device: those of the tensor.
    """

    shape: Sequence[Any]
    dtype: torch.dtype
    device: torch.device

    def of(self, values: dict[Any, int], *, meta: bool) -> torch.Tensor:
        """A tensor without values, for these values of the symbols.

        Args:
            meta: True for a tensor on the device ``meta``, False for a description with its own
                device.
        """
        made = torch.empty(self.shape_of(values), dtype=self.dtype, device="meta")
        return made if meta else _internals.valueless(made, self.device)

    def shape_of(self, values: dict[Any, int]) -> tuple[int, ...]:
        """The shape in a run in which the symbols have these values."""
        return tuple([_internals.size_of(size, values) for size in self.shape])


class SymbolicSizes:
    """The symbols of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._examples = {node.name: _internals.example_of(node) for node in graph.nodes}
        self._sources: dict[Any, tuple[int, int | None]] = {}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for index, node in enumerate(inputs):
            value = self._examples[node.name]
            if isinstance(value, torch.Tensor):
                for axis, size in enumerate(value.shape):
                    self._note(size, (index, axis))
            else:
                self._note(value, (index, None))

    def _note(self, size: Any, source: tuple[int, int | None]) -> None:
        symbol = _internals.symbol_of(size)
        if symbol is not None:
            self._sources.setdefault(symbol, source)

    def key(self, inputs: Sequence[Any]) -> Hashable:
        """The variable sizes of a run, as a key.

        Args:
            inputs: of the graph.
        """
        return tuple(
            [
                inputs[index] if axis is None else inputs[index].shape[axis]
                for index, axis in self._sources.values()
            ]
        )

    def values(self, key: Any) -> dict[Any, int]:
        """The values of symbols."""
        return dict(zip(self._sources, key, strict=True))

    def note_run(self, inputs: Sequence[Any], held: Sequence[torch.Tensor]) -> TensorsOfRun:
        """Return the tensors of a run that is about to begin.

        Args:
            inputs: of the graph.
            held: its tensors other than inputs.
        """
        names = [node.name for node in self._graph.nodes if node.op == "placeholder"]
        found = TensorsOfRun(self, self.values(self.key(inputs)))
        for tensor in held:
            found.specs[tensor] = SymbolicSpec(tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, value in zip(names, inputs, strict=True):
            found.note(name, value)
        return found

    def examples(self, name: str) -> list[Any]:
        """The results of a node, as Dynamo notes them, flat."""
        return tensors_of(self._examples.get(name))

    def spec(self, example: torch.Tensor) -> SymbolicSpec | None:
        """The symbolic spec of a tensor of Dynamo's; None if its sizes depend on symbols that the
        inputs do not determine."""
        shape = [_internals.expression_of(size) for size in example.shape]
        symbols = set().union(*map(_internals.symbols_in, shape))
        if not symbols <= self._sources.keys():
            return None
        return SymbolicSpec(shape, example.dtype, example.device)


class TensorsOfRun:
    """The tensors of one run of a graph, each with its symbolic sizes.

    Args:
        sizes: of the graph.
        values: of its symbols in this run.

    Attributes:
        specs: symbolic specs by tensor.
    """

    def __init__(self, sizes: SymbolicSizes, values: dict[Any, int]) -> None:
        self._sizes = sizes
        self._values = values
        self.specs: Any = WeakIdKeyDictionary()

    def note(self, name: str, result: Any) -> None:
        """Note the result of a node."""
        tensors = tensors_of(result)
        for tensor, example in zip(tensors, self._sizes.examples(name), strict=False):
            spec = self._sizes.spec(example) if isinstance(example, torch.Tensor) else None
            # Dynamo's note of a tensor that is changed in place may be older.
            if spec is not None and spec.shape_of(self._values) == tuple(tensor.shape):
                self.specs[tensor] = spec

    def sized(
        self, make: Callable[..., Any], *groups: Sequence[Any] | None, meta: bool = True
    ) -> Sized | None:
        """A call of `make` that is repeated for new sizes; None if a symbolic size is unknown.

        Args:
            make: function of groups of tensors without values.
            groups: the groups; None for an absent tensor.
            meta: as of :meth:`SymbolicSpec.of`.
        """
        every = []
        for group in groups:
            specs = (
                None if group is None else [t if t is None else self.specs.get(t) for t in group]
            )
            for tensor, spec in zip(group or (), specs or (), strict=True):
                if tensor is not None and spec is None:
                    return None
            every.append(specs)
        return Sized(self._sizes, make, every, meta=meta)


class Sized:
    """The counters and calls of an execution, for each size of its tensors.

    Args:
        sizes: of the graph.
        make: makes it from the tensors, without values.
        specs: of these, in groups.
        meta: as of :meth:`SymbolicSpec.of`.
    """

    def __init__(
        self,
        sizes: SymbolicSizes,
        make: Callable[..., Any],
        specs: Sequence[Sequence[SymbolicSpec | None] | None],
        *,
        meta: bool = True,
    ) -> None:
        self._sizes = sizes
        self._make = make
        self._specs = specs
        self._meta = meta

    def made(self, key: Hashable) -> Any:
        """Return the result of `make` for inputs with this :meth:`SymbolicSizes.key`."""
        values = self._sizes.values(key)
        groups = [
            None if group is None else [spec and spec.of(values, meta=self._meta) for spec in group]
            for group in self._specs
        ]
        return self._make(*groups)


class BySize:
    """The counters and calls of a run of a graph, by the sizes of its inputs.

    Args:
        sizes: of the graph.
        every: in the order of the operators.
    """

    def __init__(self, sizes: SymbolicSizes, every: Sequence[Any]) -> None:
        self._sizes = sizes
        self._every = every
        self._known: Memo[Hashable, list[Deferred]] = Memo(_MOST_KNOWN)

    def added(self, inputs: Sequence[Any]) -> list[Deferred]:
        """Return the additions of a run with these inputs."""
        key = self._sizes.key(inputs)
        found = self._known.get(key)
        if found is None:
            found = [one.made(key) if isinstance(one, Sized) else one for one in self._every]
            self._known[key] = found
        return found


_MOST_KNOWN = 64
"""Sizes of inputs whose additions are kept."""
