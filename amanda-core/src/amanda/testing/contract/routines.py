"""Contract rule 5: return values of routines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amanda.errors import RoutineResultError
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.interface.tool import Tool
from amanda.testing.contract.base import ContractTests, W, X, inserting, product, times
from amanda.testing.framework import requires

Wrong = Callable[..., Any]
WRONG: dict[str, Wrong] = {
    "a string": lambda *t: "text",
    "a number": lambda *t: 1.5,
    "a dict": lambda *t: {"x": t[0]},
    "a sequence that is too long": lambda *t: [*t, t[0]],
    "an empty sequence": lambda *t: [],
    "a sequence of something else": lambda *t: ["x" for _ in t],
}


class RoutineTests(ContractTests):
    """Return values of routines that do not replace an op."""

    def before(self, routine: Callable[..., Any], **selection: Any) -> Any:
        """The output of ``X * W`` with a routine before it."""
        tool = self.probe("mul", before=lambda c: c.insert_before_op(routine, **selection))
        return self.run(self.program, tool)[0]

    def after(self, routine: Callable[..., Any]) -> Any:
        """The output of ``X * W`` with a routine after it."""
        tool = self.probe("mul", before=lambda c: c.insert_after_op(routine))
        return self.run(self.program, tool)[0]

    def test_a_substitute_is_told(self) -> None:
        """A tool that tracks tensors is notified of the substitute of an output."""

        class Follow(Tool):
            def __init__(self) -> None:
                super().__init__()
                self.told: list[tuple[Any, Any]] = []

            def note_substitute(self, output: Any, substitute: Any) -> None:
                self.told.append((output, substitute))

        tool, read = Follow(), list[Any]()
        reader = self.probe("relu", before=lambda c: read.append(c.get_inputs()[0]))
        self.run(self.positive_product(), tool, self.doubling(), reader)
        outputs = [old for old, new in tool.told if new is read[0]]
        assert outputs
        assert all(output is not read[0] for output in outputs)

    def test_a_tool_that_fails_where_it_is_told_is_named(self) -> None:
        """An exception in note_substitute() has a note with tool and operator."""

        class Follow(Tool):
            def note_substitute(self, output: Any, substitute: Any) -> None:
                raise ArithmeticError("a mistake")

        with pytest.raises(ArithmeticError, match="a mistake") as caught:
            self.run(self.fw.program(self.fw.mul, X, W), Follow(), self.doubling())
        notes = [n for n in caught.value.__notes__ if n.startswith("amanda: ")]
        assert len(notes) == 1
        assert notes[0].startswith("amanda: raised in Follow.note_substitute at op ")

    def doubling(self) -> Tool:
        """A tool that doubles the products."""
        return self.probe("mul", before=inserting(after_op=lambda t: self.fw.scale(t, 2.0)))

    @pytest.mark.parametrize("form", [list, tuple])
    def test_a_sequence_for_several(self, form: Callable[..., Any]) -> None:
        """A list or tuple of the selected length replaces the selected tensors."""
        result = self.before(lambda a, b: form([self.fw.scale(a, 2.0), self.fw.scale(b, 4.0)]))
        assert result == times(product(X, W), 8.0)

    def test_a_sequence_for_one(self) -> None:
        """A sequence of one replaces one tensor."""
        assert self.after(lambda t: [self.fw.scale(t, 2.0)]) == times(product(X, W), 2.0)

    def test_selected_positions_are_replaced(self) -> None:
        """Returned tensors go to the positions that were selected, in that order."""
        result = self.before(lambda w, x: [self.fw.scale(w, 0.0), None], inputs=[1, 0])
        assert result == times(X, 0.0)

    def test_keyword_arguments(self) -> None:
        """Further keyword arguments of the insertion reach the routine."""
        result = self.before(self.fw.scale, inputs=[0], factor=4.0)
        assert result == times(product(X, W), 4.0)

    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    def test_wrong_return_before(self, wrong: Wrong) -> None:
        """Anything else is an error naming tool, routine, op id, what was expected and got."""
        pattern = r"(?i)Probe\..* at op .*mul.* must return None or .*2.*inputs.*got"
        with pytest.raises(RoutineResultError, match=pattern):
            self.before(wrong)

    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    def test_wrong_return_after(self, wrong: Wrong) -> None:
        """A wrong return after an op is an error likewise."""
        pattern = r"(?i)Probe\..* at op .*mul.* must return None or one tensor.*outputs.*got"
        with pytest.raises(RoutineResultError, match=pattern):
            self.after(wrong)

    def test_one_tensor_for_several(self) -> None:
        """One tensor where several were selected is an error."""
        with pytest.raises(RoutineResultError, match=r"sequence of 2 tensors.*got"):
            self.before(lambda a, b: a)

    @pytest.mark.parametrize("method", ["insert_before_op", "insert_after_op"])
    def test_shape_mismatch(self, method: str) -> None:
        """A substitute of another shape is an error naming tool, routine, op id and shapes."""

        def shorter(*tensors: Any) -> list[Any]:
            return [self.fw.tensor([1.0, 2.0, 3.0]), *[None] * (len(tensors) - 1)]

        tool = self.probe("mul", before=lambda c: getattr(c, method)(shorter))
        with pytest.raises(RoutineResultError, match=r"(?is)Probe\.shorter.*mul.*2, 2.*3"):
            self.run(self.program, tool)

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("method", ["insert_before_backward_op", "insert_after_backward_op"])
    def test_wrong_return_of_a_backward_routine(self, method: str) -> None:
        """A wrong return around a backward op is an error likewise."""
        tool = self.probe("mul", before_backward=lambda c: getattr(c, method)(lambda *t: "text"))
        pattern = r"(?i)Probe\..* at op .*mul.* must return None or .*gra.*got str 'text'"
        with pytest.raises(RoutineResultError, match=pattern):
            self.train(self.program, tool)

    @requires(Capability.BACKWARD)
    def test_gradients_are_replaced(self) -> None:
        """A backward op consumes the gradients that a routine before it returns."""
        double = inserting([0], before_backward_op=lambda g: self.fw.scale(g, 2.0))
        tool = self.probe("relu", before_backward=double)
        program = self.fw.program(self.fw.relu, X)
        gradients = self.train(program, tool).gradients
        ids = self.answers(program, "relu", before_backward=lambda c: c.get_backward_op_id())
        assert gradients == [times([[1.0, 0.0], [1.0, 1.0]], 2.0 ** len(ids))]

    @requires(Capability.BACKWARD)
    def test_produced_gradients_are_replaced(self) -> None:
        """The gradients that a routine after a backward op returns replace the produced ones."""
        kind = self.fw.backward_types["mul"][0]

        def analyse(context: OpContext) -> None:
            if self.fw.type_of(context.get_backward_op()) == kind:
                context.insert_after_backward_op(lambda *g: [self.fw.scale(t, 2.0) for t in g])

        gradients = self.train(self.program, self.probe("mul", before_backward=analyse)).gradients
        assert times(W, 2.0) in gradients
