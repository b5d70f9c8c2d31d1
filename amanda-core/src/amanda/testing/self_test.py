"""A test of a driver that takes about a second and needs no pytest, for ``amanda doctor``.

It runs a small program of the contract kit's adapter, vanilla and under tools::

    from amanda.testing import self_test

    for problem in self_test.problems(MyDriver, MyFramework):
        print(problem)

It finds a driver that does not work in this environment. The contract kit tests whether
the driver keeps the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability, Driver
from amanda.testing import leftovers, watched
from amanda.testing.framework import Framework, Probe, Program
from amanda.tool import apply, cache_disabled, new_iteration

_X = [[1.0, -2.0], [3.0, 4.0]]
_W = [[0.5, 1.0], [2.0, -1.0]]
_OPS = ("mul", "relu")


def problems(driver_cls: type[Driver], framework_cls: type[Framework]) -> list[str]:
    """Run a program of two operators under a driver and list its problems, one line for each.

    Args:
        driver_cls: the driver; it need not be registered.
        framework_cls: an adapter of its framework.
    """
    framework = framework_cls()
    test = _SelfTest(driver_cls, framework)
    test.program.train() if test.has_backward else test.program.run()
    # Frameworks load parts of themselves when they are first used: only now is it at rest.
    before = watched.snapshot(framework.watched)
    found = [
        *_caught("a tool that only looks", test.watching),
        *_caught("a tool that replaces a value", test.acting),
    ]
    found += [f"after the test {line}" for line in leftovers.end()]
    after = watched.snapshot(framework.watched)
    found += [
        f"{name} stays patched" for name in watched.differences(framework.watched, before, after)
    ]
    return found


def _caught(what: str, check: Callable[[], Iterator[str]]) -> list[str]:
    """The problems that a check finds; an exception is one."""
    found: list[str] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(f"under {what}: {type(error).__name__}: {error}")
    return found


@attrs.frozen
class _Run:
    """The results of one run of the program; `gradients` is None without a backward pass."""

    outputs: Any
    gradients: Any = None


class _SelfTest:
    """The program ``relu(x * w)`` and the checks that use it."""

    def __init__(self, driver_cls: type[Driver], framework: Framework) -> None:
        self._driver_cls = driver_cls
        self._framework = framework
        self.has_backward = Capability.BACKWARD in driver_cls.capabilities
        self.program: Program = framework.program(
            lambda x, w: framework.relu(framework.mul(x, w)), _X, _W
        )

    def _run(self) -> _Run:
        if not self.has_backward:
            return _Run(self.program.run())
        trained = self.program.train()
        return _Run(trained.outputs, trained.gradients)

    def watching(self) -> Iterator[str]:
        """Two iterations under a tool with analyses and no actions."""
        expected = self._run()
        ids: list[str] = []
        types: list[str] = []

        def look(context: OpContext) -> None:
            op = context.get_backward_op() if context.is_backward() else context.get_op()
            ids.append(context.get_backward_op_id() or context.get_op_id())
            types.append(self._framework.type_of(op))

        tool = Probe(self._framework, before=look, before_backward=look)
        with apply(tool, drivers=[self._driver_cls]), cache_disabled():
            first = self._run()
            new_iteration()
            count = len(ids)
            second = self._run()
        for number, run in ("first", first), ("second", second):
            yield from _compared(
                f"the {number} iteration under a tool that only looks", run, expected
            )
        if sorted(ids[:count]) != sorted(ids[count:]):
            yield f"the ids of two iterations differ: {ids[:count]} and {ids[count:]}"
        for kind in self._wanted_types():
            if kind not in types:
                yield f"operator {kind} was not seen; seen were {sorted(set(types))}"

    def _wanted_types(self) -> list[str]:
        """The types of the forward operators, and of the backward ones if there are some."""
        framework = self._framework
        forward = [framework.types[op] for op in _OPS]
        backward = [kind for op in _OPS for kind in framework.backward_types[op]]
        return forward + backward * self.has_backward

    def acting(self) -> Iterator[str]:
        """A run under a tool that doubles a result: gradients pass straight through."""
        vanilla = self._run()
        expected = attrs.evolve(vanilla, outputs=_doubled(vanilla.outputs))
        kind = self._framework.types["mul"]

        def analyse(context: OpContext) -> None:
            context.insert_after_op(lambda y: self._framework.scale(y, 2.0))

        with apply(Probe(self._framework, kind, before=analyse), drivers=[self._driver_cls]):
            run = self._run()
        yield from _compared("a run in which a tool doubles a value", run, expected)
        yield from _compared("a run after the scope", self._run(), vanilla)


def _compared(what: str, run: _Run, expected: _Run) -> Iterator[str]:
    for name in ("outputs", "gradients"):
        got, wanted = getattr(run, name), getattr(expected, name)
        if got != wanted:
            yield f"{what} gives the {name} {got}, expected {wanted}"


def _doubled(values: Any) -> Any:
    return [_doubled(value) for value in values] if isinstance(values, list) else 2.0 * values
