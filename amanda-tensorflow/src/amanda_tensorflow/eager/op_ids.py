"""Ids of eager operators, ``<name scope><type>:<k>``, and the iterations that they count in.

``net/c1/Conv2D:0`` is the first ``Conv2D`` of an iteration in the Keras layer ``c1`` of ``net``,
and ``/MatMul:1`` the second ``MatMul`` outside of all layers. Within layers their names are the
name scope, whatever name scopes the program opens besides: operators of graphs have the same ids
(:mod:`amanda_tensorflow.keras_layers.paths`). A new iteration begins when an outermost Keras layer
or ``tf.function`` is called again, when an outermost backward pass ends, and at
``amanda.new_iteration()``.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import attrs

from amanda.errors import CoverageWarning
from amanda_tensorflow.eager.plan_cache import AnyScope, Cell, Cells
from amanda_tensorflow.keras_layers.labels import LABELS

_MANY = 10_000
"""After so many operators of one type outside of layers, iterations seem to have no end."""


@attrs.frozen(eq=False)
class Place:
    """A call of a layer that is running.

    Attributes:
        layer: weak reference to the layer.
        scope: the name scope of its operators in ids, ``net@1/c1/``.
        module: the names alone, ``net/c1``.
        cells: the cells of its operators, under every name scope.
    """

    layer: weakref.ref[Any]
    scope: str
    module: str
    cells: AnyScope


class EagerOpIds:
    """The counters of one thread's forward operators.

    Attributes:
        cells: the cells of forward operators, by name scope and type.
        nesting: how many calls of layers and backward passes run within each other; only an
            outermost one begins an iteration.
        places: the calls of layers that are running, outermost first.
        started: cells (by ``id``) and numbers of operators whose routines have run on the fast
            path and must not run again if the operator is executed on the slow path after all.
    """

    def __init__(self) -> None:
        self.cells: dict[str, Cells] = {}
        self.nesting = 0
        self.started: set[tuple[int, int]] = set()
        self.places: tuple[Place, ...] = ()
        self._outer: list[tuple[Place, ...]] = []
        self._within: dict[str, AnyScope] = {}
        self._layers: dict[int, weakref.ref[Any]] = {}
        self._functions: set[str] = set()

    @property
    def current(self) -> Any:
        """The cells that count forward operators now, by name scope."""
        return self.places[-1].cells if self.places else self.cells

    def scope(self, name_scope: str | None) -> str:
        """The name scope of operators in ids, where TensorFlow's is `name_scope`."""
        return self.places[-1].scope if self.places else name_scope or ""

    def module(self, scope: str) -> str:
        """The module path of the operators that run now.

        Args:
            scope: their name scope in ids.
        """
        return self.places[-1].module if self.places else scope.rpartition("/")[0]

    def _cells(self, scope: str) -> Cells:
        cells = self.cells.get(scope)
        if cells is None:
            cells = self.cells[scope] = {}
        return cells

    def cell(self, scope: str, kind: str) -> Cell:
        """The cell of a type of operators in a name scope, made if there is none."""
        cells = self._cells(scope)
        cell = cells.get(kind)
        if cell is None:
            cell = cells[kind] = [0]
        return cell

    def op_id(self, scope: str, kind: str, number: int) -> str:
        """The id of an operator.

        Warns (CoverageWarning) if the iteration has too many operators to be one.
        """
        if number == _MANY and not scope:
            warnings.warn(
                f"{_MANY} {kind} operators outside of layers without an end of an iteration: "
                "each has an id and actions of its own; call amanda.new_iteration() in the loop",
                CoverageWarning,
                stacklevel=5,
            )
        return f"{scope or '/'}{kind}:{number}"

    # -- iterations -------------------------------------------------------

    def new_iteration(self) -> None:
        """Restart the counters."""
        for cells in self.cells.values():
            for cell in cells.values():
                cell[0] = 0
        self._layers.clear()
        self._functions.clear()
        self.started.clear()

    def enter_layer(self, layer: Any) -> None:
        """A Keras layer is called; an outermost one that comes round begins an iteration."""
        if not self.nesting:
            known = self._layers.get(id(layer))
            if known is not None and known() is layer:
                self.new_iteration()
            self._layers[id(layer)] = weakref.ref(layer)
        self.nesting += 1
        name = getattr(layer, "name", None)
        outer = self.places[-1] if self.places else None
        if name is None or (outer is not None and outer.layer() is layer):
            # A class that calls its base class's ``__call__``: one call.
            self._outer.append(self.places)
            return
        if outer is None:
            scope, module = f"{LABELS.label(layer)}/", str(name)
        else:
            scope, module = f"{outer.scope}{name}/", f"{outer.module}/{name}"
        cells = self._within.get(scope)
        if cells is None:
            cells = self._within[scope] = AnyScope(self._cells(scope))
        self._outer.append(self.places)
        self.places = (*self.places, Place(weakref.ref(layer), scope, module, cells))

    def enter_build(self) -> None:
        """The layer that runs is built: operators of that do not count with those of its calls."""
        self.nesting += 1
        self._outer.append(self.places)
        if self.places:
            place = self.places[-1]
            scope = f"{place.scope}build/"
            cells = self._within.get(scope)
            if cells is None:
                cells = self._within[scope] = AnyScope(self._cells(scope))
            self.places = (*self.places, Place(place.layer, scope, place.module, cells))

    def exit_layer(self) -> None:
        """The layer's call, or what builds it, has ended."""
        self.nesting -= 1
        self.places = self._outer.pop() if self._outer else ()

    def enter_function(self, name: str) -> None:
        """A graph function is called; an outermost one that comes round begins an iteration."""
        if not self.nesting:
            if name in self._functions:
                self.new_iteration()
            self._functions.add(name)

    # -- recomputation ----------------------------------------------------

    def counters(self) -> dict[str, dict[str, int]]:
        """A snapshot of the counters, by name scope and type."""
        return {
            scope: {kind: cell[0] for kind, cell in cells.items()}
            for scope, cells in self.cells.items()
        }

    def set_counters(self, snapshot: dict[str, dict[str, int]]) -> None:
        """Go back to a snapshot; counters that are not in it restart."""
        for scope, cells in self.cells.items():
            counts = snapshot.get(scope, {})
            for kind, cell in cells.items():
                cell[0] = counts.get(kind, 0)

    def clear(self) -> None:
        """Forget everything."""
        self.cells.clear()
        self._within.clear()
        self._layers.clear()
        self._functions.clear()
        self.started.clear()
