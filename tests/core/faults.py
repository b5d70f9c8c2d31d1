"""The faults that the contract kit has to find."""

from __future__ import annotations

from collections.abc import Callable

from amanda.testing.loopback import LoopbackDriver

FAULTS: dict[str, tuple[type[LoopbackDriver], tuple[str, ...]]] = {}
"""Broken drivers by fault, each with the contract tests that must fail for it."""


def fault(*tests: str) -> Callable[[type[LoopbackDriver]], type[LoopbackDriver]]:
    """Register a broken driver and the contract tests that find it out."""

    def register(cls: type[LoopbackDriver]) -> type[LoopbackDriver]:
        FAULTS[cls.__name__] = (cls, tests)
        return cls

    return register
