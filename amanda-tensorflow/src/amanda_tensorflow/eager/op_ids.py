"""Ids of eager operators, ``<name scope><type>:<k>``, and the iterations that they count in.

``net/c1/Conv2D:0`` is the first ``Conv2D`` of an iteration in the Keras layer ``c1`` of ``net``,
and ``/MatMul:1`` the second ``MatMul`` outside of all layers; those of other phases than the
forward one, such as ``/optimizer/Mul:0``, count on their own there. Within layers their names are
the name scope, whatever name scopes the program opens besides: operators of graphs have the same
ids (:mod:`amanda_tensorflow.keras_layers.paths`). A new iteration begins when an outermost Keras
layer or ``tf.function`` is called again, when an outermost backward pass ends, and at
``amanda.new_iteration()``.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal

import attrs

from amanda.engine.frames import calling_frame, warn_at
from amanda.interface.specs import Phase
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.plan_cache import AnyScope, Cell, Cells
from amanda_tensorflow.keras_layers.module_names import is_plain_module, name_within
from amanda_tensorflow.labels import LABELS, LOSS, in_ids
from amanda_tensorflow.operators.phases import phase_of_code
from amanda_tensorflow.plugin import TensorFlowDriver

_PLAIN = frozenset({None, "forward", "backward"})
"""Phases of the calling code that are not part of an id outside of layers."""

_LEARNING = 2
"""Iterations in which all operators outside of layers are asked for their phases: a first step, and
one that begins after a step of an optimizer."""

_MANY = 10_000
"""After so many operators of one type outside of layers, iterations seem to have no end."""


@attrs.frozen(eq=False)
class RunningLayer:
    """A call of a layer that is running.

    Attributes:
        layer: weak reference to the layer.
        scope: the name scope of the layer's operators in ids, ``net@1/c1/``.
        module: the path of the layer without numbers, ``net/c1``.
        cells: the cells of the layer's operators, under every name scope.
        phase: the phase of the layer's operators; "" if each has its own.
    """

    layer: weakref.ref[Any]
    scope: str
    module: str
    cells: AnyScope
    phase: Phase | Literal[""] = ""


class _Outside(dict[str, Cells]):
    """The cells outside of layers, by name scope and type, of operators of the forward phase alone.

    In the first iterations it is empty, and each operator is asked for its phase. Then it holds
    those of the types of which none was of another phase, so that they cost no more than those
    within layers; the others are asked at each execution.

    Attributes:
        name_scopes: by scope in ids, the name scope, where that is another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name_scopes: dict[str, str] = {}
        self._mixed: set[tuple[str, str]] = set()
        self._has_learned = False

    def learn(self, cells: dict[str, Cells]) -> None:
        """Learn from all cells of these iterations."""
        self._has_learned = True
        for in_order in (True, False):
            for scope, kinds in cells.items():
                if scope.startswith("/") is in_order:
                    for kind, cell in kinds.items():
                        self.note(scope, kind, cell)

    def note(self, scope: str, kind: str, cell: Cell) -> None:
        """Note that an operator of this type has run in this name scope in ids."""
        if not self._has_learned:
            return
        if scope.startswith("/"):
            name_scope = scope[1:].partition("/")[2]
            self._mixed.add((name_scope, kind))
            self.get(name_scope, {}).pop(kind, None)
            return
        name_scope = self.name_scopes.get(scope, scope)
        if (name_scope, kind) not in self._mixed:
            self.setdefault(name_scope, {})[kind] = cell

    def forget(self) -> None:
        """Forget the cells that were noted."""
        self.clear()
        self._mixed.clear()


