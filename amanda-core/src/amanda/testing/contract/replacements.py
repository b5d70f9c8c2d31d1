"""Contract rule 6: replacing an op, and its backward ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from amanda.errors import ReplacementConflictError, RoutineResultError
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ONES, ContractTests, W, X, inserting, product, times
from amanda.testing.framework import Trained, requires
from amanda.tool import Tool, new_iteration

WRONG_GRADIENTS: dict[str, Callable[..., Any]] = {
    "a string": lambda g: "text",
    "None": lambda g: None,
    "too many": lambda g: [g, g, g],
    "a sequence of something else": lambda g: [g, "text"],
}


class One(Tool):
    """A tool that calls a method of the context for each op of one type."""

    def __init__(self, is_meant: Callable[[OpContext], bool], method: str, **kind: bool) -> None:
        super().__init__()
        self._is_meant = is_meant
        self._method = method
        self.add_inst_for_op(self.analyse, **kind)

    def analyse(self, context: OpContext) -> None:
        """Record the replacement."""
        if self._is_meant(context):
            getattr(context, self._method)(_first)


class Two(One):
    """Another tool of the same kind."""


def _first(*tensors: Any) -> Any:
    return tensors[0]


class ReplacementTests(ContractTests):
    """replace_op and replace_backward_op."""

    def replaced(self, func: Callable[..., Any], **arguments: Any) -> Trained:
        """A run of ``X * W`` with the product replaced: of training, if the driver sees that."""
        tool = self.probe("mul", before=lambda c: c.replace_op(func, **arguments))
        if Capability.BACKWARD not in self.driver_cls.capabilities:
            return Trained(list(self.run(self.program, tool, times=2)), [])
        result: Trained = self.train(self.program, tool, times=2)
        return result

    def is_mul(self, context: OpContext) -> bool:
        """True if the context belongs to a product."""
        return self.fw.type_of(context.get_op()) == self.fw.types["mul"]

    @requires(Capability.REPLACE_OP)
    def test_replace_op(self) -> None:
        """replace_op runs the function instead of the op."""

        def double(x: Any, w: Any) -> Any:
            self.noted.append(1)
            return self.fw.scale(x, 2.0)

        tool = self.probe("mul", before=lambda c: c.replace_op(double))
        assert self.run(self.program, tool, times=3) == [times(X, 2.0)]
        assert len(self.noted) == 3

    @requires(Capability.REPLACE_OP)
    def test_result_of_a_replacement(self) -> None:
        """The operators after a replaced op get the tensor that the function returns."""
        program = self.fw.program(lambda x, w: self.fw.mul(self.fw.relu(x), w), X, W)

        def check(function: Callable[..., Any]) -> None:
            tool = self.probe("relu", before=lambda c: c.replace_op(function))
            assert self.run(program, tool, times=2) == [times(product(X, W), 2.0)]

        check(lambda x: self.fw.scale(x, 2.0))
        check(lambda x: [self.fw.scale(x, 2.0)])

    @requires(Capability.REPLACE_OP)
    def test_replace_op_with_selection(self) -> None:
        """replace_op passes the selected inputs and the keyword arguments."""

        def scaled(w: Any, factor: float) -> Any:
            return self.fw.scale(w, factor)

        assert self.replaced(scaled, inputs=[1], factor=4.0).outputs == [times(W, 4.0)]

    @requires(Capability.BACKWARD, Capability.REPLACE_OP)
    def test_replacement_takes_part_in_ad(self) -> None:
        """The function takes part in AD: it is the op now."""
        result = self.replaced(lambda x, w: self.fw.add(self.fw.mul(x, x), w))
        assert result.gradients == [times(X, 2.0), ONES]

    @requires(Capability.BACKWARD, Capability.REPLACE_OP)
    def test_identity_removes_the_op(self) -> None:
        """Replacing an op by the identity removes it and passes the gradient through."""
        tool = self.probe("relu", before=lambda c: c.replace_op(lambda t: t))
        result = self.train(self.fw.program(self.fw.relu, X), tool, times=2)
        assert result == Trained([X], [ONES])

    @requires(Capability.REPLACE_OP)
    def test_replace_an_op_of_several_outputs(self) -> None:
        """A function that replaces an op of several outputs returns as many."""
        given = self.data_input("split")
        tool = self.probe(
            "split",
            before=lambda c: c.replace_op(
                lambda t: [self.fw.scale(s, 2.0) for s in self.fw.split(t)], inputs=[given]
            ),
        )
        result = self.run(self.fw.program(self.fw.split, X), tool)
        assert result == [times([X[0]], 2.0), times([X[1]], 2.0)]

    @requires(Capability.REPLACE_OP)
    def test_routines_around_a_replacement(self) -> None:
        """Routines before and after an op act on its replacement as on the op."""

        def double(tensor: Any) -> Any:
            return self.fw.scale(tensor, 2.0)

        def analyse(context: OpContext) -> None:
            inserting([0], before_op=double, after_op=double)(context)
            context.replace_op(lambda x, w: self.fw.add(x, x))

        assert self.run(self.program, self.probe("mul", before=analyse)) == [times(X, 8.0)]

    @requires(Capability.REPLAY)
    def test_an_op_can_be_run_again(self) -> None:
        """get_function() gives a function that runs the op on other tensors."""
        program = self.fw.program(self.fw.split, X)
        (function,) = self.answers(program, "split", before=lambda c: c.get_function())
        outputs = function(*self.fw.inputs("split", self.fw.tensor(W)))
        assert self.lists(outputs) == [[W[0]], [W[1]]]

    @requires(Capability.REPLACE_OP, Capability.REPLAY)
    def test_function_has_the_attributes_of_its_execution(self) -> None:
        """A replacement by get_function() runs the op with the attributes of the execution that
        it replaces, also in executions after the first one."""
        tool = self.probe("split", before=lambda c: c.replace_op(c.get_function()))
        rows = [[float(number)] for number in range(6)]
        with self.apply(tool):
            for sections in (2, 3, 6):
                program = self.fw.program(lambda x, n=sections: self.fw.split(x, n), rows)
                self.noted.append(len(program.run()))
                new_iteration()
        assert self.noted == [2, 3, 6]

    @requires(Capability.REPLACE_OP)
    def test_wrong_return_of_a_replacement(self) -> None:
        """A function that replaces a tensor's op and returns none is an error naming both."""
        with pytest.raises(RoutineResultError, match=r"(?i)Probe\..*op .*mul.*got"):
            self.replaced(lambda x, w: None)

    @requires(Capability.REPLACE_OP)
    def test_two_replacements(self) -> None:
        """Two tools that replace one op: an error naming both."""
        self.check_conflict(self.run, "replace_op")

    @requires(Capability.REPLACE_BACKWARD_OP)
    def test_two_replacements_of_a_whole_backward(self) -> None:
        """Two tools that replace the gradient of one op: an error naming both."""
        self.check_conflict(self.train, "replace_backward_op")

    @requires(Capability.BACKWARD, Capability.REPLACE_BACKWARD_OP)
    def test_two_replacements_of_a_backward_op(self) -> None:
        """Two tools that replace one backward op: an error naming both."""
        self.check_conflict(self.train, "replace_backward_op", backward=True)

    def check_conflict(self, act: Callable[..., Any], method: str, **kind: bool) -> None:
        """Two tools that replace what a context belongs to are refused, in one scope or nested."""
        for nested in (False, True):
            one, two = (cls(self.is_mul, method, **kind) for cls in (One, Two))
            outer = self.apply(one) if nested else contextlib.nullcontext()
            pattern = r"(?i)mul.* twice.*One\._first.*Two\._first"
            with outer, pytest.raises(ReplacementConflictError, match=pattern):
                act(self.program, *([two] if nested else [one, two]))

    @requires(Capability.BACKWARD, Capability.REPLACE_BACKWARD_OP)
    def test_replace_a_backward_op(self) -> None:
        """From a backward analysis, replace_backward_op supplies the op's produced gradients."""
        kind = self.fw.backward_types["relu"][0]

        def analyse(context: OpContext) -> None:
            if self.fw.type_of(context.get_backward_op()) == kind:
                context.replace_backward_op(lambda g: self.fw.scale(g, 4.0), grad_outputs=[0])

        tool = self.probe("relu", before_backward=analyse)
        result = self.train(self.fw.program(self.fw.relu, X), tool, times=2)
        assert result.gradients == [times(ONES, 4.0)]

    @requires(Capability.REPLACE_BACKWARD_OP)
    def test_replace_the_whole_backward(self) -> None:
        """From a forward analysis, replace_backward_op supplies the op's whole VJP."""

        def gradients(grad: Any) -> list[Any]:
            return [self.fw.scale(grad, 2.0), self.fw.scale(grad, 4.0)]

        tool = self.probe("mul", before=lambda c: c.replace_backward_op(gradients))
        result = self.train(self.program, tool, times=2)
        assert result == Trained([product(X, W)], [times(ONES, 2.0), times(ONES, 4.0)])

    @requires(Capability.REPLACE_BACKWARD_OP)
    @pytest.mark.parametrize("supply", [lambda g: [g, None], lambda g: g], ids=["None", "fewer"])
    def test_whole_backward_without_all_gradients(self, supply: Callable[..., Any]) -> None:
        """An input whose supplied gradient is None, or that is after the last one, is left without
        a gradient."""
        tool = self.probe("mul", before=lambda c: c.replace_backward_op(supply))
        result = self.train(self.program, tool)
        assert result.gradients[0] == ONES
        assert result.gradients[1] in (None, times(W, 0.0))

    @requires(Capability.REPLACE_BACKWARD_OP)
    @pytest.mark.parametrize("wrong", WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
    def test_wrong_return_of_a_whole_backward(self, wrong: Callable[..., Any]) -> None:
        """A supplied gradient of the wrong form is an error naming tool, routine and op."""
        tool = self.probe("mul", before=lambda c: c.replace_backward_op(wrong))
        with pytest.raises(RoutineResultError, match=r"(?i)Probe\..*mul.*2 inputs.*got "):
            self.train(self.program, tool)

    @requires(Capability.REPLACE_OP, Capability.REPLACE_BACKWARD_OP)
    def test_replace_op_and_its_backward(self) -> None:
        """A replaced op has the gradient that replace_backward_op supplies, if there is one."""

        def analyse(context: OpContext) -> None:
            context.replace_op(self.fw.add)
            context.replace_backward_op(lambda g: [self.fw.scale(g, 4.0), None])

        result = self.train(self.program, self.probe("mul", before=analyse))
        assert result.gradients[0] == times(ONES, 4.0)
