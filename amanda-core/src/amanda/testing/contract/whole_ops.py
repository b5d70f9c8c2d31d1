"""Contract rule 8: backward actions of a forward analysis act on the whole operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ONES, ContractTests, W, X, inserting, product, times
from amanda.testing.framework import requires


@requires(Capability.BACKWARD)
class WholeOpTests(ContractTests):
    """insert_before_backward_op and insert_after_backward_op in a forward analysis."""

    def test_gradients_of_the_outputs(self) -> None:
        """insert_before_backward_op gets the gradients of the operator's outputs, once."""
        assert self.received(self.linear(), "linear", "insert_before_backward_op") == [[ONES]]

    def test_gradients_of_the_inputs(self) -> None:
        """insert_after_backward_op gets the gradients of the operator's inputs, once."""
        program = self.linear()
        expected = program.train().gradients
        assert self.received(program, "linear", "insert_after_backward_op") == [expected]

    def test_inputs_without_gradient(self) -> None:
        """An input that is absent or has no gradient is None, so that positions do not shift."""
        program = self.fw.program(lambda w: self.fw.linear(self.fw.tensor(X), w), W)
        gradients = program.train().gradients
        seen = self.received(program, "linear", "insert_after_backward_op")
        assert seen == [[None, gradients[0], None][: len(self.linear_inputs())]]

    def test_changed_gradients_of_the_outputs(self) -> None:
        """The operator's backward gets the gradient that a routine returns for an output's."""
        double = inserting(before_backward_op=lambda g: self.fw.scale(g, 2.0))
        result = self.train(self.program, self.probe("mul", before=double), times=2)
        assert result.outputs == [product(X, W)]
        assert result.gradients == [times(W, 2.0), times(X, 2.0)]

    def test_changed_gradients_of_the_inputs(self) -> None:
        """The gradient that a routine returns for an input's flows on to that input."""
        double = inserting([1], after_backward_op=lambda g: self.fw.scale(g, 2.0))
        result = self.train(self.program, self.probe("mul", before=double), times=2)
        assert result.gradients == [W, times(X, 2.0)]

    def looking_around(self) -> Callable[[OpContext], None]:
        """An analysis that notes the gradients before and after an operator's backward."""
        note = self.noting()
        return inserting(before_backward_op=note, after_backward_op=note)

    def test_recorded_after_the_op(self) -> None:
        """Backward actions of an after-analysis act in the backward of that very execution."""
        self.train(self.program, self.probe("mul", after=self.looking_around()))
        assert self.noted == [[ONES], [W, X]]

    def test_inner_ops_of_a_model(self) -> None:
        """Whole-operator routines act on inner operators as on the first and the last."""
        tool = self.probe("relu", before=inserting(after_backward_op=self.noting()))
        program = self.fw.program(
            lambda x, w: self.fw.mul(self.fw.relu(self.fw.mul(x, w)), w), X, W
        )
        expected = program.train()
        assert self.train(program, tool) == expected
        positive = [
            [float(a * b > 0) for a, b in zip(p, q, strict=True)] for p, q in zip(X, W, strict=True)
        ]
        assert self.noted == [[product(positive, W)]]

    def test_around_backward_ops(self) -> None:
        """Whole-operator routines run before the first and after the last backward op of the
        operator, those of a backward op before and after that."""
        whole = inserting(
            before_backward_op=lambda *g: self.noted.append("first"),
            after_backward_op=lambda *g: self.noted.append("last"),
        )

        def single(context: OpContext) -> None:
            kind = self.fw.type_of(context.get_backward_op())
            if kind != self.fw.accumulation:
                name = context.get_backward_op_id()
                context.insert_before_backward_op(lambda *g: self.noted.append(f"before {name}"))
                context.insert_after_backward_op(lambda *g: self.noted.append(f"after {name}"))

        tool = self.probe("linear", before=whole, before_backward=single)
        self.train(self.linear(), tool)
        assert (self.noted[0], self.noted[-1]) == ("first", "last")
        before = [entry for entry in self.noted if entry.startswith("before ")]
        assert len(before) == len(self.fw.backward_types["linear"])
        assert len(self.noted) == 2 * len(before) + 2
        for entry in before:
            assert self.noted.index(entry) < self.noted.index(entry.replace("before", "after"))

    def test_they_see_what_routines_of_backward_ops_return(self) -> None:
        """Routines of backward ops get the gradients that a routine before the whole operator has
        returned; a routine after it gets the gradients that they have returned."""
        kind = self.fw.backward_types["relu"][0]

        whole = inserting(
            before_backward_op=lambda g: self.fw.scale(g, 2.0), after_backward_op=self.noting()
        )

        def single(context: OpContext) -> None:
            if self.fw.type_of(context.get_backward_op()) == kind:
                context.insert_before_backward_op(self.noting(), grad_outputs=[0])
                context.insert_after_backward_op(lambda g: self.fw.scale(g, 4.0))

        tool = self.probe("relu", before=whole, before_backward=single)
        self.train(self.fw.program(self.fw.relu, X), tool)
        positive = [[1.0, 0.0], [1.0, 1.0]]
        assert self.noted == [[times(ONES, 2.0)], [times(positive, 8.0)]]

    @requires(Capability.REPLACE_OP)
    def test_a_replacement_of_several_ops(self) -> None:
        """Whole-operator routines act on all operators of a replacement as on one: each runs once,
        with the gradients of the outputs or the summed gradients of the inputs."""

        def analyse(context: OpContext) -> None:
            context.replace_op(lambda x, w: self.fw.add(self.fw.mul(x, x), w))
            self.looking_around()(context)

        result = self.train(self.program, self.probe("mul", before=analyse), times=2)
        assert result.gradients == [times(X, 2.0), ONES]
        assert self.noted == [[ONES], [times(X, 2.0), ONES]] * 2

    @requires(Capability.REPLACE_OP)
    def test_changed_gradients_of_a_replacement_of_several_ops(self) -> None:
        """Gradients from whole-operator routines reach all operators of a replacement."""

        def analyse(context: OpContext) -> None:
            context.replace_op(lambda x, w: self.fw.add(self.fw.mul(x, x), w))
            context.insert_before_backward_op(lambda g: self.fw.scale(g, 2.0))
            context.insert_after_backward_op(lambda g: self.fw.scale(g, 4.0), grad_inputs=[0])

        result = self.train(self.program, self.probe("mul", before=analyse), times=2)
        assert result.gradients == [times(X, 16.0), times(ONES, 2.0)]

    def test_an_op_with_several_outputs(self) -> None:
        """Whole-operator routines get one gradient per output."""
        program = self.fw.program(self.fw.split, X)
        seen = self.received(program, "split", "insert_before_backward_op")
        assert seen == [[[ONES[0]], [ONES[1]]]]

    @requires(Capability.IN_PLACE)
    def test_an_in_place_op(self) -> None:
        """Whole-operator routines act on an in-place operator, which stays one."""

        def build(x: Any, w: Any) -> Any:
            target = self.fw.mul(x, w)
            self.fw.add_inplace(target, w)
            return self.fw.mul(target, w)

        program = self.fw.program(build, X, W)
        expected = program.train()
        tool = self.probe("add_inplace", before=self.looking_around())
        assert self.train(program, tool) == expected
        assert self.noted == [[W], [W, W]]

    @requires(Capability.SECOND_ORDER)
    def test_second_order(self) -> None:
        """Whole-operator routines do not change gradients of gradients."""
        program = self.fw.program(lambda x: self.fw.mul(self.fw.mul(x, x), x), X)
        same = inserting(before_backward_op=lambda *g: g, after_backward_op=lambda *g: g)
        with self.apply(self.probe("mul", before=same)):
            assert program.second_gradients() == [times(X, 6.0)]
