"""A test of a driver that takes about a second and needs no pytest, for ``amanda doctor``.

It runs a small program of the contract kit's adapter, vanilla and under a tool::

    from amanda.testing import self_test

    for problem in self_test.problems(MyDriver, MyFramework):
        print(problem)

It finds a driver that does not work in this environment. The contract kit tests whether
the driver keeps the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability, Driver
from amanda.testing import leftovers, watched
from amanda.testing.framework import Framework, Probe
from amanda.tool import apply

_X = [[1.0, -2.0], [3.0, 4.0]]
_W = [[0.5, 1.0], [2.0, -1.0]]
_OPS = ("mul", "relu")


def problems(driver_cls: type[Driver], framework_cls: type[Framework]) -> list[str]:
    """Run ``relu(x * w)`` under a driver and list its problems, one line for each.

    Args:
        driver_cls: the driver; it need not be registered.
        framework_cls: an adapter of its framework.
    """
    framework = framework_cls()
    program = framework.program(lambda x, w: framework.relu(framework.mul(x, w)), _X, _W)
    wanted = [framework.types[op] for op in _OPS]
    run: Callable[[], Any] = program.run
    if Capability.BACKWARD in driver_cls.capabilities:
        wanted += [kind for op in _OPS for kind in framework.backward_types[op]]
        run = program.train
    expected = run()
    # Frameworks load parts of themselves when they are first used: only now is it at rest.
    before = watched.snapshot(framework.watched)
    seen: set[str] = set()

    def look(context: OpContext) -> None:
        op = context.get_backward_op() if context.is_backward() else context.get_op()
        seen.add(framework.type_of(op))

    found: list[str] = []
    try:
        with apply(Probe(framework, before=look, before_backward=look), drivers=[driver_cls]):
            result = run()
        if result != expected:
            found.append(f"a run under a tool gives {result}, expected {expected}")
        if missing := [kind for kind in wanted if kind not in seen]:
            found.append(f"not seen: {', '.join(missing)}; seen were {sorted(seen)}")
    except Exception as error:
        found.append(f"under a tool: {type(error).__name__}: {error}")
    found += [f"after the test {line}" for line in leftovers.end()]
    after = watched.snapshot(framework.watched)
    changed = watched.differences(framework.watched, before, after)
    return [*found, *(f"{name} stays patched" for name in changed)]
