"""Operators of a copy that are added only when something needs the copy.

Most analyses look at no tensor, and record nothing or counters: then no copy is needed, and the
vanilla graph runs. Therefore operators are not added at once. What adds them is kept in order, and
done when a tool looks at a tensor of the copy, or inserts something::

    deferral = Deferral(is_open=True)
    deferral.do(lambda: ...)        # kept
    deferral.end()                  # does what was kept
    deferral.do(lambda: ...)        # is done at once, from then on

What is kept for each operator of a graph are few objects, without closures and without cycles. With
seventy of them for each, Python's garbage collector went through all objects of the process twice
while a Keras model of 3,700 operators was looked at, and took longer than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Needed(Protocol):
    """A copy."""

    def need(self) -> None:
        """Do what was kept: the copy is needed."""


class Deferral:
    """The steps that add operators to a copy, kept until something needs them.

    Args:
        is_open: whether anything is kept.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._kept: list[Callable[[], object]] | None = [] if is_open else None

    @property
    def is_open(self) -> bool:
        """True if nothing has needed the copy so far."""
        return self._kept is not None

    def do(self, step: Callable[[], object]) -> None:
        """Keep a step while the copy is not needed, else do it."""
        if self._kept is None:
            step()
        else:
            self._kept.append(step)

    def end(self) -> None:
        """Do what was kept: the copy is needed."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for step in kept:
                step()


class DeferredTensors(Sequence[Any]):
    """Tensors of a copy that are made when one of them is looked at.

    Args:
        copy: the copy; a look ends its deferral.
        count: how many they are.
    """

    __slots__ = ("_copy", "_count", "_made")

    def __init__(self, copy: Needed, count: int) -> None:
        self._copy = copy
        self._count = count
        self._made: list[Any] | None = None

    def make(self) -> Sequence[Any]:
        """The tensors, once the deferral has ended."""
        raise NotImplementedError

    @property
    def is_made(self) -> bool:
        """True if one of them was looked at."""
        return self._made is not None

    @property
    def made(self) -> list[Any]:
        """The tensors."""
        if self._made is None:
            self._copy.need()
        if self._made is None:
            self._made = list(self.make())
        return self._made

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.made[index]
