"""Operators of a copy that are added only when something needs the copy.

Most analyses look at no tensor, and record nothing or counters: then no copy is needed, and the
vanilla graph runs. Therefore operators are not added at once. What adds them is kept in order, and
done when a tool looks at a tensor of the copy, or inserts something::

    deferral = Deferral()
    deferral.do(lambda: ...)                     # kept
    inputs = DeferredTensors(deferral, 2, make)  # to be shown to an analysis
    len(inputs)
    inputs[0]                                    # does what was kept, and calls make()
    deferral.do(lambda: ...)                     # is done at once, from then on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload


class Deferral:
    """What adds operators to a copy, as long as nothing needs them.

    Args:
        is_open: whether anything is kept.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._kept: list[Callable[[], object]] | None = [] if is_open else None

    @property
    def is_open(self) -> bool:
        """Whether nothing has needed the copy so far."""
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
        end: ends the deferral.
        count: how many they are.
        make: gives them afterwards.
    """

    def __init__(
        self, end: Callable[[], None], count: int, make: Callable[[], Sequence[Any]]
    ) -> None:
        self._end = end
        self._count = count
        self._make = make
        self._made: list[Any] | None = None

    @property
    def made(self) -> list[Any]:
        """The tensors."""
        if self._made is None:
            self._end()
        if self._made is None:
            self._made = list(self._make())
        return self._made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.made[index]


class DeferredOp:
    """An operator of a copy that is added when it, or one of its outputs, is looked at.

    Args:
        end: ends the deferral.
        count: how many outputs it has.
        make: adds it.

    Attributes:
        outputs: its outputs.
    """

    def __init__(self, end: Callable[[], None], count: int, make: Callable[[], Any]) -> None:
        self._end = end
        self._make = make
        self._op: Any = None
        self.outputs = DeferredTensors(end, count, lambda: self.op.outputs)

    @property
    def op(self) -> Any:
        """The operator."""
        if self._op is None:
            self._end()
            self._op = self._make()
        return self._op
