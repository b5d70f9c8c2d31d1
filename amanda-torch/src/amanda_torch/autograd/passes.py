"""The backward pass that the current thread runs, as far as it is known before it begins.

What a pass executes can be added up when it has ended, and no node of it has to be looked at, if it
is known to run all that its roots lead to::

    running = begin(roots, args) if ADDED_UP else None
    try:
        run_backward(roots, *args)
        if running is not None:
            running.end()
    finally:
        if running is not None:
            running.leave()
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from amanda_torch import _internals

Added = Callable[[set[int], set[int]], None]
"""Called at the end of a pass, with the numbers by which it came to what is added up, and with
:attr:`BackwardPass.counted`."""


class AddedUp(Protocol):
    """Executed operators that are added up where a whole pass comes to them."""

    def look_behind(self, nodes: Sequence[Any]) -> None:
        """Look at each of those that lie behind some nodes from now on."""


ADDED_UP: set[weakref.ref[AddedUp]] = set()
"""The listeners for passes; passes need not be begun here as long as it is empty."""


def tell(one: AddedUp) -> None:
    """Let something know of passes as long as it exists."""
    ADDED_UP.add(weakref.ref(one, ADDED_UP.discard))


class BackwardPass:
    """A pass that Python has begun in the current thread.

    Args:
        is_whole: whether it runs all nodes that its roots lead to, and makes no graph.

    Attributes:
        entered: what is to be added up at its end, and the numbers by which it came there.
        counted: the identities of leaves whose accumulations hooks count, or which have been added
            up.
        timed: told that the pass has ended, or raised, by a method ``end()``.
        timed_leaves: the identities of leaves whose accumulations are timed without hooks, and
            added up at its end.
    """

    __slots__ = ("_is_whole", "_outer", "_task", "counted", "entered", "timed", "timed_leaves")

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._task: int | None = None
        self._outer: BackwardPass | None = None
        self.entered: dict[Added, set[int]] = {}
        self.counted: set[int] = set()
        self.timed: list[Any] = []
        self.timed_leaves: frozenset[int] = frozenset()

    def is_whole(self) -> bool:
        """Whether the node that runs now is of this pass, and all of the pass is run."""
        task = _internals.graph_task()
        if self._task is None:
            self._task = task
        return self._is_whole and task == self._task

    def enter(self) -> None:
        """Make this the pass that the thread is in."""
        self._outer, _THREAD.running = _THREAD.running, self

    def end(self) -> None:
        """Count what was noted of the pass, which has run to its end."""
        for added, numbers in self.entered.items():
            added(numbers, self.counted)

    def leave(self) -> None:
        """Return to the outer pass: this one has ended, or raised."""
        _THREAD.running = self._outer
        for one in self.timed:
            one.end()


class _Thread(threading.local):
    running: BackwardPass | None = None


_THREAD = _Thread()


def running() -> BackwardPass | None:
    """The innermost pass that Python has begun in the current thread."""
    return _THREAD.running


def begin(roots: Any, args: Sequence[Any], *, is_quiet: bool = False) -> BackwardPass:
    """Note that a pass begins.

    Args:
        roots: where it begins.
        args: what else PyTorch gives its engine: gradients, whether to keep the graph, whether to
            make one, and the inputs whose gradients are asked for.
        is_quiet: whether it is a tool's own pass.
    """
    is_whole = not is_quiet and not _internals.in_backward() and len(args) >= _KNOWN_ARGUMENTS
    is_whole = is_whole and not (args[2] or args[3])
    edges = [root for root in roots if not isinstance(root, torch.Tensor)]
    if edges and not is_quiet:
        # They may lead into the middle of what would be added up.
        is_whole = False
        for run in [reference() for reference in tuple(ADDED_UP)]:
            if run is not None:
                run.look_behind([edge.node for edge in edges])
    found = BackwardPass(is_whole=is_whole)
    found.enter()
    return found


_KNOWN_ARGUMENTS = 4
