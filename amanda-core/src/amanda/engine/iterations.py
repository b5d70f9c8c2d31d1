"""Finds the ends of a program's iterations from its passes and optimizer steps.

An iteration ends after a step of an optimizer. Without an optimizer it ends when the next one
begins: with a forward pass after a backward pass, or in inference with the next call of the same
outermost module. A backward pass outside of modules, without an optimizer, ends its iteration
itself, unless its gradients are differentiated. The forward pass of such functional code begins at
the end of the last iteration. Evaluations before, between and after steps of training belong to no
iteration. After a pass that raises, the iteration begins again with the next forward pass; a
backward pass after a forward pass that has raised continues the iteration.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from amanda.interface.points import Point

Emit = Callable[[Point], None]


class _Thread:
    """Stands for a thread until it ends, also for one that Python has not started: for that
    ``threading.current_thread()`` makes an object that lasts."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_CURRENT = _Current()


class Iterations:
    """The iterations under one scope.

    Attributes:
        count: number of ended iterations, which is also the number (from 0) of the current one.
        begin, end: times of the last one's begin and end, in seconds of ``time.perf_counter``.
        forwards: depth of calls of outermost modules, in all threads.
        optimizing: True while an optimizer steps.
        contiguous: True if the current one began at the end of the last iteration, or at the start
            of the scope.
    """

    def __init__(self) -> None:
        self.count = 0
        self.begin = self.end = 0.0
        self.forwards = 0
        self.optimizing = False
        self.contiguous = False
        self._is_open = False
        self._trains = False
        self._seen_this_step = False
        self._backwards = 0
        # Running backward passes, and whether an optimizer has stepped in one, as in a hook.
        self._running, self._steps_within = 0, False
        self._is_training = False
        self._has_gradients = self._has_failed = False
        self._first_ambiguous: int | None = None
        self._evaluated = 0
        self._called: dict[str, bool] = {}
        self._threads: set[weakref.ref[_Thread]] = set()
        self._has_modules = False
        self._will_step: bool | None = None

    def forward_begins(
        self,
        model: str,
        trains: bool,
        emit: Emit,
        differentiates: bool = False,
        will_step: Callable[[], bool] = bool,
    ) -> bool:
        """Note that a call of an outermost module begins; return True if it is a forward pass of
        its own.

        Args:
            model: identifies the module.
            trains: True if it is in training, with gradients.
            emit: function to call with each point of iterations.
            differentiates: True if the gradients are computed with it, as in a run of a graph.
            will_step: function that returns True if an optimizer has its weights; called once, if
                passes before the first step could be iterations.
        """
        if not self.forwards:
            self._drop_failed()
        is_next = self._is_next(model, differentiates, will_step)
        self.forwards += 1
        if self.forwards > 1:
            return False
        ended = self.end
        if is_next:
            self._close(emit)
        if trains and not (self._is_open or self._has_gradients) and self._first_ambiguous is None:
            # An evaluation before training is not a step, but if no gradient follows at all, it is.
            self._evaluated, self.count = self._evaluated + self.count, 0
        self._begun(emit, contiguous=self.end != ended)
        self._called[model] = trains
        self._has_modules = True
        if trains or differentiates:
            self._is_training = True
        if differentiates:
            self._backwards += 1
            self._has_gradients = True
        return True

    def forward_ends(self, failed: bool) -> bool:
        """Note that a call of an outermost module has ended; return True if no other one runs."""
        self.forwards = max(0, self.forwards - 1)
        self._has_failed |= failed and not self.forwards
        return not self.forwards

    def _drop_failed(self) -> None:
        """Forget an iteration in which a pass has raised: the next one gets its number."""
        if self._has_failed:
            self._is_open = self._is_training = self._has_failed = self._steps_within = False
            self._backwards, self._called = 0, {}

    def _is_next(self, model: str, differentiates: bool, will_step: Callable[[], bool]) -> bool:
        """True if a call of an outermost module now begins a new iteration.

        Such a call cannot belong to the current iteration.
        """
        # An optimizer may call the model itself, several times in a step.
        if not self._is_open or self.forwards or (self.optimizing and self._is_training):
            return False
        if self._has_gradients and not self._is_training and self._is_elsewhere():
            # An evaluation in another thread has ended: it is no part of a step.
            return True
        if self._backwards:
            return not self._steps(will_step)
        if differentiates and self._called and not self._is_training:
            # An evaluation and a graph run with gradients are separate iterations.
            return True
        if model not in self._called:
            return False
        return not (self._called[model] and self._steps(will_step))

    def _is_elsewhere(self) -> bool:
        """True if the passes of this iteration so far were in other threads."""
        return bool(self._threads) and weakref.ref(_CURRENT.thread) not in self._threads

    def is_shared(self) -> bool:
        """True if another thread, which has not ended, has had passes in this iteration.

        Called where a pass has begun in the current thread.
        """
        self._threads.add(weakref.ref(_CURRENT.thread))
        # A copy: meanwhile others may be added.
        return sum(thread() is not None for thread in tuple(self._threads)) > 1

    def _steps(self, will_step: Callable[[], bool]) -> bool:
        """True if an optimizer has stepped, or is to."""
        if not self._trains and self._will_step is None:
            self._will_step = will_step()
        return self._trains or bool(self._will_step)

    def backward_begins(self, emit: Emit, continues: bool = False) -> None:
        """Note that a backward pass begins.

        Args:
            continues: True if the forward pass continues after it, with the gradients.
        """
        is_functional = not self._has_modules
        self._has_failed = False
        self._running += 1
        self._begun(emit, contiguous=is_functional, begin=self.end if is_functional else 0.0)
        self._backwards += not continues
        self._is_training = self._has_gradients = True

    def backward_ends(self, emit: Emit, continues: bool = False, failed: bool = False) -> None:
        """Note that a backward pass has ended, or raised."""
        self._running -= 1
        if failed and not continues:
            self._has_failed = True
            self._drop_failed()
            return
        if self._steps_within and not self._running:
            self._steps_within = False
            self.optimizer_ends(emit)
        goes_on = continues or self._called or self._trains or self.optimizing
        if self._is_open and not goes_on:
            self._close(emit)

    def optimizer_ends(self, emit: Emit) -> None:
        """Note that an optimizer has stepped."""
        if self._running:
            # Gradients for other optimizers follow.
            self._steps_within = True
            return
        self._seen_this_step = True
        if not self._trains:
            # The iterations counted so far were accumulation passes of this one: undo the count.
            self._trains = self._has_gradients = True
            if self._first_ambiguous is not None:
                self.count, self._is_open = self._first_ambiguous, True
        if self._is_open:
            self._ended(emit)

    def new_iteration(self, emit: Emit) -> None:
        """End an iteration at the program's request."""
        is_seen, self._seen_this_step = self._seen_this_step, False
        if self._is_open or not is_seen:
            self._ended(emit)

    def finish(self, emit: Emit) -> None:
        """End the last iteration at the end of the scope, unless an optimizer would end it."""
        if self._is_open and not (self.forwards or self._trains or self._has_failed):
            self._close(emit)

    def _close(self, emit: Emit) -> None:
        """Close an iteration that no step of an optimizer has ended."""
        if self._trains or (self._has_gradients and not self._is_training):
            # An evaluation between two steps of training belongs to neither.
            self._is_open, self._is_training, self._called = False, False, {}
            return
        if self._is_training and self._first_ambiguous is None:
            self._first_ambiguous = self.count
        self._ended(emit)
        if self._evaluated and not self._has_gradients:
            self.count += self._evaluated
            self._evaluated = 0

    def _begun(self, emit: Emit, contiguous: bool = False, begin: float = 0.0) -> None:
        self._seen_this_step = True
        if self._is_open:
            return
        self._is_open, self._threads = True, set()
        self.contiguous = contiguous
        self.begin = begin or time.perf_counter()
        emit(Point.ITERATION_BEGIN)

    def _ended(self, emit: Emit) -> None:
        self._is_open = self._is_training = False
        self._backwards = 0
        self._called = {}
        self.end = time.perf_counter()
        try:
            emit(Point.ITERATION_END)
        finally:
            self.count += 1
