"""Contract rule 11: many scopes, one after the other."""

from __future__ import annotations

from amanda.state import ATTACHED, LIVE_SCOPES, STATE
from amanda.testing import growth, watched
from amanda.testing.contract.interrupts import InterruptTests
from amanda.tool import disabled

_BYTES = 100
"""Bytes for each scope that an allocator may keep, and a framework's own tables may grow."""


class SoakTests(InterruptTests):
    """The objects and memory that many scopes leave behind."""

    def test_many_scopes_leave_nothing(self) -> None:
        """Neither patches, modes, threads nor memory grow with the scopes that have ended.

        There are a few; AMANDA_SOAK=20000 is the soak, and judges the memory of the process.
        """
        program = self.positive_product()
        self.work(program)
        unpatched = watched.snapshot(self.fw.watched)
        modes = self.fw.global_state()

        def one_scope() -> None:
            with self.apply(self.acting()), self.apply(self.probe("mul")):
                self.work(program)
                with disabled():
                    program.run()

        grown = growth.grow(one_scope)
        print(f"{self.driver_cls.name}, {self.framework_cls.__name__}: {grown}")
        changed = watched.differences(self.fw.watched, unpatched, watched.snapshot(self.fw.watched))
        assert (changed, self.fw.global_state()) == ([], modes)
        assert (dict(ATTACHED), list(LIVE_SCOPES), STATE.blocks) == ({}, [], ())
        assert grown.threads <= 0
        assert grown.ours < 1
        assert grown.objects < 1 + self.fw.kept_objects
        if grown.is_long:
            assert grown.blocks < 1
            assert grown.resident < _BYTES + self.fw.keeps
