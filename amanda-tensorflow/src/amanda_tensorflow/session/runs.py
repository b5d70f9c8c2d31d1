"""What a session is asked to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda_tensorflow import _internals


@attrs.frozen(eq=False)
class SessionRun:
    """What a run asks for, in terms of one graph.

    Attributes:
        feeds: pairs of a tensor and its value.
        fetches: tensors.
        targets: operators to run.
    """

    feeds: Sequence[tuple[Any, Any]]
    fetches: Sequence[Any]
    targets: Sequence[Any]

    @classmethod
    def of(cls, session: Any, feeds: Any, fetches: Any, targets: Any) -> SessionRun:
        """The request that a session was given in handles of the runtime."""
        graph = session.graph
        return cls(
            [(_internals.tensor_of(graph, output), value) for output, value in feeds.items()],
            [_internals.tensor_of(graph, output) for output in fetches],
            [_internals.operation_of(graph, target) for target in targets],
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other requests of the same graph, the values aside."""
        return (
            tuple(tensor.name for tensor, _ in self.feeds),
            tuple(tensor.name for tensor in self.fetches),
            tuple(op.name for op in self.targets),
        )

    def fed_like(self, other: SessionRun) -> SessionRun:
        """This request with the values that another one feeds, in the same order."""
        pairs = zip(self.feeds, other.feeds, strict=True)
        feeds = [(tensor, value) for (tensor, _), (_, value) in pairs]
        return SessionRun(feeds, self.fetches, self.targets)

    def roots(self) -> list[Any]:
        """The operators that have to be there."""
        tensors = [*self.fetches, *(tensor for tensor, _ in self.feeds)]
        return [*dict.fromkeys(tensor.op for tensor in tensors), *self.targets]
