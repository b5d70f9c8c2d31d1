"""Ratios of processor time between programs that take turns in one process.

Every benchmark of time compares through this module::

    vanilla = Program(step)
    watched = Program(step, lambda: amanda.apply(tool))
    for row in measure([Comparison("watched", watched, vanilla, bound=1.1)]):
        print(row.median, row.interval, row.spread, row.conclusion)

A round runs the baseline, a subject, the baseline, the next subject, the baseline, and so on: a
subject is compared with the geometric mean of the two baseline blocks around it, so that a machine
that becomes slower or faster meets both sides. The second of the two blocks divided by the first is
the control: the baseline against itself, in the same turns. A row concludes nothing that the
control, or the interval of the ratio, does not allow.

Processor time leaves out what other processes do in between; colder caches stay in it, and meet
both sides.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import numpy as np

Step = Callable[[], Any]
Clock = Callable[[], float]

CONFIDENCE = 0.95
"""Of the intervals."""

RESAMPLES = 4000
"""Samples that the bootstrap draws; with more, the third digit of an interval stays the same."""

SEED = 0
"""Of the bootstrap, so that the same timings give the same interval."""

FEWEST_ROUNDS = 6
"""With fewer, all ratios lie on one side of the true median in more than 5 % of all cases
(2 x 0.5 ** rounds), and no interval between them can have the confidence."""


@attrs.frozen(eq=False)
class Program:
    """A step, and the scope in which it runs.

    Attributes:
        step: is run repeatedly.
        scope: makes a context manager; a block enters it before the first run, and leaves it
            after the last one.
    """

    step: Step
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


@attrs.frozen
class Comparison:
    """A row to be measured: the time of one program as a ratio to that of another.

    Attributes:
        name: of the subject.
        bound: the ratio that the project wants to keep; None if there is none.
    """

    name: str
    subject: Program
    baseline: Program
    bound: float | None = None


@attrs.frozen
class Schedule:
    """How long is measured, and by which clock.

    Attributes:
        rounds: blocks of each subject.
        seconds: a block repeats its step until its timed runs have taken so long, once at least.
        warm_up: runs of a block that come first and are not timed: the goals are those of the
            tenth run of a scope and later ones. The first run analyses every operator, and what is
            learned of backward operators and of compiled functions takes some more.
            Where there is no scope they warm the caches, which a run of `seconds` does itself.
        clock: seconds; processor time of the whole process by default, which is right for
            work on the processor. Work on an accelerator needs a wall clock.
    """

    rounds: int = 25
    seconds: float = 0.06
    warm_up: int = 9
    clock: Clock = time.process_time


@attrs.frozen
class Interval:
    """A bootstrap interval of a median, with :data:`CONFIDENCE`."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3f}-{self.high:.3f}"


@attrs.frozen
class Round:
    """The seconds of each run in a block of the subject, and in the baseline's around it."""

    before: Sequence[float]
    subject: Sequence[float]
    after: Sequence[float]

    def ratio(self, figure: Callable[[Sequence[float]], float]) -> float:
        """Subject to baseline, by a figure of each block: its median or its minimum."""
        before, subject, after = map(figure, (self.before, self.subject, self.after))
        return float(subject / (before * after) ** 0.5)

    def control(self) -> float:
        """Baseline to baseline, by medians."""
        return statistics.median(self.after) / statistics.median(self.before)


