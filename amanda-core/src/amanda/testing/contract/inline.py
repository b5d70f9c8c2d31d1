"""Contract rule 14: routines that a driver may run without Python do what Python does."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from amanda.inline import (
    Check,
    Counter,
    Log,
    Mark,
    MemoryChange,
    MemoryUse,
    Ring,
    ShapeSum,
    Timer,
    resident_bytes,
)
from amanda.inline.ring import HEADER, RECORD
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ContractTests, W, X, inserting, nothing, product, times
from amanda.testing.framework import Program, requires
from amanda.tool import Tool, disabled

INFINITE = [[math.inf, -2.0], [3.0, 4.0]]


def _all_finite(values: Any) -> bool:
    return all(map(_all_finite, values)) if isinstance(values, list) else math.isfinite(values)


def records(ring: Ring) -> list[list[int]]:
    """The records of a ring, as they lie there."""
    numbers = ring.numbers.tolist()[len(HEADER) :]
    count = len(RECORD)
    return [numbers[at : at + count] for at in range(0, len(numbers), count)]


class InlineTests(ContractTests):
    """The routines of ``amanda.inline``."""

    def two_products(self) -> Program:
        """The program ``X * W * W``."""
        return self.fw.program(lambda x, w: self.fw.mul(self.fw.mul(x, w), w), X, W)

    def counted(self, program: Program, tool: Tool, counter: Counter, runs: int = 3) -> list[int]:
        """The count after each of some runs under a tool."""
        counts = []
        with self.apply(tool):
            for _ in range(runs):
                program.run()
                counts.append(counter.count)
        return counts

    @pytest.mark.parametrize("select", [None, []], ids=["all tensors", "no tensors"])
    @pytest.mark.parametrize("point", ["before", "after"])
    def test_a_counter_counts_executions(self, point: str, select: Any) -> None:
        """A counter counts each execution of its operator, and can be read between runs."""
        counter = Counter()
        tool = self.probe("mul", before=inserting(select, **{f"{point}_op": counter}))
        assert self.counted(self.program, tool, counter) == [1, 2, 3]

    def test_a_counter_of_several_operators(self) -> None:
        """A counter that is inserted at several operators, or twice, counts all of them; also the
        execution after which an analysis inserts it."""
        counter = Counter()
        tool = self.probe("mul", before=inserting([], before_op=counter, after_op=counter))
        assert self.counted(self.two_products(), tool, counter) == [4, 8, 12]
        tool = self.probe("mul", after=lambda c: c.insert_after_op(counter, outputs=[]))
        assert self.counted(self.program, tool, counter) == [13, 14, 15]

    def test_a_counter_outside_of_the_scope(self) -> None:
        """A counter counts nothing under disabled(), nor after the scope; once for each scope."""
        counter, program = Counter(), self.program
        tools = [self.probe("mul", before=inserting([], before_op=counter)) for _ in range(2)]
        with self.apply(tools[0]):
            program.run()
            with disabled():
                program.run()
            with self.apply(tools[1]):
                program.run()
        program.run()
        assert counter.count == 3

    def test_beside_a_routine(self) -> None:
        """Counters and timers work beside routines that change values, and the values stay
        theirs."""
        counter, timer = Counter(), Timer()

        def analyse(context: OpContext) -> None:
            context.insert_before_op(counter)
            self.timed(timer)(context)
            context.insert_after_op(lambda y: self.fw.scale(y, 2.0))
            context.insert_after_op(counter, outputs=[])

        result = self.run(self.program, self.probe("mul", before=analyse), times=2)
        assert result == [times(product(X, W), 2.0)]
        assert (counter.count, timer.executions) == (4, 2)

    def test_subclasses(self) -> None:
        """The code of a subclass of Counter, Check or ShapeSum runs at each execution."""
        seen: list[int] = []

        def note(self: Any, *tensors: Any) -> None:
            seen.append(len(tensors))

        check = type("Noting", (Check,), {"after": note})(self.is_finite, nothing)
        total = type("Noting", (ShapeSum,), {"after": note})(lambda of: 1)
        counter = type("Noting", (Counter,), {"__call__": note})()
        routines = check.after, total.after, counter

        def analyse(context: OpContext) -> None:
            for routine in routines:
                context.insert_after_op(routine)

        self.run(self.program, self.probe("mul", before=analyse), times=2)
        assert seen == [1] * 6

    @requires(Capability.REPLACE_OP)
    def test_a_counter_around_a_replacement(self) -> None:
        """A counter counts the executions of an operator that another tool replaces."""
        counter = Counter()

        def analyse(context: OpContext) -> None:
            context.insert_before_op(counter, inputs=[])
            context.replace_op(self.fw.add)

        result = self.run(self.program, self.probe("mul", before=analyse), times=2)
        assert (result, counter.count) == (self.fw.program(self.fw.add, X, W).run(), 2)

    @requires(Capability.BACKWARD)
    def test_counters_of_backward_operators(self) -> None:
        """Counters before and after backward operators count as Python routines do there."""
        before, after = (Counter(), list[int]()), (Counter(), list[int]())

        def analyse(context: OpContext) -> None:
            for routine in (before[0], lambda *t: before[1].append(1)):
                context.insert_before_backward_op(routine, grad_outputs=[])
            for routine in (after[0], lambda *t: after[1].append(1)):
                context.insert_after_backward_op(routine)

        program = self.positive_product()
        expected = program.train()
        assert self.train(program, self.probe(before_backward=analyse), times=2) == expected
        for counter, calls in (before, after):
            assert counter.count == len(calls) > 0

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside a routine"])
    def test_counters_of_the_whole_operator(self, is_alone: bool) -> None:
        """Counters on the gradients of an operator as a whole count each backward pass."""
        counter = Counter()
        counting = inserting([], before_backward_op=counter, after_backward_op=counter)

        def analyse(context: OpContext) -> None:
            counting(context)
            if not is_alone:
                context.insert_before_backward_op(nothing)

        expected = self.program.train()
        assert self.train(self.program, self.probe("mul", before=analyse), times=2) == expected
        assert counter.count == 4

    # -- timers ---------------------------------------------------------------

    def timed(self, timer: Timer) -> Any:
        """An analysis that has a timer measure its operator."""
        return inserting([], before_op=timer.start, after_op=timer.stop)

    def test_a_timer_measures_executions(self) -> None:
        """A timer counts executions and adds up their times, which lie within those of the runs."""
        timer, program, found = Timer(), self.program, []
        began = time.perf_counter_ns()
        with self.apply(self.probe("mul", before=self.timed(timer))):
            for _ in range(3):
                program.run()
                found.append(timer.executions)
        assert found == [1, 2, 3]
        assert 0 < timer.nanoseconds < time.perf_counter_ns() - began

    def test_a_timer_writes_into_its_log(self) -> None:
        """A log has number, start, end and thread of each execution, in the order of their ends;
        `look` is called at the first end that is due."""
        looks: list[int] = []

        class Noting(Log):
            def look(self, now: int) -> None:
                looks.append(now)
                self.due = None

        log = Noting(due=0)
        timers: list[Timer] = []

        def analyse(context: OpContext) -> None:
            timers.append(Timer(log, len(timers)))
            self.timed(timers[-1])(context)

        self.run(self.two_products(), self.probe("mul", before=analyse), times=2)
        rows = [log.numbers[at : at + 4] for at in range(0, len(log.numbers), 4)]
        assert len(rows) == 4
        assert {row[0] for row in rows} == set(range(len(timers)))
        assert all(start <= end for _, start, end, _ in rows)
        assert [row[2] for row in rows] == sorted(row[2] for row in rows)
        assert all(isinstance(row[3], int) for row in rows)
        assert looks == [rows[0][2]]
        assert sum(t.nanoseconds for t in timers) == sum(row[2] - row[1] for row in rows)

    def test_a_timer_that_is_started_twice(self) -> None:
        """Each start of a timer is ended by one stop, also where a second start comes before it."""
        timer = Timer()

        def analyse(context: OpContext) -> None:
            self.timed(timer)(context)
            self.timed(timer)(context)

        self.run(self.program, self.probe("mul", before=analyse), times=3)
        assert timer.executions == 6

    @requires(Capability.BACKWARD)
    def test_alone_in_training(self) -> None:
        """A counter alone counts each execution of backward operators, a timer measures it."""
        counter, timer = Counter(), Timer()
        called = self.train_beside_routine(inserting([], after_backward_op=counter))
        assert counter.count == called > 0
        timing = inserting([], before_backward_op=timer.start, after_backward_op=timer.stop)
        assert self.train_beside_routine(timing) == timer.executions == called

    def train_beside_routine(self, analyse: Callable[[OpContext], None]) -> int:
        """Train twice under an analysis of backward operators, and twice under a Python routine
        after each of them; how often that was called."""
        calls: list[int] = []
        program = self.positive_product()
        expected = program.train()
        for one in (analyse, inserting([], after_backward_op=lambda *t: calls.append(1))):
            assert self.train(program, self.probe(before_backward=one), times=2) == expected
        return len(calls)

    # -- marks ----------------------------------------------------------------

    def test_a_mark_notes_begin_and_end(self) -> None:
        """A ring has a record of each execution, in order, with its operator and its end."""
        ring = Ring(3, itertools.count(10, 10).__next__)

        def analyse(context: OpContext) -> None:
            mark = Mark(ring, ring.name({"id": context.get_op_id()}))
            inserting([], before_op=mark.before, after_op=mark.after)(context)

        began = time.perf_counter_ns()
        self.run(self.two_products(), self.probe("mul", before=analyse), times=2)
        assert ring.begun == 4
        rows = [dict(zip(RECORD, row, strict=True)) for row in records(ring)]
        assert [rows[i % 3]["index"] for i in (2, 3, 4)] == [2, 3, 4]
        for row in rows:
            assert began <= row["begin"] <= row["end"] <= time.perf_counter_ns()
            assert row["number"] in range(len(ring.names))
            assert row["memory"] > 0

    @requires(Capability.BACKWARD)
    def test_marks_of_backward_operators(self) -> None:
        """Marks around backward operators note each execution."""
        ring = Ring(100, int)
        mark = Mark(ring, ring.name({}))
        marking = inserting([], before_backward_op=mark.before, after_backward_op=mark.after)
        assert self.train_beside_routine(marking) == ring.begun > 0
        assert all(row[5] for row in records(ring) if row[0])

    # -- changes of memory ----------------------------------------------------

    def test_a_change_of_memory_is_read_before_and_after(self) -> None:
        """Each execution reads the memory twice, before and after its operator; also where a timer
        lies between."""
        use, timer = MemoryUse(itertools.count(10, 10).__next__), Timer()
        change, program = MemoryChange(use), self.program

        def analyse(context: OpContext) -> None:
            context.insert_before_op(change.before, inputs=[])
            self.timed(timer)(context)
            context.insert_after_op(change.after, outputs=[])

        with self.apply(self.probe("mul", before=analyse)):
            for _ in range(3):
                program.run()
                self.noted.append((change.bytes, use.peak))
        assert self.noted == [(10, 20), (20, 40), (30, 60)]
        assert timer.executions == 3

    def test_the_memory_that_is_read_may_be_set(self) -> None:
        """From then on the other memory is read: that of the process where it is None."""
        use = MemoryUse(itertools.count(10, 10).__next__)
        change, program, found = MemoryChange(use), self.program, []
        reading = inserting([], before_op=change.before, after_op=change.after)
        with self.apply(self.probe("mul", before=reading)):
            for used in (use.used, None, itertools.count(0, -7).__next__):
                use.used, use.peak, change.bytes = used, 0, 0
                for _ in range(2):
                    program.run()
                found.append((change.bytes, use.peak))
        first, second, third = found
        assert (first, third) == ((20, 40), (-14, 0))
        assert (second[1] > 0) is (resident_bytes() > 0)

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("of_process", [False, True], ids=["a device's", "the process's"])
    def test_a_change_of_memory_of_backward_operators(self, of_process: bool) -> None:
        """A change around a backward operator reads the memory before and after each execution."""

        def analyse(context: OpContext) -> None:
            # One for each operator: graphs may run several at the same time.
            used = None if of_process else itertools.count(10, 10).__next__
            change = MemoryChange(MemoryUse(used))
            self.noted.append(change)
            inserting([], before_backward_op=change.before, after_backward_op=change.after)(context)

        called = self.train_beside_routine(analyse)
        peak = sum(change.use.peak for change in self.noted)
        if of_process:
            assert (peak > 0) is (resident_bytes() > 0)
        else:
            total = sum(change.bytes for change in self.noted)
            assert (total, peak) == (10 * called, 20 * called)

    # -- checks ---------------------------------------------------------------

    def is_finite(self, tensor: Any) -> bool:
        """True if all numbers of a tensor are finite."""
        return _all_finite(self.fw.to_list(tensor))

    def checked(self, check: Check) -> Any:
        """An analysis that has a check look at its operator."""
        return inserting(before_op=check.before, after_op=check.after)

    @pytest.mark.parametrize("overwrites", [False, True, None])
    def test_a_check_finds_what_is_not_finite(self, overwrites: bool | None) -> None:
        """A check calls its function where an output is not finite, with inputs and outputs, and
        tells whether inputs that may be overwritten were finite; each execution is in its trail."""
        trail: deque[str] = deque()

        def note(inputs: Any, outputs: Any, was_finite: bool) -> None:
            given = [t for t in inputs if t is not None]
            lists = [self.fw.to_list(t) for t in (*given, *outputs)]
            self.noted.append((*lists, was_finite))

        check = Check(self.is_finite, note, overwrites=overwrites, trail=trail, name="here")
        finite, infinite = self.program, self.fw.program(self.fw.mul, INFINITE, W)
        with self.apply(self.probe("mul", before=self.checked(check))):
            for program in (finite, infinite, finite, infinite):
                program.run()
        assert self.noted == [(INFINITE, W, product(INFINITE, W), overwrites is not True)] * 2
        assert list(trail) == ["here"] * 4
        assert check.overwrites is (overwrites is True)

    def test_a_check_beside_a_routine(self) -> None:
        """A check looks at what routines before it have made, and the values stay theirs."""
        check = Check(self.is_finite, lambda *_: self.noted.append(len(self.noted)))

        def analyse(context: OpContext) -> None:
            context.insert_after_op(lambda y: self.fw.scale(y, 2.0))
            self.checked(check)(context)

        tool = self.probe("mul", before=analyse)
        assert self.run(self.program, tool, times=2) == [times(product(X, W), 2.0)]
        assert self.noted == []
        with self.apply(self.probe("mul", before=self.checked(check))):
            self.fw.program(self.fw.mul, INFINITE, W).run()
        assert self.noted == [0]

    def test_a_check_whose_function_raises(self) -> None:
        """An exception of a check's function reaches the program, and the next execution is checked
        again."""

        def fail(*_: Any) -> None:
            raise ValueError("not finite")

        check = Check(self.is_finite, fail)
        program = self.fw.program(self.fw.mul, INFINITE, W)
        with self.apply(self.probe("mul", before=self.checked(check))):
            for _ in range(3):
                with pytest.raises(Exception, match="not finite"):
                    program.run()
        assert program.run() == [product(INFINITE, W)]

    @requires(Capability.BACKWARD)
    def test_a_check_of_backward_operators(self) -> None:
        """A check around a backward operator finds what a routine after it finds there."""
        seen: list[Any] = []

        def analyse(context: OpContext) -> None:
            check = Check(self.is_finite, lambda *given: self.noted.append(given), overwrites=None)
            inserting(before_backward_op=check.before, after_backward_op=check.after)(context)

        def look(*gradients: Any) -> None:
            given = [t for t in gradients if t is not None]
            if not all(map(self.is_finite, given)):
                seen.append(given)

        program = self.fw.program(lambda x, w: self.fw.relu(self.fw.mul(x, w)), INFINITE, W)
        for one in (inserting(after_backward_op=look), analyse):
            self.train(program, self.probe(before_backward=one), times=3)
        assert len(self.noted) == len(seen) > 0
        for inputs, outputs, _ in self.noted:
            assert not all(self.is_finite(t) for t in outputs if t is not None)
            assert any(t is not None for t in inputs)

    # -- sums -----------------------------------------------------------------

    def added(self, total: ShapeSum, outputs: Any = None) -> Any:
        """An analysis that has a sum add up the executions of its operator."""

        def analyse(context: OpContext) -> None:
            context.insert_before_op(total.before)
            context.insert_after_op(total.after, outputs=outputs)

        return analyse

    @pytest.mark.parametrize("outputs", [None, []], ids=["all outputs", "no outputs"])
    def test_a_sum_of_shapes(self, outputs: Any) -> None:
        """A sum adds up the numbers of all executions by the shapes of their tensors, and knows
        those of the last one; one whose number is not known is counted as that."""

        def weigh(of: tuple[Any, Any]) -> int | None:
            shapes = [tuple(shape) for shape in (*of[0], *of[1]) if shape is not None]
            self.noted.append(shapes)
            return None if (3, 2) in shapes else sum(map(math.prod, shapes))

        counter = Counter()
        total = ShapeSum(weigh, counter)
        program, row = self.program, self.fw.program(self.fw.mul, X[:1], W[:1])
        tall = self.fw.program(self.fw.mul, [*X, X[0]], [*W, W[0]])
        with self.apply(self.probe("mul", before=self.added(total, outputs))):
            for one in (program, program, row, program, tall, row, tall, row):
                one.run()
        count = 3 if outputs is None else 2
        assert (total.executions, total.unknown) == (8, 2)
        assert total.amount == counter.count == count * (3 * 4 + 3 * 2)
        assert [tuple(shape) for shape in total.last[0]] == [(1, 2), (1, 2)]
        assert [(1, 2)] * count in self.noted

    @requires(Capability.BACKWARD)
    def test_a_sum_of_backward_operators(self) -> None:
        """Sums around backward operators add up what routines see there, and may depend on the
        last shapes of a forward operator, too."""
        forward = ShapeSum(lambda of: 1)
        seen: list[int] = []

        def analyse(context: OpContext) -> None:
            def weigh(of: tuple[Any, Any]) -> int:
                # A graph may run its gradients before it.
                rows = int(forward.last[0][0][0]) if forward.last[0] else len(X)
                return 100 * sum(shape is not None for shape in of[1]) + rows

            total = ShapeSum(weigh, of=forward)
            self.noted.append(total)
            inserting(before_backward_op=total.before, after_backward_op=total.after)(context)
            context.insert_after_backward_op(
                lambda *gradients: seen.append(sum(t is not None for t in gradients))
            )

        tool = self.probe("mul", before=self.added(forward), before_backward=analyse)
        expected = self.program.train()
        with self.apply(tool):
            for _ in range(4):
                assert self.program.train() == expected
        assert sum(one.executions for one in self.noted) == len(seen) > 0
        assert sum(one.amount for one in self.noted) == 100 * sum(seen) + len(X) * len(seen)
