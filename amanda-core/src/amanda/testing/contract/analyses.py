"""Contract rules 1 to 3: the points, when analyses run, when routines run."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import pytest

from amanda.errors import PassedPointError, SelectionError
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ContractTests, W, X, inserting, nothing, product, times
from amanda.testing.framework import requires
from amanda.tool import cache_disabled, cache_enabled, disabled, new_iteration


class AnalysisTests(ContractTests):
    """Where and how often analyses and routines run."""

    @requires(Capability.BACKWARD)
    def test_points_of_a_backward_op(self) -> None:
        """An analysis with backward=True runs before or after each backward op."""
        seen = self.answers(
            self.program,
            "mul",
            before_backward=lambda c: ("before", c.get_backward_op_id()),
            after_backward=lambda c: ("after", c.get_backward_op_id()),
        )
        assert seen
        ids = {op_id for _, op_id in seen}
        assert all(
            [point for point, other in seen if other == op_id] == ["before", "after"]
            for op_id in ids
        )

    def test_analyses_see_inputs_and_outputs(self) -> None:
        """An analysis before a forward op sees the inputs, and None for the outputs; one after it,
        with require_outputs, sees both."""

        def look(context: OpContext) -> Any:
            outputs = context.get_outputs()
            return len(context.get_inputs()), None if outputs is None else len(outputs)

        seen = self.answers(self.program, "mul", before=look, after=look)
        assert seen == [(2, None), (2, 1)]

    def test_analysis_sees_values(self) -> None:
        """Where ops run at once, an analysis sees the tensors of the execution."""
        self.needs_concrete_tensors()

        def look(context: OpContext) -> Any:
            return self.lists([*context.get_inputs(), *(context.get_outputs() or ())])

        seen = self.answers(self.program, "mul", after=look)
        assert seen == [[X, W, product(X, W)]]

    def test_value_of_a_parameter(self) -> None:
        """get_value gives the value of an input that is a parameter, None for a computed one."""
        seen = self.answers(self.weighted(), "mul", before=self.values)
        assert seen == [[None, W]]

    def test_a_constant_is_no_parameter(self) -> None:
        """get_value gives None for a tensor that is no parameter, also if nothing computes it."""
        self.needs_concrete_tensors()
        constant = self.fw.tensor(W)
        program = self.fw.program(lambda x: self.fw.mul(self.fw.relu(x), constant), X)
        assert self.answers(program, "mul", before=self.values) == [[None, None]]

    def test_each_operator_has_its_own_attributes(self) -> None:
        """Two operators of one type that are called with other arguments have other attributes."""
        if not self.fw.attributes:
            pytest.skip("the framework's split has no other arguments")

        def build(x: Any) -> Any:
            rows = self.fw.cat([x, x])
            return [*self.fw.split(rows, 4), *self.fw.split(rows, 2)]

        first, second = self.answers(
            self.fw.program(build, X), "split", before=lambda c: c.get_attrs()
        )
        assert first != second

    def test_operators_of_other_types_are_seen_or_counted(self) -> None:
        """What a driver does not see, such as compiled code, is in ``statistics.not_seen``."""
        tool = self.probe(before=lambda c: self.fw.type_of(c.get_op()))
        for kind, build in self.fw.further_ops().items():
            with self.apply(tool) as scope:
                self.fw.program(build, X).run()
            assert kind in tool.seen or scope.statistics.not_seen, kind

    def test_value_out_of_range(self) -> None:
        """get_value of an input that does not exist is an error that names the op."""
        with pytest.raises(SelectionError, match=r"(?i)7.*mul.*2 inputs"):
            self.answers(self.program, "mul", before=lambda c: c.get_value(7))

    # -- contract rule 2 ------------------------------------------------------

    def test_once_per_op(self) -> None:
        """An analysis runs once per op id, however often the op is executed; the next scope
        analyses again."""
        tool = self.probe("mul", before=lambda c: c.get_op_id())
        for scopes in 1, 2:
            with self.apply(tool):
                for _ in range(3):
                    new_iteration()
                    self.program.run()
            assert len(tool.seen) == scopes
        assert len(set(tool.seen)) == 1

    @requires(Capability.BACKWARD)
    def test_once_per_backward_op(self) -> None:
        """An analysis of backward ops runs once per backward op id."""
        ask = methodcaller("get_backward_op_id")
        seen = self.answers(self.program, "mul", times=3, before_backward=ask)
        assert seen
        assert len(seen) == len(set(seen))

    def test_cache_disabled(self) -> None:
        """Under cache_disabled an analysis runs at every execution, and cache_enabled ends that."""
        tool = self.probe("mul", before=lambda c: c.get_op_id())
        with self.apply(tool), cache_disabled():
            for _ in range(3):
                new_iteration()
                self.program.run()
            uncached = len(tool.seen)
            with cache_enabled():
                for _ in range(3):
                    new_iteration()
                    self.program.run()
        assert uncached == 3
        assert len(tool.seen) == 3

    def test_cache_disabled_drops_earlier_actions(self) -> None:
        """Without the cache, an execution runs the actions of its own analysis, once."""
        with self.apply(self.counting()), cache_disabled():
            for expected in (1, 2, 3):
                new_iteration()
                self.program.run()
                assert len(self.noted) == expected

    @requires(Capability.BACKWARD)
    def test_cache_disabled_backward(self) -> None:
        """Under cache_disabled the analyses of backward ops run at every execution too."""
        calls: list[int] = []

        def analyse(context: OpContext) -> None:
            self.noted.append(context.get_backward_op_id() or "")
            context.insert_before_backward_op(lambda *t: calls.append(1))

        with self.apply(self.probe("mul", before_backward=analyse)), cache_disabled():
            self.program.train()
            once = len(self.noted)
            self.program.train()
        assert once > 0
        assert len(self.noted) == len(calls) == 2 * once

    def test_op_met_later(self) -> None:
        """An op that first runs later in the scope is analysed then."""
        tool = self.probe(before=lambda c: self.fw.type_of(c.get_op()))
        first, later = self.program, self.fw.program(self.fw.relu, X)
        with self.apply(tool):
            first.run()
            first.run()
            assert self.fw.types["relu"] not in tool.seen
            later.run()
        assert tool.seen.count(self.fw.types["relu"]) == 1

    def test_reanalyse(self) -> None:
        """Tool.reanalyse drops the tool's actions and lets its analyses run again, once."""
        calls: list[int] = []

        def analyse(context: OpContext) -> None:
            self.noted.append(context.get_op_id())
            context.insert_before_op(lambda *t, run: calls.append(run), run=len(self.noted))

        tool = self.probe("mul", before=analyse)
        with self.apply(tool):
            for again in (False, False, True, False):
                if again:
                    tool.reanalyse()
                new_iteration()
                self.program.run()
        assert len(self.noted) == 2
        assert calls == [1, 1, 2, 2]

    def test_reanalyse_while_the_op_runs(self) -> None:
        """An execution that has begun keeps its actions; the next one is analysed again."""
        calls: list[int] = []

        def analyse(context: OpContext) -> None:
            self.noted.append(op_id := context.get_op_id())
            context.insert_before_op(lambda *t: tool.reanalyse(op_id))
            context.insert_after_op(lambda *t, run: calls.append(run), run=len(self.noted))

        tool = self.probe("mul", before=analyse)
        with self.apply(tool):
            for _ in range(2):
                new_iteration()
                self.program.run()
        assert calls == [1, 2]

    def test_reanalyse_one_op(self) -> None:
        """Tool.reanalyse of an op id leaves the other ops alone."""
        tool = self.probe(before=lambda c: c.get_op_id())
        program = self.positive_product()
        with self.apply(tool):
            program.run()
            met = list(tool.seen)
            tool.reanalyse(met[0])
            new_iteration()
            program.run()
        assert tool.seen == [*met, met[0]]

    @requires(Capability.BACKWARD)
    def test_reanalyse_backward(self) -> None:
        """Tool.reanalyse covers backward ops."""
        tool = self.probe("mul", before_backward=lambda c: c.get_backward_op_id())
        with self.apply(tool):
            self.program.train()
            met = len(tool.seen)
            tool.reanalyse()
            self.program.train()
            self.program.train()
        assert met > 0
        assert len(tool.seen) == 2 * met

    # -- contract rule 3 ------------------------------------------------------

    def test_forward_routines_run_every_time(self) -> None:
        """Routines around a forward op run at each execution, the first included."""
        analyse = inserting(
            before_op=lambda *t: self.noted.append("before"),
            after_op=lambda *t: self.noted.append("after"),
        )
        self.run(self.program, self.probe("mul", before=analyse), times=3)
        assert self.noted == ["before", "after"] * 3

    def test_routine_of_an_after_analysis_runs_the_first_time(self) -> None:
        """A routine that an after-analysis records runs in that very execution."""
        tool = self.probe("mul", after=inserting(after_op=lambda *t: self.noted.append(1)))
        self.run(self.program, tool, times=3)
        assert len(self.noted) == 3

    @requires(Capability.BACKWARD)
    def test_backward_routines_run_every_time(self) -> None:
        """Routines around a backward op run at each execution, the first included."""
        calls: dict[str, list[str]] = {}

        def analyse(context: OpContext) -> None:
            mine = calls.setdefault(context.get_backward_op_id() or "", [])
            context.insert_before_backward_op(lambda *t: mine.append("before"))
            context.insert_after_backward_op(lambda *t: mine.append("after"))

        self.train(self.program, self.probe("mul", before_backward=analyse), times=3)
        assert calls
        assert all(mine == ["before", "after"] * 3 for mine in calls.values())

    def test_routines_see_run_time_values(self) -> None:
        """A routine gets the values of its own execution."""
        look = self.noting()
        with self.apply(self.probe("mul", before=inserting(before_op=look, after_op=look))):
            self.program.run()
            new_iteration()
            self.fw.program(self.fw.mul, times(X, 2.0), W).run()
        twice = times(X, 2.0)
        assert self.noted == [[X, W], [product(X, W)], [twice, W], [product(twice, W)]]

    @pytest.mark.parametrize("method", ["insert_before_op", "replace_op"])
    def test_forward_action_too_late(self, method: str) -> None:
        """The error for an after-analysis that acts before the op names require_outputs=False."""
        tool = self.probe("mul", after=lambda c: getattr(c, method)(nothing))
        with pytest.raises(PassedPointError, match=rf"(?i){method}.*mul.*require_outputs=False"):
            self.run(self.program, tool)

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize(
        ("point", "method", "hint"),
        [
            *(
                ("before_backward", method, "backward=False")
                for method in ("insert_before_op", "insert_after_op", "replace_op")
            ),
            ("after_backward", "insert_before_backward_op", "require_outputs=False"),
            ("after_backward", "replace_backward_op", "require_outputs=False"),
        ],
    )
    def test_action_in_backward_too_late(self, point: str, method: str, hint: str) -> None:
        """A backward analysis that acts on the forward op, or before a backward op that has run, is
        an error that names the right argument."""
        tool = self.probe("mul", **{point: lambda c: getattr(c, method)(nothing)})
        with pytest.raises(PassedPointError, match=rf"(?i){method}.*mul.*{hint}"):
            self.train(self.program, tool)

    @requires(Capability.BACKWARD)
    def test_no_backward_routine_under_disabled(self) -> None:
        """Backward routines do not run in a backward that happens under disabled()."""
        self.needs_separate_backward()

        def note_whole(*gradients: Any) -> None:
            self.noted.append("whole op")

        whole = inserting(before_backward_op=note_whole, after_backward_op=note_whole)
        single = inserting(before_backward_op=lambda *t: self.noted.append("backward op"))
        program = self.linear()
        tool = self.probe("linear", before=whole, before_backward=single)
        with self.apply(tool):
            backward = program.forward()
            with disabled():
                backward()
            assert self.noted == []
            program.train()
        assert set(self.noted) == {"whole op", "backward op"}
