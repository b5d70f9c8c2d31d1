"""Contract rules 12 and 14: exceptions of tools, traceable routines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.interface.tool import StopRun
from amanda.testing.contract.base import ContractTests, W, X, inserting, product, times
from amanda.testing.framework import requires
from amanda.tool import new_iteration, traceable


class Unlucky(Exception):
    """The exception that the tools of these tests raise."""


def unlucky(*tensors: Any) -> None:
    """A routine that fails."""
    raise Unlucky("as planned")


def stopping(*tensors: Any) -> None:
    """A routine that ends the program."""
    raise StopRun("as planned")


Analyse = Callable[[OpContext], Any]


class FailureTests(ContractTests):
    """Exceptions of tools reach the user unchanged."""

    def failure(self, **analyses: Analyse) -> BaseException:
        """The exception that reaches the user from a training run of ``X * W``."""
        program = self.program
        expected = program.train()
        with pytest.raises((Unlucky, StopRun), match="as planned") as caught:
            self.train(program, self.probe("mul", **analyses))
        assert program.train() == expected
        return caught.value

    def notes(self, error: BaseException, routine: str) -> list[str]:
        """The notes that name tool, routine and op id."""
        found = [n for n in getattr(error, "__notes__", []) if f"Probe.{routine}" in n]
        return [n for n in found if self.fw.types["mul"] in n]

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize(
        ("point", "method"),
        [
            *(
                ("before", f"{action}_op")
                for action in ("insert_before", "insert_after", "replace")
            ),
            # Around a backward op, and on the gradients of the whole operator.
            *itertools.product(
                ["before_backward", "before"],
                ["insert_before_backward_op", "insert_after_backward_op"],
            ),
        ],
    )
    @pytest.mark.parametrize(("routine", "kind"), [(unlucky, Unlucky), (stopping, StopRun)])
    def test_routine_fails(self, point: str, method: str, routine: Any, kind: type) -> None:
        """An exception in a routine reaches the user as itself, with one note that names tool,
        routine and op id; the framework is vanilla after it."""
        error = self.failure(**{point: lambda c: getattr(c, method)(routine)})
        assert type(error) is kind
        assert len(self.notes(error, routine.__name__)) == 1

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("point", ["before", "after", "before_backward", "after_backward"])
    @pytest.mark.parametrize(("analysis", "kind"), [(unlucky, Unlucky), (stopping, StopRun)])
    def test_analysis_fails(self, point: str, analysis: Any, kind: type) -> None:
        """An exception in an analysis reaches the user likewise."""
        error = self.failure(**{point: analysis})
        assert type(error) is kind
        assert len(self.notes(error, "")) == 1

    def test_analysis_fails_once(self) -> None:
        """An op whose analysis failed is analysed at its next execution."""
        attempts: list[int] = []

        def analyse(context: OpContext) -> None:
            attempts.append(1)
            context.insert_before_op(lambda *t: self.noted.append(1))
            if len(attempts) == 1:
                unlucky()

        with self.apply(self.probe("mul", before=analyse)):
            with pytest.raises(Unlucky):
                self.program.run()
            new_iteration()
            assert self.program.run() == [product(X, W)]
        assert len(attempts) == 2
        assert self.noted == [1]

    def test_op_fails_once(self) -> None:
        """An op that itself failed in its first execution is analysed to the end in its next."""
        self.needs_concrete_tensors()
        tool = self.probe(
            "linear",
            before=lambda c: self.noted.append("before"),
            after=lambda c: self.noted.append("after"),
        )
        wrong = self.fw.program(self.fw.linear, X, [[1.0], [2.0]])
        right = self.fw.program(self.fw.linear, X, W)
        with self.apply(tool):
            with pytest.raises(Exception):  # noqa: B017, PT011 - each framework has its own
                wrong.run()
            new_iteration()
            right.run()
        assert self.noted == ["before", "after"]

    @requires(Capability.BACKWARD)
    def test_routine_fails_in_the_middle(self) -> None:
        """After a failed run the scope goes on: ids and routines are as before."""
        failing = [True]

        def routine(*tensors: Any) -> None:
            if failing[0]:
                unlucky()
            self.noted.append(1)

        with self.apply(self.probe("mul", before=inserting(before_op=routine))):
            with pytest.raises(Unlucky):
                self.program.train()
            failing[0] = False
            new_iteration()
            assert self.program.train().gradients == [W, X]
        assert self.noted == [1]

    # -- contract rule 14 -----------------------------------------------------

    def test_traceable_routine(self) -> None:
        """A traceable routine has the same effect as one that runs at run time."""

        @traceable
        def double(tensor: Any) -> Any:
            return self.fw.add(tensor, tensor)

        tool = self.probe("mul", before=inserting(after_op=double))
        assert self.run(self.program, tool, times=2) == [times(product(X, W), 2.0)]
