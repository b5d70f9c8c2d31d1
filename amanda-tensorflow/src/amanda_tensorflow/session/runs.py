"""One run of a session: what is fed, fetched and executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda_tensorflow import _internals

Key = tuple[Any, ...]
"""Identifies runs of one graph that differ in the fed values only, and not in which of them are
handles."""


def is_handle(value: Any) -> bool:
    """True if a fed value is a handle to one that the session keeps (``get_session_handle``)."""
    return getattr(getattr(value, "dtype", None), "names", None) is not None


def key_of(feeds: Mapping[Any, Any], fetches: Iterable[Any], targets: Iterable[Any]) -> Key:
    """The key of a run that is given in handles of the runtime."""
    name = _internals.operation_name
    return (
        tuple(
            [
                # The same as is_handle(), without a call for each value.
                (name(o.oper), o.index, getattr(getattr(v, "dtype", None), "names", None))
                for o, v in feeds.items()
            ]
        ),
        tuple([(name(output.oper), output.index) for output in fetches]),
        tuple(map(name, targets)),
    )


@attrs.frozen(eq=False)
class SessionRun:
    """One run, in terms of the operators and tensors of one graph.

    Attributes:
        feeds: pairs of a tensor and its value.
        fetches: the tensors whose values are returned.
        targets: the operators that are executed besides.
        further: pairs of a tensor that is given the value of a feed, too, and that feed's position.
    """

    feeds: Sequence[tuple[Any, Any]]
    fetches: Sequence[Any]
    targets: Sequence[Any]
    further: Sequence[tuple[Any, int]] = ()

    @classmethod
    def of(
        cls, graph: Any, feeds: Mapping[Any, Any], fetches: Sequence[Any], targets: Sequence[Any]
    ) -> SessionRun:
        """The run of a graph that is given in handles of the runtime."""
        return cls(
            [(_internals.tensor_of(graph, output), value) for output, value in feeds.items()],
            [_internals.tensor_of(graph, output) for output in fetches],
            [_internals.operation_of(graph, target) for target in targets],
        )

    def fed(self, values: Iterable[Any]) -> SessionRun:
        """This run with other values, in the order of its feeds."""
        given = list(values)
        feeds = [(tensor, value) for (tensor, _), value in zip(self.feeds, given, strict=True)]
        if self.further:
            feeds += [(tensor, given[index]) for tensor, index in self.further]
        return SessionRun(feeds, self.fetches, self.targets)

    def roots(self) -> list[Any]:
        """The operators that it needs, without those that these need in turn."""
        tensors = [*self.fetches, *(tensor for tensor, _ in self.feeds)]
        return [*dict.fromkeys(tensor.op for tensor in tensors), *self.targets]
