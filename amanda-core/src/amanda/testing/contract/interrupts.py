"""Contract rule 12: interrupts wherever Python takes one in Amanda's own code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from amanda.interface.driver import Capability
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, ThreadState, owned_locks
from amanda.testing import interrupts, watched
from amanda.testing.contract.base import ContractTests, inserting, nothing
from amanda.testing.framework import Probe, Program
from amanda.tool import disabled


class InterruptTests(ContractTests):
    """The state that is left when a scope with an interrupt has been left."""

    def acting(self) -> Probe:
        """A tool with a routine at every point that the driver has."""
        after = inserting(after_op=nothing)
        if Capability.BACKWARD not in self.driver_cls.capabilities:
            return self.probe("mul", before=inserting(before_op=nothing), after=after)
        return self.probe(
            "mul",
            before=inserting(before_op=nothing, before_backward_op=nothing),
            after=after,
            before_backward=inserting(before_backward_op=nothing),
            after_backward=inserting(after_backward_op=nothing),
        )

    def work(self, program: Program) -> Any:
        """Train, where the driver sees gradients."""
        if Capability.BACKWARD in self.driver_cls.capabilities:
            return program.train()
        return program.run()

    def test_an_interrupt_leaves_nothing_behind(self) -> None:
        """An interrupt leaves no patch, hook, mode or thread state behind once the scope is left,
        and later runs are right.

        A sample of the points is tried; AMANDA_INTERRUPTS=all tries them all.
        """

        def scopes() -> None:
            program = self.positive_product()
            with self.apply(self.acting()), self.apply(self.probe(before=nothing)):
                self.work(program)
                with disabled():
                    program.run()
                self.work(program)

        is_ours = interrupts.in_packages(self.driver_cls.loaded().__module__)
        scopes()
        found = interrupts.points(scopes, is_ours)
        look = self.looking()
        before = look()
        for point in interrupts.sample(found):
            interrupts.run(scopes, is_ours, point)
            assert (str(point), look()) == (str(point), before)

    def looking(self) -> Callable[[], Any]:
        """A function that describes the state of the process and the behaviour of a program in
        it."""
        unpatched = watched.snapshot(self.fw.watched)

        def look() -> Any:
            changed = watched.differences(
                self.fw.watched, unpatched, watched.snapshot(self.fw.watched)
            )
            blocks = {name: getattr(STATE, name) for name in vars(ThreadState())}
            held = owned_locks()
            patched = list(sys.meta_path), threading.Thread.start, changed, self.fw.global_state()
            self.noted.clear()
            state = dict(ATTACHED), list(LIVE_SCOPES), blocks, held, patched
            vanilla = self.work(self.positive_product())
            with self.apply(self.counting()):
                again = self.work(self.positive_product())
            return state, str(vanilla), str(again), list(self.noted)

        return look
