"""How benchmarks measure: blocks in turns, intervals, and what a row concludes from them.

All timings are made up: a clock that only steps move forward, or lists of seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest

from tests.benchmarks import timing
from tests.benchmarks.timing import Comparison, Program, Round, Row, Schedule


@attrs.define
class Machine:
    """Runs programs that take a given time each, and notes what happened."""

    now: float = 0.0
    events: list[str] = attrs.field(factory=list)

    def program(self, name: str, seconds: float) -> Program:
        def step() -> None:
            self.now += seconds
            self.events.append(name)

        @contextmanager
        def scope() -> Iterator[None]:
            self.events.append(f"enter {name}")
            self.now += 1000
            try:
                yield
            finally:
                self.events.append(f"leave {name}")
                self.now += 1000

        return Program(step, scope)

    def schedule(self, **options: Any) -> Schedule:
        return Schedule(clock=lambda: self.now, **options)

    def blocks(self) -> list[str]:
        return [e.removeprefix("enter ") for e in self.events if e.startswith("enter")]


def row_of(ratio: float, noise: float, *, rounds: int = 25, bound: float | None = None) -> Row:
    """A row of made-up blocks: seconds of each run vary by `noise`, the same in all calls."""
    generator = np.random.default_rng(1)

    def block(seconds: float) -> list[float]:
        return list(seconds * np.exp(noise * generator.standard_normal(5)))

    made = [Round(block(1.0), block(ratio), block(1.0)) for _ in range(rounds)]
    return Row.of("subject", bound, made)


def test_subjects_and_baseline_take_turns() -> None:
    """Each subject stands between two blocks of the baseline, which neighbours share."""
    machine = Machine()
    vanilla, first, second = (machine.program(n, 1) for n in ("vanilla", "first", "second"))
    comparisons = [Comparison("1", first, vanilla), Comparison("2", second, vanilla)]
    timing.measure(comparisons, machine.schedule(rounds=2))
    around = ["vanilla", "first", "vanilla", "second"]
    assert machine.blocks() == [*around, *around, "vanilla"]


def test_time_is_that_of_the_runs() -> None:
    """Neither entering nor leaving a scope is timed, nor are the first runs in it."""
    machine = Machine()
    seconds = iter([50.0, 50.0, 1.0, 2.0, 3.0])

    def step() -> None:
        machine.now += next(seconds)

    slow_at_first = Program(step, machine.program("scope", 0).scope)
    schedule = machine.schedule(warm_up=2, seconds=5)
    assert timing.block(slow_at_first, schedule) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("took", "runs"), [(0.5, 4), (1.0, 1), (2.0, 1)])
def test_a_long_run_without_a_scope_needs_no_warm_up(took: float, runs: int) -> None:
    """Without a scope the first run is the block's if it takes as long as a block."""
    machine = Machine()
    step = machine.program("x", took).step
    found = timing.block(Program(step), machine.schedule(warm_up=2, seconds=1))
    assert len(machine.events) == runs
    assert sum(found) == max(took, 1)


@pytest.mark.parametrize(("seconds", "runs"), [(0.0, 1), (1.0, 1), (1.5, 2), (4.0, 4)])
def test_a_block_lasts_as_long_as_it_is_told_to(seconds: float, runs: int) -> None:
    """The step is repeated until the runs have taken the time, and once at least."""
    machine = Machine()
    assert timing.block(machine.program("x", 1), machine.schedule(seconds=seconds)) == [1.0] * runs


def test_the_ratio_is_found() -> None:
    """Without noise the ratio, its interval and its minimum are equal, and the control is 1."""
    machine = Machine()
    comparison = Comparison("x", machine.program("x", 1.5), machine.program("v", 0.25), bound=7)
    (row,) = timing.measure([comparison], machine.schedule(rounds=6))
    assert (row.median, row.minimum, row.rounds) == (6, 6, 6)
    assert (row.interval.low, row.interval.high) == (6, 6)
    assert (row.control.low, row.control.high, row.spread) == (1, 1, 0)
    assert row.milliseconds == 1500
    assert row.bound == 7


