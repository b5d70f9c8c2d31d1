"""Notes which optimizer of Keras steps where, in graphs and at once.

The calls of optimizers are noted from the import of Keras beside Amanda on, as those of layers are
(:mod:`amanda_tensorflow.keras_layers.recording`)::

    for step in optimizer_steps(graph):
        step.end                        # so many operators the graph had after it
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from amanda.python.patching import OWN_FRAMES_HIDDEN
from amanda_tensorflow import _internals
from amanda_tensorflow.keras_layers.base_classes import BaseClass

_METHODS = {"keras": "apply", "tf_keras": "apply_gradients"}
"""Packages of Keras, and the method that each optimizer of theirs steps by."""


@attrs.frozen(eq=False)
class OptimizerStep:
    """One step of an optimizer that was added to a graph.

    Attributes:
        optimizer: tells it from others.
        begin, end: how many operators the graph had before and after it.
        accumulates: whether it steps in the first of its branches only, and else adds up gradients.
    """

    optimizer: int
    begin: int
    end: int
    accumulates: bool


@attrs.define
class EagerOptimizers:
    """The eager driver's way to follow the steps of optimizers.

    Attributes:
        call: called with the vanilla method, the optimizer, and its arguments; returns what the
            method does. None while no driver is attached.
    """

    call: Callable[[Any, Any, Any, Any], Any] | None = None


class _RunningSteps(threading.local):
    """True if an optimizer steps in one thread: some step by the method of another."""

    def __init__(self) -> None:
        self.depth = 0


EAGER = EagerOptimizers()
_RUNNING = _RunningSteps()
_COUNT = itertools.count()
_NUMBERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_STEPS: weakref.WeakKeyDictionary[Any, list[OptimizerStep]] = weakref.WeakKeyDictionary()


def accumulates(optimizer: Any) -> int:
    """In how many calls of its method an optimizer steps once, if not in each; 0 if in each."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 0)


def optimizer_steps(graph: Any) -> Sequence[OptimizerStep]:
    """The steps that were added to a graph, in order."""
    return _STEPS.get(graph, ())


def _noting(vanilla: Any) -> Any:
    """The patch of the method that optimizers step by."""

    # AutoGraph converts functions by their module, and leaves those of Keras as they are.
    @functools.wraps(vanilla)
    def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        running = _RUNNING
        with OWN_FRAMES_HIDDEN:
            if running.depth:
                return vanilla(optimizer, *args, **kwargs)
            running.depth += 1
            try:
                if not _internals.executing_eagerly():
                    return _noted(vanilla, optimizer, args, kwargs)
                follow = EAGER.call
                if follow is None:
                    return vanilla(optimizer, *args, **kwargs)
                return follow(vanilla, optimizer, args, kwargs)
            finally:
                running.depth -= 1

    return apply


def _noted(vanilla: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Let an optimizer step while a graph is built, and note the step."""
    graph = _internals.default_graph()
    begin = _internals.count_operations(graph)
    result = vanilla(optimizer, *args, **kwargs)
    end = _internals.count_operations(graph)
    number = _NUMBERS.setdefault(optimizer, next(_COUNT))
    step = OptimizerStep(number, begin, end, accumulates(optimizer) > 1)
    _STEPS.setdefault(graph, []).append(step)
    return result


install = BaseClass("optimizers", "Optimizer", _METHODS, _noting).install
"""Note the steps of optimizers from now on; harmless when called twice."""
