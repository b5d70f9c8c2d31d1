"""The state of the eager driver in one thread: its tracker.

``LOCAL.tracker`` is None in a thread that no scope covers. The patches begin with it::

    tracker = LOCAL.tracker
    if tracker is None or (tracker.stale and not tracker.refresh()):
        ...  # run vanilla
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.op_ids import EagerOpIds
from amanda_tensorflow.eager.plan_cache import OUTSIDE

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher
    from amanda.engine.plan import ActionPlan
    from amanda.state import LiveScope
    from amanda_tensorflow.eager.tape_marks import Mark, OpGradients, RecomputedPlace, SharedMark


class EagerTracker:
    """The operators of one thread: which cells count them, and which scopes apply to them.

    Attributes:
        local: what TensorFlow's context knows of the thread.
        ids: the counters of forward operators.
        cells: the cells that apply now: those of forward operators, those of the gradient
            function that runs, or :data:`OUTSIDE` in the rest of a backward pass.
        stale: whether :meth:`refresh` has to be asked before the next operator.
        outdated: whether plans may be out of date; set by any thread.
        muted: how many blocks of vanilla code run within each other in this thread.
        generation: counts how often plans have become out of date.
        active: the scopes that apply, as of the last refresh.
        watches: whether one of them analyses backward operators.
        run: the ``GradientRun`` of the gradient function that runs, if its forward operator is
            known; else None.
        passes: how many outermost backward passes have begun.
        depth: how many backward passes run within each other.
        marking: the mark for the operators of the replacement that runs, if one does.
        sent_to_slow_path: types of operators that the driver has told to take the slow path, and
            that have not arrived there.
        begun: of the operator on its way there from the fast path, the plan and the inputs after
            the routines before it, if they have run; else None.
        gradients: what is remembered of backward operators, by id of the forward operator.
        runs: by mark that executions share, a call of the gradient function; it stands for all.
        sums: within a backward pass, sums of gradients by ``id`` of the result.
        owners: by ``id`` of an Identity's output, the mark of its execution.
        recorded: the outputs whose gradient the driver has recorded itself, not yet reported.
        recomputation: the ``Recomputation`` of ``tf.recompute_grad`` that runs; None if none does.
        failures: for each operator running a Python function, what a tool has raised in it.
        places: for each running function with a custom gradient, where it began; None if it is
            not computed again.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.local = _internals.local_data()
        self.ids = EagerOpIds()
        self.cells: Any = self.ids.current
        self.stale = True
        self.outdated = True
        self.muted = 0
        self.generation = 0
        self.active: tuple[LiveScope, ...] = ()
        self.watches = False
        self._replan = True
        self.run: Any = None
        self.passes = 0
        self.depth = 0
        self.marking: Mark | None = None
        self.sent_to_slow_path: set[str] = set()
        self.begun: tuple[ActionPlan, list[Any]] | None = None
        self.gradients: dict[str, OpGradients] = {}
        self.runs: dict[Mark, Any] = {}
        self.sums: dict[int, Any] = {}
        self.owners: dict[int, Any] = {}
        self.recorded: tuple[int, Any] | None = None
        self.recomputation: Any = None
        self.failures: list[BaseException | None] = []
        self.places: list[RecomputedPlace | None] = []
        self.tells = False

    # -- scopes and plans -------------------------------------------------

    def refresh(self) -> bool:
        """Find out which scopes apply; False if the next operator runs vanilla anyway."""
        if self.muted:
            return False
        if self.outdated and not self._update():
            return False
        if self.depth and self.run is None and not self.watches:
            return False
        self.stale = self.outdated
        return True

    def _update(self) -> bool:
        """Look up the scopes; False if none is alive."""
        active = self.dispatcher.scopes()
        if self.run is None and not any(scope.alive for scope in STATE.scopes):
            return False
        replan, self._replan = self._replan, False
        if replan or active != self.active or not STATE.cache:
            self.active = active
            self.watches = any(scope.analyses_backward() for scope in active)
            self.tells = self.dispatcher.points.is_wanted(active)
            self.forget_plans()
        # A generator that holds a scope gives no notice when it is suspended: look each time.
        self.outdated = STATE.held
        return True

    def replan(self) -> None:
        """Recorded actions or scopes have changed: ask for all plans anew."""
        self._replan = True
        self.stale = self.outdated = True

    def forget_plans(self) -> None:
        """Drop the entries of all cells; the counts stay."""
        self.generation += 1
        self.runs.clear()
        for cells in (*self.ids.cells.values(), *(g.cells for g in self.gradients.values())):
            for cell in cells.values():
                del cell[1:]

    def keeps_plans(self, generation: int) -> bool:
        """True if plans of `generation` are still those that apply, and may be kept."""
        return generation == self.generation and self.dispatcher.is_cacheable()

    def has_passed(self, shared: SharedMark | None) -> bool:
        """True if a backward pass has begun since the first execution with this mark."""
        return shared is not None and self.passes > shared.passes

    # -- backward passes --------------------------------------------------

    def enter_backward(self) -> tuple[Any, Any, Any]:
        """A backward pass begins; returns the state for :meth:`exit_backward`."""
        outer = self.cells, self.run, self.sums
        self.passes += not self.depth
        self.depth += 1
        self.ids.nesting += 1
        if self.run is None:
            self.go_to(OUTSIDE, None)
        # Otherwise a gradient function has a tape of its own, and all of that pass belongs to it.
        self.sums = {}
        return outer

    def exit_backward(self, outer: tuple[Any, Any, Any], continues: bool) -> int:
        """A backward pass ends; returns how many of its sums belong to no operator.

        Args:
            continues: the program computes with its gradients: it ends no iteration.
        """
        self.depth -= 1
        self.ids.nesting -= 1
        left = len(self.sums)
        self.go_to(outer[0], outer[1])
        self.sums = outer[2]
        if not (self.depth or continues):
            self.ids.new_iteration()
        return left

    def go_to(self, cells: Any, run: Any) -> None:
        """Count the operators that follow in `cells`, as those of `run` if it is given."""
        self.cells = cells
        self.run = run
        quiet = self.depth and run is None and not self.watches
        self.stale = self.outdated or bool(quiet) or self.muted > 0

    # -- layers -----------------------------------------------------------

    def move(self, change: Callable[..., None], *args: Any) -> None:
        """Enter or leave a layer or an optimizer by a method of :attr:`ids`."""
        change(*args)
        if not self.depth:
            self.cells = self.ids.current

    # -- records on tapes -------------------------------------------------

    def note_recorded(self, outputs: list[Any]) -> None:
        """The driver has recorded the gradient of the operator that returns `outputs`."""
        self.recorded = (id(outputs), weakref.ref(outputs[0])) if outputs else None

    def is_recorded(self, outputs: Any) -> bool:
        """True if the driver has recorded the gradient of `outputs`; it is asked once."""
        recorded, self.recorded = self.recorded, None
        if recorded is None or recorded[0] != id(outputs):
            return False
        return bool(outputs) and recorded[1]() is outputs[0]

    def note_owner(self, output: Any, mark: Mark) -> None:
        """Remember, as long as `output` lives, which execution has made it."""
        key, owners = id(output), self.owners

        def died(_: weakref.ref[Any]) -> None:
            owners.pop(key, None)

        owners[key] = (weakref.ref(output, died), mark)

    def note_reader(self, handle: Any, mark: Mark) -> None:
        """The first operator that reads a variable owns the sum of the gradients of all."""
        first = self.owner_of(handle)
        if first is None or first.generation != mark.generation:
            self.note_owner(handle, mark)

    def owner_of(self, output: Any) -> Mark | None:
        """The mark of the execution that has made `output`, if it was noted."""
        known = self.owners.get(id(output))
        return known[1] if known is not None and known[0]() is output else None

    def clear(self) -> None:
        """Let go of everything, when the thread has left its last scope."""
        self.ids.clear()
        self.gradients.clear()
        self.runs.clear()
        self.sums.clear()
        self.owners.clear()
        self.active = ()
        self.recorded = None


class LocalTracker(threading.local):
    """The current thread's tracker; None where no scope covers the thread."""

    tracker: EagerTracker | None = None


LOCAL = LocalTracker()


class unwatched:  # noqa: N801 - reads as a statement
    """Within it, the current thread's operators run vanilla."""

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
