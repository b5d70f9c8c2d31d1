"""Contract rule 8: backward ops and their contexts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from amanda.errors import ContextExpiredError, SelectionError, TensorReleased
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ONES, ContractTests, W, X, inserting, nothing, times
from amanda.testing.framework import Program, requires
from amanda.tool import cache_disabled


@requires(Capability.BACKWARD)
class BackwardOpTests(ContractTests):
    """The set of backward ops, their owners, and the content of their contexts."""

    def types_of(self, program: Program, op: str) -> list[str]:
        """Types of the backward ops of all ops of one type."""
        return self.answers(
            program, op, before_backward=lambda c: self.fw.type_of(c.get_backward_op())
        )

    @pytest.mark.parametrize("op", ["mul", "relu", "linear"])
    def test_all_backward_ops(self, op: str) -> None:
        """Every op that the framework runs for a forward op's gradient is a backward op of it."""
        values = {"mul": [X, W], "relu": [X], "linear": self.linear_inputs()}[op]
        seen = self.types_of(self.fw.program(getattr(self.fw, op), *values), op)
        accumulations = [self.fw.accumulation] * len(values) if self.fw.accumulation else []
        assert sorted(seen) == sorted([*self.fw.backward_types[op], *accumulations])

    def test_backward_ops_of_substituted_tensors(self) -> None:
        """An op has the same backward ops where a routine substitutes its tensors."""

        def double(tensor: Any) -> Any:
            return self.fw.scale(tensor, 2.0)

        expected = self.types_of(self.program, "mul")
        doubling = self.probe("mul", before=inserting([0], before_op=double, after_op=double))
        with self.apply(doubling):
            seen = self.types_of(self.program, "mul")
        assert sorted(seen) == sorted(expected)

    def test_backward_ops_are_no_forward_ops(self) -> None:
        """No op that runs in a backward pass is taken for a forward op."""
        program = self.fw.program(
            lambda x, w, *b: self.fw.relu(self.fw.mul(self.fw.linear(x, w, *b), x)),
            *self.linear_inputs(),
        )
        assert self.forward_ids(program.train) == self.forward_ids(program.run)

    @requires(Capability.SECOND_ORDER)
    def test_backward_ops_of_gradients(self) -> None:
        """No op of a backward pass that is itself differentiated is taken for a forward op."""
        program = self.fw.program(lambda x: self.fw.mul(self.fw.mul(x, x), x), X)
        assert self.forward_ids(program.second_gradients) == self.forward_ids(program.run)

        # They are backward ops, with ids of their own, or counted.
        ids: set[str | None] = set()
        tool = self.probe(before_backward=lambda c: ids.add(c.get_backward_op_id()))
        self.train(program, tool)
        count = len(ids)
        with self.apply(tool) as scope:
            program.second_gradients()
        assert len(ids) > count or scope.statistics.not_seen

    @requires(Capability.USER_OPS)
    def test_backward_ops_of_the_user_are_no_forward_ops(self) -> None:
        """The operators that the gradient of a user's operator calls are not forward ops."""
        _, function = self.fw.user_op()
        program = self.fw.program(function, X)
        assert self.forward_ids(program.train) == self.forward_ids(program.run)

    def forward_ids(self, run: Callable[[], Any]) -> set[str]:
        """The ids of the forward ops in a run, of types that the adapter names.

        (An adapter may use others for its own work, such as a tensor of ones.)
        """
        fw = self.fw
        types = {
            *fw.types.values(),
            *(kind for kinds in fw.backward_types.values() for kind in kinds),
        }
        seen: set[str] = set()

        def note(context: OpContext) -> None:
            if fw.type_of(context.get_op()) in types:
                seen.add(context.get_op_id())

        with self.apply(self.probe(before=note)):
            run()
        return seen

    def test_owner_of_an_accumulation(self) -> None:
        """The accumulation of a leaf's gradient belongs to the first op that consumed the leaf."""
        if not self.fw.accumulation:
            pytest.skip("the framework has no op that accumulates gradients")
        program = self.fw.program(lambda x: self.fw.mul(self.fw.relu(x), x), X)
        assert self.types_of(program, "relu").count(self.fw.accumulation) == 1
        assert self.fw.accumulation not in self.types_of(program, "mul")

    def test_point_without_tensors(self) -> None:
        """At a point without tensors the routine is called with none."""
        if not self.fw.accumulation:
            pytest.skip("the framework has no op that accumulates gradients")

        def analyse(context: OpContext) -> None:
            if self.fw.type_of(context.get_backward_op()) == self.fw.accumulation:
                context.insert_after_backward_op(lambda *t: self.noted.append(len(t)))
                with pytest.raises(SelectionError, match="nose"):
                    context.insert_after_backward_op(nothing, grad_inputs=["nose"])

        self.train(self.fw.program(self.fw.relu, X), self.probe("relu", before_backward=analyse))
        assert self.noted == [0]

    def test_backward_ids(self) -> None:
        """The id of a backward op is unique and stays the same from run to run."""
        tool = self.probe(
            "linear", before_backward=lambda c: self.noted.append(str(c.get_backward_op_id()))
        )
        program = self.linear()
        with self.apply(tool), cache_disabled():
            program.train()
            program.train()
        half = len(self.noted) // 2
        assert half > 0
        assert sorted(self.noted[:half]) == sorted(self.noted[half:])
        assert len(set(self.noted)) == half

    def test_backward_context(self) -> None:
        """A backward context shows the backward op and its forward op."""

        def look(context: OpContext) -> Any:
            assert context.is_backward()
            assert not context.is_forward()
            assert context.get_backward_op_id() != context.get_op_id()
            return note(context)

        def note(context: OpContext) -> Any:
            kind = self.fw.type_of(context.get_op())
            return context.get_op_id(), kind, context.get_attrs()

        program = self.fw.program(self.fw.split, X)
        forward, backward, *_ = self.answers(program, "split", before=note, before_backward=look)
        assert backward == forward
        assert forward[1] == self.fw.types["split"]

    def test_gradients_in_a_backward_context(self) -> None:
        """Gradients consumed are there before the backward op, gradients produced after it."""

        def look(context: OpContext) -> Any:
            produced = context.get_grad_inputs()
            return len(context.get_grad_outputs() or ()), produced is not None

        program = self.fw.program(self.fw.relu, X)
        seen = self.answers(program, "relu", before_backward=look, after_backward=look)
        consumed = self.fw.relu_consumes
        assert seen[:2] == [(consumed, False), (consumed, True)]

    def test_forward_tensors_still_held(self) -> None:
        """A backward analysis reads the forward tensors that the user or autograd still holds."""
        self.needs_concrete_tensors()
        seen = self.answers(
            self.program, "mul", before_backward=lambda c: self.lists(c.get_inputs())
        )
        assert seen[0] == [X, W]

    def test_forward_outputs_still_held(self) -> None:
        """A backward analysis reads the forward outputs that the user or autograd still holds."""
        program = self.fw.program(self.fw.relu, X)
        seen = self.answers(program, "relu", before_backward=self.outputs_of)
        # Symbolic tensors have no values.
        symbolic = Capability.STATIC_GRAPH in self.driver_cls.capabilities
        assert seen[0] == ([None] if symbolic else [[[1.0, 0.0], [3.0, 4.0]]])

    @pytest.mark.parametrize("acted_on", [False, True], ids=["", "with routines on gradients"])
    def test_several_forward_outputs_still_held(self, acted_on: bool) -> None:
        """A backward analysis reads all forward outputs of an op that has several, also where
        routines act on their gradients."""
        self.needs_separate_backward()
        identity = inserting(before_backward_op=nothing, after_backward_op=nothing)
        tool = self.probe(
            "split",
            before=identity if acted_on else nothing,
            before_backward=lambda c: self.noted.append(self.outputs_of(c)),
        )
        self.train(self.fw.program(self.fw.split, X), tool)
        assert self.noted[0] == [[X[0]], [X[1]]]

    def outputs_of(self, context: OpContext) -> list[Any]:
        """The values of an operator's outputs."""
        outputs = context.get_outputs()
        assert outputs is not None
        return self.lists(outputs)

    def test_value_in_a_backward_context(self) -> None:
        """get_value gives a parameter's value in a backward context too."""
        seen = self.answers(self.weighted(), "mul", before_backward=self.values)
        assert seen[0] == [None, W]

    def test_released_tensor(self) -> None:
        """A forward tensor that is gone raises when that position is read, naming the way out."""
        self.needs_separate_backward()

        def look(context: OpContext) -> None:
            inputs = context.get_inputs()
            self.noted.append(self.lists(inputs[1:]))
            pattern = rf"(?i)input 0 of op .*{op}.*insert_before_op"
            with pytest.raises(TensorReleased, match=pattern):
                inputs[0]

        def build(x: Any, w: Any) -> Any:
            # The one operator that consumes the product does not save it for its gradient.
            product = self.fw.mul(x, w)
            return self.fw.relu(product) if op == "relu" else self.fw.add(product, w)

        op = self.fw.forgetful
        program = self.fw.program(build, X, W)
        with self.apply(self.probe(op, before_backward=look)):
            backward = program.forward()
            gc.collect()
            backward()
        assert self.noted[0] == [W][: op == "add"]

    def test_backward_context_after_its_analysis(self) -> None:
        """After the analysis the tensors of a backward context are out of reach; the rest stays."""
        context = self.answers(self.program, "mul", before_backward=lambda c: c)[0]
        readers = (
            context.get_inputs,
            context.get_outputs,
            context.get_grad_outputs,
            context.get_grad_inputs,
            lambda: context.get_value(0),
            lambda: context.insert_before_backward_op(nothing),
        )
        for read in readers:
            with pytest.raises(ContextExpiredError, match="analysis"):
                read()
        assert self.fw.type_of(context.get_backward_op()) in self.fw.backward_types["mul"]
        assert context.get_backward_op_id()

    def test_forward_outside_of_the_scope(self) -> None:
        """Backward ops whose forward op ran outside of the scope run vanilla, and are counted."""
        self.needs_separate_backward()
        expected = self.program.train().gradients
        backward = self.program.forward()
        with self.apply(self.probe(before_backward=lambda c: self.noted.append("seen"))) as scope:
            gradients = backward()
        assert gradients == expected
        assert self.noted == []
        assert sum(scope.statistics.not_seen.values()) > 0

    def test_backward_runs_twice(self) -> None:
        """Each forward run has its own backward, also when two are under way at once."""
        self.needs_separate_backward()
        tool = self.probe(
            "mul", before=inserting(before_backward_op=lambda g: self.noted.append(1))
        )
        with self.apply(tool):
            first, second = self.program.forward(), self.program.forward()
            assert second() == first() == [W, X]
        assert len(self.noted) == 2

    def test_gradients_are_summed(self) -> None:
        """A routine before a backward op sees the sum of the gradients of several uses."""

        def build(x: Any) -> Any:
            y = self.fw.relu(x)
            return self.fw.add(y, y)

        seen = self.received(self.fw.program(build, X), "relu", "insert_before_backward_op")
        assert seen == [[times(ONES, 2.0)]]
