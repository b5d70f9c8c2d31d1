"""Mechanisms that frameworks offer for watching a model, and what each of them sees."""

from __future__ import annotations

import abc
import importlib
from typing import ClassVar

from amanda import OpContext

_MODULES = {
    "pytorch": "amanda_tools.coverage.pytorch",
    "tensorflow": "amanda_tools.coverage.tensorflow",
}
"""The framework's tag in namespaces, and where its mechanisms are."""


class Peer(abc.ABC):
    """A mechanism of a framework. It sees an operator that is at the borders of its calls.

    A mechanism is called with what goes into some call (of a module, of a function) and with
    what comes out. It sees an operator if there is a call whose values are the operator's own:
    its data come from outside of the call, and its results leave it. What a call computes on
    the way from one to the other it does not show.

    Attributes:
        name: as results give it.
        framework: the first tag of the namespaces that it belongs to.
        how: ``"measured"`` if it is installed beside Amanda, ``"derived"`` if it would change
            the run, or has no public interface, and what it sees is concluded from where the
            operator is.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    how: ClassVar[str]

    def enter(self) -> None:
        """The scope begins."""

    def exit(self) -> None:
        """The scope has ended: everything is as it was before."""

    def look(self, context: OpContext) -> None:
        """Analysis before a forward operator."""

    def look_at_outputs(self, context: OpContext) -> None:
        """Analysis after a forward operator."""

    def look_at_gradients(self, context: OpContext) -> None:
        """Analysis after a backward operator."""

    def executed(self, op_id: str) -> None:
        """A forward operator is executed, for the first time or again."""

    @abc.abstractmethod
    def seen(self) -> frozenset[str]:
        """The ids of the forward and backward operators that it has seen."""


def peers_of(framework: str) -> tuple[Peer, ...]:
    """New peers for a framework, by the first tag of its namespaces; none for others."""
    if framework not in _MODULES:
        return ()
    classes: tuple[type[Peer], ...] = importlib.import_module(_MODULES[framework]).PEERS
    return tuple(cls() for cls in classes)
