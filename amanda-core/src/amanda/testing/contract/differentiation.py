"""Contract rule 7: routines are isolated from automatic differentiation, unless told otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ONES, ContractTests, W, X, inserting, product, times
from amanda.testing.framework import FunctionalFramework, Probe, Trained, requires
from amanda.tool import Tool, ad_disabled, ad_enabled


class DifferentiableProbe(Probe):
    """A probe whose routines take part in AD."""

    differentiable = True


@requires(Capability.BACKWARD)
class DifferentiationTests(ContractTests):
    """Straight-through gradients, and ad_enabled."""

    def doubled_input(self) -> Probe:
        """A tool that doubles the first input of a product."""
        return self.probe("mul", before=self.double_input)

    def double_input(self, context: OpContext) -> None:
        """Record a routine that doubles the first input."""
        context.insert_before_op(lambda t: self.fw.scale(t, 2.0), inputs=[0])

    def test_straight_through_before(self) -> None:
        """The op computes and differentiates with a substituted input, whose own gradient
        passes to the original unchanged."""
        result = self.train(self.program, self.doubled_input(), times=2)
        assert result == Trained([product(times(X, 2.0), W)], [W, times(X, 2.0)])

    def test_straight_through_after(self) -> None:
        """The gradient of a substituted output passes to the original unchanged."""
        tool = self.probe("mul", before=inserting(after_op=lambda t: self.fw.scale(t, 4.0)))
        result = self.train(self.program, tool, times=2)
        assert result == Trained([times(product(X, W), 4.0)], [W, X])

    def test_straight_through_in_a_chain(self) -> None:
        """The gradient passes through the substitutions of several routines of one point."""
        result = self.train(self.program, self.doubled_input(), self.doubled_input())
        assert result == Trained([product(times(X, 4.0), W)], [W, times(X, 4.0)])

    def test_only_the_substituted_input_changes(self) -> None:
        """Another use of the original tensor is not affected by a substitution."""
        program = self.fw.program(lambda x, w: self.fw.add(self.fw.mul(x, w), x), X, W)
        result = self.train(program, self.doubled_input())
        expected = [
            [2 * a * b + a for a, b in zip(p, q, strict=True)] for p, q in zip(X, W, strict=True)
        ]
        assert result.outputs == [expected]
        assert result.gradients[0] == [[b + 1 for b in row] for row in W]

    @requires(Capability.SECOND_ORDER)
    def test_straight_through_at_each_level_of_differentiation(self) -> None:
        """In a differentiated function that reads a variable of the differentiated function around
        it, substituted tensors pass the gradients of both."""
        fw = self.fw
        if not isinstance(fw, FunctionalFramework):
            pytest.skip("the framework differentiates no functions")

        def outer(x: Any) -> list[Any]:
            products, backward = fw.vjp(lambda y: [fw.mul(x, y)], [fw.tensor(W)])
            return [*products, *backward()]

        def double(*tensors: Any) -> list[Any]:
            return [fw.scale(tensor, 2.0) for tensor in tensors]

        tool = self.probe("mul", before=inserting(before_op=double))
        program = fw.program(outer, X)
        plus_one = [[2.0 * w + 1.0 for w in row] for row in W]
        expected = Trained([times(product(X, W), 4.0), times(X, 2.0)], [plus_one])
        assert self.train(program, tool) == expected

    @requires(Capability.SECOND_ORDER)
    def test_straight_through_of_second_order(self) -> None:
        """The gradient passes straight through a substitution also in gradients of gradients."""
        program = self.fw.program(lambda x: self.fw.mul(x, x), X)
        with self.apply(self.doubled_input()):
            # d(2x * x)/dx = x + 2x, and each term's derivative is 1.
            assert program.train().gradients == [times(X, 3.0)]
            assert program.second_gradients() == [times(ONES, 2.0)]

    @requires(Capability.SECOND_ORDER)
    def test_second_order_without_substitution(self) -> None:
        """Gradients of gradients under a watching tool equal the vanilla framework's."""
        program = self.fw.program(lambda x: self.fw.mul(self.fw.mul(x, x), x), X)
        expected = program.second_gradients()
        tool = self.probe(before=lambda c: c.insert_before_op(lambda *t: t))
        with self.apply(tool):
            assert program.second_gradients() == expected == [times(X, 6.0)]

    def test_dead_gradients_stay_dead(self) -> None:
        """A substitution gives no gradient to a tensor that had none."""
        program = self.fw.program(lambda x: self.fw.mul(self.fw.tensor(W), x), X)
        result = self.train(program, self.doubled_input())
        assert result.gradients == [times(W, 2.0)]

    def test_another_dtype(self) -> None:
        """The gradient of a substitute of another dtype is cast back."""
        if self.fw.cast(self.fw.tensor(X)) is None:
            pytest.skip("the framework has only one dtype")
        tool = self.probe("mul", before=lambda c: c.insert_after_op(self.fw.cast))
        result = self.train(self.program, tool, times=2)
        assert result == Trained([product(X, W)], [W, X])

    @requires(Capability.AD_IN_ROUTINES)
    def test_ad_enabled(self) -> None:
        """A routine recorded under ad_enabled takes part in AD, and nothing is passed through."""

        def analyse(context: OpContext) -> None:
            with ad_enabled():
                self.double_input(context)

        self.check_differentiable(self.probe("mul", before=analyse))

    @requires(Capability.AD_IN_ROUTINES)
    def test_differentiable_tool(self) -> None:
        """The routines of a tool with differentiable = True take part in AD."""
        kind = self.fw.types["mul"]
        self.check_differentiable(DifferentiableProbe(self.fw, kind, before=self.double_input))

    @requires(Capability.AD_IN_ROUTINES)
    def test_ad_enabled_around_the_run(self) -> None:
        """ad_enabled counts while the action is recorded, wherever it was entered."""
        with ad_enabled():
            self.check_differentiable(self.doubled_input())

    def check_differentiable(self, tool: Tool) -> None:
        """The gradient goes through the computation of a routine that doubles the first input."""
        result = self.train(self.program, tool, times=2)
        assert result.gradients == [times(W, 2.0), times(X, 2.0)]

    def test_ad_disabled(self) -> None:
        """ad_disabled isolates again, also in a tool with differentiable = True."""

        def analyse(context: OpContext) -> None:
            with ad_disabled():
                self.double_input(context)

        tool = DifferentiableProbe(self.fw, self.fw.types["mul"], before=analyse)
        with ad_enabled():
            result = self.train(self.program, tool)
        assert result.gradients == [W, times(X, 2.0)]

    @requires(Capability.AD_IN_ROUTINES)
    def test_differentiable_routine_after(self) -> None:
        """A differentiable routine after the op scales the gradient as it scales the output."""

        def analyse(context: OpContext) -> None:
            with ad_enabled():
                context.insert_after_op(lambda t: self.fw.scale(t, 4.0))

        result = self.train(self.program, self.probe("mul", before=analyse), times=2)
        assert result.gradients == [times(W, 4.0), times(X, 4.0)]

    @requires(Capability.IN_PLACE)
    def test_substituted_input_of_an_in_place_op(self) -> None:
        """An in-place op with a substituted target still changes the user's tensor."""
        kept = self.fw.tensor(ONES)

        tool = self.probe("add_inplace", before=inserting([0], before_op=lambda t: kept))
        result = self.train(self.added_in_place(), tool)
        assert result.outputs == [[[1 + w for w in row] for row in W]]
        assert result.gradients[0] == W
        assert self.fw.to_list(kept) == ONES

    @requires(Capability.IN_PLACE)
    def test_substituted_output_of_an_in_place_op(self) -> None:
        """A substituted output of an in-place op is the new value of the user's tensor."""
        double = inserting(after_op=lambda t: self.fw.scale(t, 2.0))
        plain = self.added_in_place().train()
        result = self.train(self.added_in_place(), self.probe("add_inplace", before=double))
        assert result == Trained([times(plain.outputs[0], 2.0)], plain.gradients)