@attrs.frozen
class Row:
    """One comparison, measured.

    Attributes:
        name, bound: of the comparison.
        rounds: how many ratios `median` is of.
        median, interval: of the ratios to the baseline, by the median run of each block.
        minimum: the median of the ratios by the fastest run of each block: a second opinion.
        control: the interval of the ratio of the baseline to itself.
        milliseconds: of a median run of the subject.
    """

    name: str
    bound: float | None
    rounds: int
    median: float
    interval: Interval
    minimum: float
    control: Interval
    milliseconds: float

    @classmethod
    def of(cls, name: str, bound: float | None, rounds: Sequence[Round]) -> Row:
        """Evaluate what was timed."""
        ratios = [r.ratio(statistics.median) for r in rounds]
        return cls(
            name=name,
            bound=bound,
            rounds=len(rounds),
            median=statistics.median(ratios),
            interval=interval(ratios),
            minimum=statistics.median(r.ratio(min) for r in rounds),
            control=interval([r.control() for r in rounds]),
            milliseconds=1000 * statistics.median(s for r in rounds for s in r.subject),
        )

    @property
    def spread(self) -> float:
        """By how much the baseline may differ from itself: 0.02 is 2 % in either direction."""
        return max(self.control.high, 1 / self.control.low, 1.0) - 1

    @property
    def widened(self) -> Interval:
        """The interval of the ratio, wider by the control's spread on both sides."""
        factor = 1 + self.spread
        return Interval(self.interval.low / factor, self.interval.high * factor)

    @property
    def doubt(self) -> str:
        """Why the row concludes nothing; empty if it does.

        With a bound the question is on which side of it the ratio is; otherwise whether the ratio
        differs from 1. Thus 1.00 is within a bound of 1.10 also if the baseline differs from
        itself by 2 %, although a difference of 0.5 % could not be seen.
        """
        if self.rounds < FEWEST_ROUNDS:
            return f"rounds: {self.rounds}, at least {FEWEST_ROUNDS} are needed"
        asked = 1.0 if self.bound is None else self.bound
        if asked not in self.widened:
            return ""
        effect = abs(self.median / asked - 1)
        if self.spread >= effect:
            return f"the baseline differs from itself by {self.spread:.1%}"
        return f"{asked:.3f} is within {self.widened}"

    @property
    def conclusion(self) -> str:
        """What the row shows, in words."""
        if self.doubt:
            return f"NOTHING CAN BE CONCLUDED: {self.doubt}"
        if self.bound is not None:
            return "within the bound" if self.median < self.bound else "above the bound"
        return "slower" if self.median > 1 else "faster"

    def data(self) -> dict[str, Any]:
        """The row as plain data, with what follows from it."""
        derived = {"spread": self.spread, "doubt": self.doubt, "conclusion": self.conclusion}
        return {**attrs.asdict(self), **derived}


def interval(ratios: Sequence[float]) -> Interval:
    """The bootstrap interval of the median of `ratios`: percentiles of the resampled medians."""
    generator = np.random.default_rng(SEED)
    samples = generator.choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(samples, axis=1), (tail, 1 - tail))
    return Interval(float(low), float(high))


def measure(comparisons: Sequence[Comparison], schedule: Schedule | None = None) -> list[Row]:
    """Measure all `comparisons` in turns.

    Neighbours with the same baseline (the same object) share the block between them.

    Returns:
        A row for each comparison, in their order.
    """
    schedule = schedule or Schedule()
    rounds: list[list[Round]] = [[] for _ in comparisons]
    with _collected_between_blocks():
        latest: tuple[Program, list[float]] | None = None
        for _ in range(schedule.rounds):
            for comparison, found in zip(comparisons, rounds, strict=True):
                if latest is None or latest[0] is not comparison.baseline:
                    latest = comparison.baseline, block(comparison.baseline, schedule)
                before = latest[1]
                subject = block(comparison.subject, schedule)
                latest = comparison.baseline, block(comparison.baseline, schedule)
                found.append(Round(before, subject, latest[1]))
    return [Row.of(c.name, c.bound, found) for c, found in zip(comparisons, rounds, strict=True)]


def block(program: Program, schedule: Schedule) -> list[float]:
    """The seconds of each of a block's timed runs; garbage is collected before the block."""
    gc.collect()
    seconds: list[float] = []
    with program.scope():
        for _ in range(schedule.warm_up):
            took = _timed(program.step, schedule.clock)
            if program.scope is nullcontext and took >= schedule.seconds > 0:
                return [took]
        while not seconds or sum(seconds) < schedule.seconds:
            seconds.append(_timed(program.step, schedule.clock))
    return seconds


def _timed(step: Step, clock: Clock) -> float:
    start = clock()
    step()
    return clock() - start


@contextmanager
def _collected_between_blocks() -> Iterator[None]:
    """Keep the collector out of blocks, and what exists already out of its collections.

    A collection of all that PyTorch and Transformers have made takes 0.2 to 0.5 seconds, several
    times as long as a block; frozen, it takes microseconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
