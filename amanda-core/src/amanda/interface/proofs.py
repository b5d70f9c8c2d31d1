"""Proofs: tiny programs that test the mechanisms by which a driver hooks into a framework.

A driver that replaces functions of a framework can be right with one version, and see nothing or
change results with the next, in which another function is called::

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        return [Proof("module calls", _prove_modules, without="ids carry no module paths")]

``amanda doctor`` makes all of them. A scope makes them before it attaches a driver to a version of
its framework that the driver was not tested with (:mod:`amanda.registry.proofs`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import attrs


@attrs.frozen
class Proof:
    """A mechanism, and a tiny program that shows whether it works.

    Attributes:
        mechanism: what it is about, in the words of the driver's documents: "module calls".
        check: runs the program under a scope, in a few milliseconds, and gives a line for each
            problem; an exception is one, too. It draws no random numbers and leaves nothing behind.
        without: what holds while the mechanism is switched off, for messages; the driver then does
            without it (``Driver.switched_off``). "" if the driver cannot work without it.
        needs: a module without which the program cannot run, and whose import takes too long for a
            proof. If it is not imported yet, the proof waits for the first scope that finds it
            imported as it ends or begins.
    """

    mechanism: str
    check: Callable[[], Iterable[str]]
    without: str = ""
    needs: str = ""

    def can_run(self) -> bool:
        """True if the module that the program needs is imported."""
        return not self.needs or self.needs in sys.modules

    def problems(self) -> list[str]:
        """Run the program; a line for each problem."""
        found: list[str] = []
        try:
            found.extend(str(problem) for problem in self.check())
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        return found