class EagerOpIds:
    """The counters of one thread's forward operators.

    Attributes:
        cells: the cells of forward operators, by name scope and type.
        nesting: how many calls of layers and backward passes run within each other; only an
            outermost one begins an iteration.
        places: the calls of layers that are running, outermost first.
    """

    def __init__(self) -> None:
        self.cells: dict[str, Cells] = {}
        self.nesting = 0
        self.places: tuple[RunningLayer, ...] = ()
        self._outer: list[tuple[RunningLayer, ...]] = []
        self._within: dict[str, AnyScope] = {}
        self._layers: dict[tuple[int, str], weakref.ref[Any]] = {}
        self._functions: set[str] = set()
        self._outside = _Outside()
        self._iterations = 0
        self._codes: dict[Any, Any] = {}

    @property
    def current(self) -> Any:
        """The cells that count forward operators now, by name scope."""
        return self.places[-1].cells if self.places else self._outside

    def scope(self, name_scope: str | None) -> str:
        """The name scope of operators in ids, where TensorFlow's is `name_scope`."""
        if self.places:
            return self.places[-1].scope
        phase, scope = phase_of_code(self._codes, False), name_scope or ""
        if phase not in _PLAIN:
            return f"/{phase}/{scope}"
        if scope.startswith(LOSS):
            self._outside.name_scopes[in_ids(scope)] = scope
        return in_ids(scope)

    def module(self, scope: str) -> str:
        """The module path of the operators that run now.

        Args:
            scope: their name scope in ids.
        """
        return self.places[-1].module if self.places else scope.removeprefix("/").rpartition("/")[0]

    def cell(self, scope: str, kind: str) -> Cell:
        """The cell of a type of operators in a name scope, made if there is none."""
        cell = self.cells.setdefault(scope, {}).setdefault(kind, [0])
        if not self.places:
            self._outside.note(scope, kind, cell)
        return cell

    def op_id(self, scope: str, kind: str, number: int) -> str:
        """The id of an operator.

        Warns (CoverageWarning) if the iteration has too many operators to be one.
        """
        if number == _MANY and not scope:
            warn_at(
                calling_frame(("tensorflow", *TensorFlowDriver.packages)),
                f"{_MANY} {kind} operators outside of layers without an end of an iteration: "
                "each has an id and actions of its own; call amanda.new_iteration() in the loop",
            )
        return f"{scope or '/'}{kind}:{number}"

    # -- iterations -------------------------------------------------------

    def new_iteration(self) -> None:
        """Restart the counters."""
        for scope, cells in self.cells.items():
            if not scope.startswith("/setup/"):
                for cell in cells.values():
                    cell[0] = 0
        self._layers.clear()
        self._functions.clear()
        self._iterations += 1
        if self._iterations == _LEARNING:
            self._outside.learn(self.cells)

    def enter_layer(self, layer: Any, method: str) -> None:
        """Note that a layer is called; an outermost one that was called before begins an iteration.

        Args:
            method: by which it is called: what it encodes and then decodes is of one iteration.
        """
        if not self.nesting:
            key = id(layer), method
            known = self._layers.get(key)
            if known is not None and known() is layer:
                self.new_iteration()
            self._layers[key] = weakref.ref(layer)
        self.nesting += 1
        outer = self.places[-1] if self.places else None
        name = name_within(None if outer is None else outer.layer(), layer)
        if name is None or (outer is not None and outer.layer() is layer):
            # A class that calls its base class's ``__call__``: one call.
            self._outer.append(self.places)
            return
        if outer is None:
            scope, module = f"{LABELS.label(layer)}/", name
        else:
            scope, module = f"{outer.scope}{name}/", f"{outer.module}/{name}"
        self._enter(weakref.ref(layer), scope, module)

    def enter_build(self) -> None:
        """Note that the running layer is built: operators of the building are counted apart."""
        self.nesting += 1
        if self.places:
            place = self.places[-1]
            self._enter(place.layer, f"{place.scope}build/", place.module)
        else:
            self._outer.append(())

    def enter_optimizer(self, optimizer: Any) -> None:
        """Note that a step of an optimizer begins."""
        self.nesting += 1
        if not self.places or is_plain_module(self.places[-1].layer()):
            self._enter(weakref.ref(optimizer), "/optimizer/", "", "optimizer")
        else:
            self._outer.append(self.places)

    def _enter(
        self, layer: weakref.ref[Any], scope: str, module: str, phase: Phase | Literal[""] = ""
    ) -> None:
        """Go to a place within the current one; see :class:`RunningLayer`."""
        if scope not in self._within:
            self._within[scope] = AnyScope(self.cells.setdefault(scope, {}))
        self._outer.append(self.places)
        place = RunningLayer(layer, scope, module, self._within[scope], phase)
        self.places = (*self.places, place)

    def leave(self) -> None:
        """The layer's call, what builds it, or an optimizer's step has ended."""
        self.nesting -= 1
        self.places = self._outer.pop() if self._outer else ()

    def enter_function(self, name: str) -> None:
        """Note a call of a graph function; an outermost one called before begins an iteration,
        unless it computes tangents."""
        if not (self.nesting or _internals.is_tangent(name)):
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
        self._codes.clear()
        self.cells.clear()
        self._outside.forget()
        self._within.clear()
        self._layers.clear()
        self._functions.clear()
