"""Routines that drivers know, and run without Python where they can.

A tool inserts them like any other routine::

    counter = amanda.inline.Counter()
    context.insert_before_op(counter, inputs=[])
    ...
    print(counter.count)

Their meaning is that of the Python code below, in every mode. A driver that recognises one may
have its effect in another way: the graph drivers of TensorFlow add up how often a graph was run,
instead of calling Python at each of its operators.
"""

from __future__ import annotations

from typing import Any


class Counter:
    """Counts executions: of the operators, and at the points, at which it is inserted.

    One counter may be inserted many times; it then counts all of them together. The count may be
    read at any time outside of the program's operators, and set.

    Attributes:
        count: the executions so far. A driver that adds up whole runs of a graph does so when
            a run has ended; a run that raises is then not counted.
    """

    __slots__ = ("__weakref__", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __call__(self, *tensors: Any) -> None:
        """Count one execution; the tensors at the point are not looked at."""
        self.count += 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count})"


def is_counter(routine: object) -> bool:
    """Whether a routine is a :class:`Counter`, which a driver may run in its own way.

    An instance of a subclass is not: it may do something else.
    """
    return type(routine) is Counter
