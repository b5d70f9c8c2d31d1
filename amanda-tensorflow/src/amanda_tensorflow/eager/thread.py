"""Where an operator of eager execution is: name scopes, and the counters of operator ids.

Ids follow design section 6: ``<scope name><type>:<k>``, for example
``net/c1/Conv2D:0``, and ``/MatMul:0`` outside of all name scopes. What is known
of an operator's plan is kept beside the counter that makes its id, so that an
operator without actions costs two dictionary lookups.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from amanda.errors import CoverageWarning
from amanda.state import STATE
from amanda_tensorflow.eager.plan_cache import OUTSIDE, Cell, Cells

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher
    from amanda_tensorflow.eager.tape_marks import Claim, Mark, OpGradients, Place


_MANY = 10_000


class RunningGradient(Protocol):
    """The gradient function that runs, as the interception of operators uses it."""

    def is_vanilla(self, kind: str) -> bool:
        """Whether nothing is to be done for the next operator of a type."""

    def cell(self, kind: str) -> Cell:
        """The cell of a type of backward operators."""

    def execute(
        self, kind: str, inputs: Sequence[Any], compute: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Run one backward operator with its analyses and routines."""


class RunningRecomputation(Protocol):
    """A recomputation within a backward pass, as the patches of tapes use it."""

    def begin(self, tape: Any) -> None:
        """The copies of the arguments are watched: the function runs next."""

    def differentiated(self, inner: Any) -> None:
        """A tape was asked for gradients."""