def test_a_machine_that_slows_down_does_not_change_the_ratio() -> None:
    """Drift cancels between the two baseline blocks; it shows in the control alone."""
    rounds = [Round([1.0 * 1.1**i], [2 * 1.1 ** (i + 0.5)], [1.1 ** (i + 1)]) for i in range(9)]
    row = Row.of("x", None, rounds)
    assert row.median == pytest.approx(2)
    assert row.spread == pytest.approx(0.1)


def test_one_slow_run_and_one_slow_block_do_not_change_the_ratio() -> None:
    """Blocks and rows are medians: an outlier counts neither among runs nor among blocks."""
    rounds = [Round([1.0] * 3, [2.0, 2.0, 90.0], [1.0] * 3) for _ in range(9)]
    rounds[4] = Round([1.0] * 3, [70.0] * 3, [1.0] * 3)
    assert Row.of("x", None, rounds).median == 2


def test_collections_happen_between_blocks() -> None:
    """The garbage collector is off within blocks, and afterwards as it was."""
    states = []

    @contextmanager
    def scope() -> Iterator[None]:
        states.append(gc.isenabled())
        yield

    program = Program(lambda: None, scope)
    comparison = Comparison("x", program, program)
    schedule = Schedule(rounds=2, seconds=0, warm_up=0)
    timing.measure([comparison], schedule)
    assert states == [False] * 5
    assert gc.isenabled()
    gc.disable()
    try:
        timing.measure([comparison], schedule)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failing_step_leaves_no_scope_open() -> None:
    """The error of a step is the caller's; its scope is left, and the collector is on again."""
    machine = Machine()

    def fail() -> None:
        raise ValueError("no")

    broken = Program(fail, machine.program("scope", 1).scope)
    with pytest.raises(ValueError, match="no"):
        timing.measure([Comparison("x", broken, broken)], machine.schedule())
    assert machine.events == ["enter scope", "leave scope"]
    assert gc.isenabled()


def test_an_interval_contains_the_true_median_as_often_as_it_says() -> None:
    """Of 200 made-up series, at least 180 give an interval with the true median in it."""
    generator = np.random.default_rng(2)
    series = np.exp(0.05 * generator.standard_normal((200, 25)))
    assert sum(1.0 in timing.interval(list(ratios)) for ratios in series) >= 180


@pytest.mark.parametrize(
    ("ratio", "noise", "bound", "conclusion"),
    [
        (1.55, 0.02, None, "slower"),
        (0.55, 0.02, None, "faster"),
        (1.55, 0.02, 1.75, "within the bound"),
        (1.55, 0.02, 1.4, "above the bound"),
        (1.001, 0.001, 1.1, "within the bound"),
        (0.9, 0.01, 1.1, "within the bound"),
    ],
)
def test_a_clear_row_concludes(
    ratio: float, noise: float, bound: float | None, conclusion: str
) -> None:
    """Where the effect is larger than control and interval, the row says which way it goes."""
    row = row_of(ratio, noise, bound=bound)
    assert (row.conclusion, row.doubt) == (conclusion, "")


@pytest.mark.parametrize(
    ("ratio", "noise", "bound", "reason"),
    [
        (1.005, 0.2, None, "the baseline differs from itself by"),
        (1.0, 0.01, None, "the baseline differs from itself by"),
        (1.01, 0.2, 1.015, "the baseline differs from itself by"),
        (1.55, 0.2, 1.56, "the baseline differs from itself by"),
    ],
)
def test_a_row_refuses_to_conclude(
    ratio: float, noise: float, bound: float | None, reason: str
) -> None:
    """Where the baseline differs from itself by more than the effect, the row says that."""
    row = row_of(ratio, noise, bound=bound)
    assert row.spread > 0
    assert row.conclusion.startswith("NOTHING CAN BE CONCLUDED: ")
    assert row.doubt.startswith(reason)
    assert row.doubt.endswith(f"{row.spread:.1%}")
