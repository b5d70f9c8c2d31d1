"""Contract rules 1 and 15: points derived from operators, and the phase of each operator."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.interface.points import Point, PointContext
from amanda.interface.specs import PHASES
from amanda.testing.contract.base import ContractTests, W, X, inserting
from amanda.testing.framework import FunctionalFramework, requires
from amanda.tool import Tool, cache_disabled, new_iteration


class Passed(Tool):
    """A tool that notes the derived points that the program passes; the points of modules on
    demand."""

    def __init__(self, modules: bool = False) -> None:
        super().__init__()
        self.points: list[PointContext] = []
        for end in (False, True):
            if modules:
                self.add_inst_for_module(self.points.append, exit=end)
            self.add_inst_for_iteration(self.points.append, end=end)
            for backward in (False, True):
                self.add_inst_for_pass(self.points.append, backward=backward, end=end)

    def of(self, *points: Point) -> list[PointContext]:
        """The contexts of some points, in order."""
        return [context for context in self.points if context.point in points]


class FailsOnce:
    """A routine that raises at its first call."""

    failed = False

    def __call__(self, _: PointContext) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("on purpose")


class PointTests(ContractTests):
    """The points of modules, passes and iterations."""

    @requires(Capability.BACKWARD)
    def test_points_change_nothing(self) -> None:
        """Results and gradients under routines at all derived points are those without them."""
        program = self.positive_product()
        expected = program.train()
        for modules in (False, True):
            assert self.train(program, Passed(modules), times=3) == expected

    @requires(Capability.BACKWARD)
    def test_a_backward_pass_begins_and_ends(self) -> None:
        """Each backward pass has a begin and an end, around the routines of its operators."""
        self.needs_separate_backward()
        tool, program = Passed(), self.positive_product()
        expected = program.train()
        seen: list[Any] = tool.points

        noting = inserting([], before_backward_op=lambda *_: seen.append(None))
        assert self.train(program, tool, self.probe("mul", before_backward=noting)) == expected
        kinds = [None if context is None else context.point for context in seen]
        begin, end = kinds.index(Point.BACKWARD_BEGIN), kinds.index(Point.BACKWARD_END)
        assert begin < kinds.index(None) < end
        assert kinds.count(Point.BACKWARD_BEGIN) == kinds.count(Point.BACKWARD_END) == 1

    @requires(Capability.MODULES)
    def test_operators_run_between_entry_and_exit_of_their_module(self) -> None:
        """Each operator of a module runs after its entry and before its exit, in every run."""
        tool = self.probe("linear", before=lambda c: c.insert_before_op(running(c)))

        def running(context: OpContext) -> Any:
            op_id = context.get_op_id()
            return lambda *tensors: self.noted.append(("op", op_id))

        def note(context: PointContext) -> None:
            self.noted.append((context.point.value, context.module))

        tool.add_inst_for_module(note)
        tool.add_inst_for_module(note, exit=True)
        self.run(self.fw.program(self.fw.model(W), X), tool, times=2)
        kind, separator, one_run = self.fw.types["linear"], self.fw.separator, []
        for name in ("first", "second"):
            ran = "op", f"Model{separator}{name}/{kind}:0"
            one_run += [("module_entry", name), ran, ("module_exit", name)]
        assert self.noted == 2 * [("module_entry", ""), *one_run, ("module_exit", "")]

    @requires(Capability.MODULES)
    def test_modules_are_left_where_an_operator_raises(self) -> None:
        """Each module that was entered is left, the innermost one first; there is no iteration."""
        tool, open_modules, ended = Tool(), list[str](), list[PointContext]()

        def fail(*tensors: Any) -> None:
            raise ValueError("on purpose")

        tool.add_inst_for_module(lambda context: open_modules.append(context.id))
        tool.add_inst_for_module(
            lambda context: (
                open_modules.remove(context.id)
                if open_modules[-1] == context.id
                else pytest.fail(f"{context.id} is left, {open_modules} are entered")
            ),
            exit=True,
        )
        tool.add_inst_for_iteration(ended.append, end=True)
        failing = self.probe("linear", before=inserting(before_op=fail))
        program = self.fw.program(self.fw.model(W), X)
        with self.apply(tool, failing):
            for _ in range(2):
                with pytest.raises(ValueError, match="on purpose"):
                    program.run()
                assert open_modules == []
        assert ended == []

    @requires(Capability.MODULES)
    @pytest.mark.parametrize("place", ["forward pass", "module"])
    def test_passes_are_told_after_one_that_a_routine_has_prevented(self, place: str) -> None:
        """After a routine has raised at the begin of a forward pass or a module, later passes are
        reported."""
        tool, failing, fail = Passed(), Tool(), FailsOnce()
        if place == "module":
            failing.add_inst_for_module(fail)
        else:
            failing.add_inst_for_pass(fail)
        program = self.fw.program(self.fw.model(W), X)
        with self.apply(tool, failing):
            with pytest.raises(ValueError, match="on purpose"):
                program.run()
            tool.points.clear()
            for _ in range(2):
                program.run()
        kinds = [c.point for c in tool.of(Point.FORWARD_BEGIN, Point.FORWARD_END)]
        assert kinds == [Point.FORWARD_BEGIN, Point.FORWARD_END] * 2

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("end", [False, True])
    def test_iterations_go_on_after_a_routine_at_a_backward_pass_has_raised(
        self, end: bool
    ) -> None:
        """Also those of other scopes."""
        self.needs_separate_backward()
        tool, failing, fail = Passed(), Tool(), FailsOnce()
        failing.add_inst_for_pass(fail, backward=True, end=end)
        with self.apply(failing), self.apply(tool):
            with pytest.raises(ValueError, match="on purpose"):
                self.program.train()
            tool.points.clear()
            for _ in range(2):
                self.program.train()
        assert len(tool.of(Point.ITERATION_END)) == 2

    @requires(Capability.MODULES)
    def test_iterations_are_numbered(self) -> None:
        """In inference each call of the outermost module is an iteration; their numbers ascend."""
        program, tool = self.fw.program(self.fw.model(W), X), Passed()
        with self.apply(tool):
            for _ in range(3):
                program.run()
        ends = tool.of(Point.ITERATION_END)
        assert [context.iteration for context in ends] == [0, 1, 2]
        for context in ends:
            assert context.begin is not None
            assert context.end is not None
            assert context.begin <= context.end

    @requires(Capability.MODULES)
    def test_points_of_modules_that_run_at_once(self) -> None:
        """The contexts of modules' points say whether operators run when they are called."""
        tool = Passed(modules=True)
        self.run(self.fw.program(self.fw.model(W), X), tool)
        said = {context.runs_at_once for context in tool.of(Point.MODULE_ENTRY, Point.MODULE_EXIT)}
        assert said == {Capability.STATIC_GRAPH not in self.driver_cls.capabilities}

    @requires(Capability.SECOND_ORDER)
    def test_gradients_of_gradients_are_one_iteration(self) -> None:
        """A backward pass whose gradients the program computes with ends no iteration."""
        self.needs_separate_backward()
        program, tool = self.fw.program(lambda x: self.fw.mul(self.fw.mul(x, x), x), X), Passed()
        with self.apply(tool):
            program.second_gradients()
        passes = [context.iteration for context in tool.of(Point.BACKWARD_BEGIN)]
        assert (len(passes), {*passes}, len(tool.of(Point.ITERATION_END))) == (2, {0}, 1)

    @requires(Capability.BACKWARD)
    def test_a_gradient_within_a_function_ends_no_iteration(self) -> None:
        """Operators behind a gradient that a differentiated function computes have ids of their
        own."""
        fw = self.fw
        if not isinstance(fw, FunctionalFramework):
            pytest.skip("the framework differentiates no functions")

        def function(x: Any) -> list[Any]:
            _, backward = fw.vjp(lambda y: [fw.mul(y, y)], [x])
            return [fw.mul(backward()[0], x)]

        ids: set[str] = set()

        def note(context: OpContext) -> None:
            ids.add(context.get_op_id())
            context.insert_before_op(lambda *_: self.noted.append(context.get_op_id()))

        self.train(fw.program(function, X), self.probe("mul", before=note))
        assert len(self.noted) == len(ids) == 2

    @requires(Capability.BACKWARD)
    def test_a_step_of_the_optimizer_ends_an_iteration(self) -> None:
        """Backward passes belong to one iteration until the framework's optimizer has stepped."""
        self.needs_separate_backward()
        step = self.fw.training_step()
        if step is None:
            pytest.skip("the framework has no optimizer that runs operators")
        program, tool = self.program, Passed()
        with self.apply(tool):
            for _ in range(3):
                program.train()
                step()
        passes = [context.iteration for context in tool.of(Point.BACKWARD_BEGIN)]
        # Before the first step it may not be known that there is an optimizer.
        assert passes[2:] == [1, 1, 2, 2]

    @requires(Capability.MODULES)
    def test_modules_are_entered_and_left_with_their_tensors(self) -> None:
        """The entry of a module has its inputs, its exit its outputs."""
        program, tool, seen = self.fw.program(self.fw.model(W), X), Tool(), list[Any]()
        tool.add_inst_for_module(lambda c: seen.append((c.module, self.lists(c.inputs))))
        tool.add_inst_for_module(
            lambda c: seen.append((c.module, self.lists(c.outputs or ()))), exit=True
        )
        outputs = self.run(program, tool)
        (_, given), (_, first), *_, (_, returned) = seen
        assert (given, first, returned) == ([X], [X], outputs)
        exits = dict(seen)
        assert exits["second"] == outputs
        assert len(exits["first"]) == 1

    def test_an_exception_of_a_point_reaches_the_user(self) -> None:
        """An exception of a routine at a point reaches the user and names the tool."""
        tool = Tool()

        def fail(point: PointContext) -> None:
            raise ValueError("on purpose")

        tool.add_inst_for_iteration(fail, end=True)
        with self.apply(tool), pytest.raises(ValueError, match="on purpose") as caught:
            new_iteration()
        assert any("Tool.fail" in note for note in caught.value.__notes__)

    def test_every_operator_has_a_phase(self) -> None:
        """A phase of the contract, in every analysis."""
        phases = self.answers(self.positive_product(), before=lambda c: c.get_phase())
        assert phases
        assert set(phases) <= set(PHASES)

    def test_an_id_has_one_phase(self) -> None:
        """An operator that runs in two phases outside of modules has an id in each."""
        step = self.fw.training_step()
        if step is None:
            pytest.skip("the framework has no optimizer that runs operators")
        found: dict[str, set[str]] = collections.defaultdict(set)
        tool = self.probe("mul", before=lambda c: found[c.get_phase()].add(c.get_op_id()))
        with cache_disabled(), self.apply(tool):
            for _ in range(3):
                step()
        assert found["forward"]
        assert found["optimizer"]
        assert not found["forward"] & found["optimizer"]

    @requires(Capability.MODULES)
    def test_operators_of_modules_are_of_the_forward_phase(self) -> None:
        """Operators that a module runs belong to the forward phase."""
        program = self.fw.program(self.fw.model(W), X)
        assert set(self.answers(program, "linear", before=lambda c: c.get_phase())) == {"forward"}

    @requires(Capability.BACKWARD)
    def test_backward_operators_are_of_the_backward_phase(self) -> None:
        """Backward operators are of the backward phase, whatever the phase of the forward one."""
        phases = self.answers(self.positive_product(), before_backward=lambda c: c.get_phase())
        assert set(phases) == {"backward"}