class Tracker:
    """One thread's operators: where they are, and what applies to them.

    Attributes:
        cells: name scope to cells, of what runs now: forward operators, those of one
            gradient function, or :data:`OUTSIDE` of both within a backward pass.
        forward: the cells of forward operators.
        stale: look before the next operator: `outdated`, `muted` or nothing to see.
        outdated: plans may be out of date; set by any thread, acted on by its own.
        muted: depth of code in this thread that runs vanilla.
        generation: raised whenever plans become out of date.
        run: the gradient function that runs, if it is a known operator's.
        passes: how many outermost backward passes have begun.
        depth: how many backward passes run within each other.
        layers: how many calls of Keras layers run within each other.
        watches: whether some tool analyses backward operators.
        marking: what the operators of a replacement are marked with in tapes.
        gradients: op id to what is known of the operator's backward operators.
        sums: id of a summed gradient to what it was summed of, within a pass.
        owners: id of an Identity's output to the mark of its execution.
        recorded: a result whose gradient the driver has recorded itself.
        started: cells, by id, and numbers of operators whose routines before them have
            run, and that may have taken the slow path since.
        recomputation: what is being computed again within the backward pass.
        failures: of each operator that runs a Python function, what a tool has raised in it.
        places: where the functions with a custom gradient that run have begun;
            None for those that are not computed again.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.recomputation: RunningRecomputation | None = None
        self.failures: list[BaseException | None] = []
        self.places: list[Place | None] = []
        self._dispatcher = dispatcher
        self.forward: dict[str, Cells] = {}
        self.cells: Any = self.forward
        self.stale = True
        self.outdated = True
        self.muted = 0
        self.generation = 0
        self.run: RunningGradient | None = None
        self.passes = 0
        self.depth = 0
        self.watches = False
        self.marking: Mark | None = None
        self.gradients: dict[str, OpGradients] = {}
        self.sums: dict[int, Any] = {}
        self.owners: dict[int, Any] = {}
        self.recorded: tuple[int, Any] | None = None
        self.started: set[tuple[int, int]] = set()
        self._active: tuple[Any, ...] = ()
        self.layers = 0
        self._met: dict[int, weakref.ref[Any]] = {}
        self._functions: set[str] = set()

    # -- forward operators ------------------------------------------------

    def cell(self, scope: str, kind: str) -> Cell:
        """The cell of a type of forward operators in a name scope."""
        cells = self.forward.get(scope)
        if cells is None:
            cells = self.forward[scope] = {}
        cell = cells.get(kind)
        if cell is None:
            cell = cells[kind] = [0]
        return cell

    def empty_cell(self, scope: str, kind: str) -> Cell | None:
        """The cell of the next operator of a type, if nothing is to be done for that."""
        cell: Cell | None = self.cells[scope].get(kind) if scope in self.cells else None
        if cell is None or cell[0] + 1 >= len(cell) or cell[cell[0] + 1] is not None:
            return None
        return cell

    def op_id(self, scope: str, kind: str, number: int) -> str:
        """The id of an operator."""
        if number == _MANY and not scope:
            warnings.warn(
                f"{_MANY} {kind} operators outside of layers without an end of an iteration: "
                "each has an id and actions of its own; call amanda.new_iteration() in the loop",
                CoverageWarning,
                stacklevel=5,
            )
        return f"{scope or '/'}{kind}:{number}"

    def new_iteration(self) -> None:
        """Restart the counters."""
        for cells in self.forward.values():
            for cell in cells.values():
                cell[0] = 0
        self._met.clear()
        self._functions.clear()
        self.started.clear()

    def counters(self) -> dict[str, dict[str, int]]:
        """A snapshot of the counters of forward operators."""
        return {
            scope: {kind: cell[0] for kind, cell in cells.items()}
            for scope, cells in self.forward.items()
        }

    def set_counters(self, snapshot: dict[str, dict[str, int]]) -> None:
        """Go back to a snapshot."""
        for scope, cells in self.forward.items():
            counts = snapshot.get(scope, {})
            for kind, cell in cells.items():
                cell[0] = counts.get(kind, 0)

    # -- what applies now -------------------------------------------------

    def refresh(self) -> bool:
        """Find out what applies now; False if this thread runs vanilla altogether."""
        if self.muted:
            return False
        scopes = STATE.scopes
        if self.run is None and not any(scope.alive for scope in scopes):
            return False
        if self.outdated:
            active = self._dispatcher.scopes()
            if active != self._active or not STATE.cache:
                self._active = active
                self.watches = any(scope.analyses_backward() for scope in active)
                self.forget_plans()
        # A suspended generator gives no notice: look again at each operator.
        self.outdated = any(scope.is_bound for scope in scopes)
        if self.depth and self.run is None and not self.watches:
            return False
        self.stale = self.outdated
        return True

    def replan(self) -> None:
        """Recorded actions or scopes have changed: ask for all plans anew."""
        self._active = (None,)
        self.stale = self.outdated = True

    def forget_plans(self) -> None:
        """Make all plans out of date."""
        self.generation += 1
        for cells in (*self.forward.values(), *(g.cells for g in self.gradients.values())):
            for cell in cells.values():
                del cell[1:]

    def keeps_plans(self, generation: int) -> bool:
        """Whether what was found out in `generation` may be kept."""
        return generation == self.generation and self._dispatcher.is_cacheable()

    def is_current(self, mark: Mark) -> bool:
        """Whether the scopes of `mark` are those that apply now."""
        return not self.muted and not self.outdated and mark.generation == self.generation

    def has_passed(self, claim: Claim | None) -> bool:
        """Whether a backward pass has begun since the operator of `claim` was first marked."""
        return claim is not None and self.passes > claim.passes

    # -- Keras layers, backward passes ------------------------------------

    def enter_layer(self, layer: Any) -> None:
        """An outermost layer that is called again begins a new iteration."""
        if not self.layers and not self.depth:
            known = self._met.get(id(layer))
            if known is not None and known() is layer:
                self.new_iteration()
            self._met[id(layer)] = weakref.ref(layer)
        self.layers += 1

    def enter_function(self, name: str) -> None:
        """An outermost function that is called again begins a new iteration, too."""
        if not self.layers and not self.depth:
            if name in self._functions:
                self.new_iteration()
            self._functions.add(name)

    def exit_layer(self) -> None:
        """The way back from :meth:`enter_layer`."""
        self.layers -= 1

    def enter_backward(self) -> tuple[Any, Any, Any]:
        """A backward pass begins; what to come back to."""
        outer = self.cells, self.run, self.sums
        self.passes += not self.depth
        self.depth += 1
        if self.run is None:
            self.go_to(OUTSIDE, None)
        # Else a gradient function has a tape of its own: all of that is its own, too.
        self.sums = {}
        return outer

    def exit_backward(self, outer: tuple[Any, Any, Any]) -> int:
        """A backward pass ends; how many of its sums of gradients belong to no operator."""
        self.depth -= 1
        left = len(self.sums)
        self.go_to(outer[0], outer[1])
        self.sums = outer[2]
        if not self.depth:
            self.new_iteration()
        return left

    def go_to(self, cells: Any, run: RunningGradient | None) -> None:
        """Count the operators that follow in `cells`."""
        self.cells = cells
        self.run = run
        self.stale = True

    # -- what tapes are told ----------------------------------------------

    def note_recorded(self, outputs: list[Any]) -> None:
        """The driver has recorded the gradient of an operator that returns `outputs`."""
        self.recorded = (id(outputs), weakref.ref(outputs[0])) if outputs else None

    def is_recorded(self, outputs: Any) -> bool:
        """Whether `outputs` are those that were noted last, who are forgotten then."""
        recorded, self.recorded = self.recorded, None
        if recorded is None or recorded[0] != id(outputs):
            return False
        return bool(outputs) and recorded[1]() is outputs[0]

    def note_owner(self, output: Any, mark: Mark) -> None:
        """Remember, as long as it lives, which execution has made `output`."""
        key, owners = id(output), self.owners

        def died(_: weakref.ref[Any]) -> None:
            owners.pop(key, None)

        owners[key] = (weakref.ref(output, died), mark)

    def owner_of(self, output: Any) -> Mark | None:
        """The execution that was noted for `output`, if any."""
        known = self.owners.get(id(output))
        return known[1] if known is not None and known[0]() is output else None

    def clear(self) -> None:
        """Let go of everything, at the end of the thread's scopes."""
        self.forward.clear()
        self.gradients.clear()
        self.sums.clear()
        self.owners.clear()
        self._met.clear()
        self._functions.clear()
        self._active = ()
        self.started.clear()
        self.recorded = None


class Local(threading.local):
    """The current thread's tracker; None where no scope covers it."""

    tracker: Tracker | None = None


LOCAL = Local()


class muted:  # noqa: N801 - reads as a statement
    """Run the current thread vanilla within it."""

    __slots__ = ("_tracker",)

    def __enter__(self) -> None:
        self._tracker = LOCAL.tracker
        if self._tracker is not None:
            self._tracker.muted += 1
            self._tracker.stale = True

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        tracker = self._tracker
        if tracker is not None:
            tracker.muted -= 1
            if error is not None and tracker.failures:
                tracker.failures[-1] = error
