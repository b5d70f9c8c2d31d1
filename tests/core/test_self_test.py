"""The self-test that is made from the kit's adapter: what it finds, and what it says."""

from __future__ import annotations

import pytest

from amanda.driver import Capability
from amanda.testing import self_test
from amanda.testing.loopback import LoopbackDriver, ops
from tests.core import broken_backward, broken_forward
from tests.core.loopback_framework import LoopbackFramework


def test_a_sound_driver_has_no_problems() -> None:
    """Of a driver that works nothing is reported, also where it has no capability at all."""
    assert self_test.problems(LoopbackDriver, LoopbackFramework) == []

    class Modest(LoopbackDriver):
        capabilities = frozenset()

    assert self_test.problems(Modest, LoopbackFramework) == []


class RaisesInAttach(LoopbackDriver):
    def attach(self) -> None:
        raise RuntimeError("no such framework")


class SeesNothing(LoopbackDriver):
    @property
    def is_active(self) -> bool:
        return False


class RaisesInDetach(LoopbackDriver):
    def detach(self) -> None:
        super().detach()
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (RaisesInAttach, "under a tool: RuntimeError: no such framework"),
        (RaisesInDetach, "under a tool: RuntimeError: not now"),
        (SeesNothing, "not seen: mul, relu"),
        (broken_backward.SeesOneBackwardOp, "not seen: MulBackward; seen were ['Relu"),
        (broken_forward.RoundsResults, "a run under a tool gives Trained("),
        (broken_forward.ForgetsAPatch, "amanda.testing.loopback.ops.rng_state stays patched"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_problems_are_named(
    monkeypatch: pytest.MonkeyPatch, driver: type[LoopbackDriver], expected: str
) -> None:
    """A driver that does not work gets a line that says what is wrong."""
    monkeypatch.setattr(ops, "rng_state", ops.rng_state)  # one of them leaves its patch behind
    found = self_test.problems(driver, LoopbackFramework)
    assert [line for line in found if expected in line], found


def test_gradients_are_compared_where_the_driver_has_them() -> None:
    """Without Capability.BACKWARD no backward pass is run."""

    class ForwardOnly(broken_backward.CutsTheGradient):
        capabilities = LoopbackDriver.capabilities - {Capability.BACKWARD}

    class NoGradients(LoopbackFramework):
        def backward(self, outputs: object, leaves: object) -> list[object]:
            raise NotImplementedError

    assert self_test.problems(ForwardOnly, NoGradients) == []
