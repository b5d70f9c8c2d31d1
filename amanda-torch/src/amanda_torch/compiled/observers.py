"""Routines that a compiler does not trace, in the code that it makes of a captured graph.

One operator of ours stands in the graph for each of them, with the tensors that the routine selects
and a number. The compiler can neither look into it, nor remove it, nor change the order of two::

    observer = ObservingCall(dispatcher, action, [True])
    _internals.observing_operator()([tensor], observer.number)    # runs the routine

The operator returns nothing: a value that is passed on would have to be copied, which costs time
and may change its strides, and with them last bits of results. So only routines that return nothing
are run so.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import attrs

from amanda.engine.dispatch import Dispatcher
from amanda.inline.steps import StepKind, lowered
from amanda.interface.action import Action, ActionKind
from amanda.python.bytecode import returns_something
from amanda_torch import _internals

_NUMBERS = itertools.count()
_OBSERVERS: weakref.WeakValueDictionary[int, ObservingCall] = weakref.WeakValueDictionary()
"""By number. Whoever runs the code holds them."""


def only_observes(action: Action) -> bool:
    """True if a routine can run so: it returns nothing, and is called for its tensors or counts.

    What else takes no tensor, such as a clock, depends on its place among the operators, which a
    compiler keeps only for operators that take what others give.
    """
    if action.differentiable or action.kind not in (ActionKind.BEFORE_OP, ActionKind.AFTER_OP):
        return False
    if action.select == ():
        return lowered(action).kind is StepKind.COUNT
    return not returns_something(action.func)


class ObservingCall:
    """Runs one routine in compiled code.

    Args:
        dispatcher: the driver's.
        action: that of the routine.
        given: of each tensor that it selects, whether there is one.

    Attributes:
        number: by which the code calls it.
    """

    def __init__(self, dispatcher: Dispatcher, action: Action, given: Sequence[bool]) -> None:
        self._dispatcher = dispatcher
        # What is passed is what it selects.
        self._action = attrs.evolve(action, select=None)
        self._given = given
        self.number = next(_NUMBERS)
        _OBSERVERS[self.number] = self

    def run(self, tensors: Sequence[Any]) -> None:
        """Run the routine.

        Args:
            tensors: those that it selects, as far as there are any.
        """
        found = iter(tensors)
        selected = [next(found) if is_given else None for is_given in self._given]
        self._dispatcher.run_all((self._action,), selected)


def _observe(tensors: Sequence[Any], number: int) -> None:
    observer = _OBSERVERS.get(number)
    if observer is not None:
        observer.run(tensors)


_internals.set_observing(_observe)
