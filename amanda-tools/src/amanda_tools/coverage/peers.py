"""Mechanisms that frameworks offer for watching a model, and which operators each of them sees.

``make_peers("pytorch")`` makes those of a framework; each is given the points and executions of the
run, and ``seen()`` are the ids of the operators that it sees.
"""

from __future__ import annotations

import abc
import importlib
from typing import ClassVar

from amanda import OpContext
from amanda.interface.points import PointContext

_MODULES = {
    "pytorch": "amanda_tools.coverage.pytorch",
    "tensorflow": "amanda_tools.coverage.tensorflow",
}
"""Framework, as the first tag of namespaces, to the module with its mechanisms."""


class Peer(abc.ABC):
    """A mechanism of a framework.

    A mechanism is called with the inputs and outputs of some calls (of modules, of functions). It
    sees an operator if there is a call with the operator's own values: its data come from outside
    of the call, and its results leave it. Values that a call computes in between stay hidden.

    Attributes:
        name: name in results.
        framework: first tag of the namespaces that it belongs to.
        how: ``"measured"`` if its arguments are compared with the operators' tensors; ``"derived"``
            from the places of operators if installing it would change the run, or it has no public
            interface.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    how: ClassVar[str]

    def exit(self) -> None:
        """Called when the scope has ended: discard the running calls."""

    def passed(self, point: PointContext) -> None:
        """Called when a module is entered or left."""

    def look(self, context: OpContext) -> None:
        """Analysis before a forward operator."""

    def look_at_outputs(self, context: OpContext) -> None:
        """Analysis after a forward operator."""

    def executed(self, op_id: str) -> None:
        """Called at each execution of a forward operator."""

    @abc.abstractmethod
    def seen(self) -> frozenset[str]:
        """Return the ids of the forward and backward operators seen."""


def make_peers(framework: str) -> tuple[Peer, ...]:
    """Make the mechanisms of a framework, named by the first tag of its namespaces; () if
    unknown."""
    if framework not in _MODULES:
        return ()
    classes: tuple[type[Peer], ...] = importlib.import_module(_MODULES[framework]).PEERS
    return tuple(cls() for cls in classes)
