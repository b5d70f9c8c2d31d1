"""The base class of the contract tests: the fixture, and helpers to run programs under tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability, Driver
from amanda.testing import leftovers
from amanda.testing.framework import Framework, Probe, Program
from amanda.tool import Tool
from amanda.tool import apply as instrumented

X = [[1.0, -2.0], [3.0, 4.0]]
W = [[0.5, 1.0], [2.0, -1.0]]
B = [1.0, -1.0]
ONES = [[1.0, 1.0], [1.0, 1.0]]


def times(values: Any, factor: float) -> Any:
    """Nested lists with each number multiplied."""
    return [times(v, factor) for v in values] if isinstance(values, list) else values * factor


def product(left: Any, right: Any) -> Any:
    """The elementwise product of nested lists."""
    if isinstance(left, list):
        return [product(a, b) for a, b in zip(left, right, strict=True)]
    return left * right


def nothing(*tensors: Any) -> None:
    """A routine that changes nothing."""


def inserting(
    selection: Sequence[int] | None = None, /, **routines: Callable[..., Any]
) -> Callable[[OpContext], None]:
    """An analysis that inserts routines, each by the name of its method without ``insert_``.

    ``inserting([0], before_op=f)`` calls ``context.insert_before_op(f, [0])``.
    """

    def analyse(context: OpContext) -> None:
        for name, routine in routines.items():
            getattr(context, f"insert_{name}")(routine, selection)

    return analyse


class ContractTests:
    """Base of the contract's parts.

    Attributes:
        driver_cls: the driver under test.
        framework_cls: the adapter of its framework.
        fw: an instance of the adapter, made for each test.
        program: the program ``X * W``, made for each test.
        noted: what the routines and analyses of a test have noted.
    """

    driver_cls: ClassVar[type[Driver]]
    framework_cls: ClassVar[type[Framework]]
    fw: Framework
    program: Program
    noted: list[Any]

    @pytest.fixture(autouse=True)
    def _prepared(self, request: pytest.FixtureRequest) -> Iterator[None]:
        missing = [
            capability.name
            for capability in getattr(request.function, "requires", ())
            if capability not in self.driver_cls.capabilities
        ]
        if missing:
            pytest.skip(f"{self.driver_cls.name} lacks Capability.{', Capability.'.join(missing)}")
        self.fw, self.noted = self.framework_cls(), []
        self.program = self.multiplication()
        modes = self.fw.global_state()
        yield
        # They are ended, so that the tests after this one do not fail for them.
        left = leftovers.end()
        if (found := self.fw.global_state()) != modes:
            left.append(f"modes of the framework, which are {found!r} and were {modes!r}")
        if left:
            pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)

    # -- used by the tests ------------------------------------------------

    def apply(self, *tools: Tool) -> instrumented:
        """``amanda.apply`` with the driver under test and no other."""
        return instrumented(*tools, drivers=[self.driver_cls])

    def probe(self, op: str = "", **analyses: Callable[[OpContext], Any]) -> Probe:
        """A tool that analyses operators of one type (a name of the adapter); "" for all."""
        return Probe(self.fw, self.fw.types[op] if op else "", **analyses)

    def multiplication(self) -> Program:
        """The program ``X * W``."""
        return self.fw.program(self.fw.mul, X, W)

    def positive_product(self) -> Program:
        """The program ``relu(X * W)``."""
        return self.fw.program(lambda x, w: self.fw.relu(self.fw.mul(x, w)), X, W)

    def added_in_place(self) -> Program:
        """The program ``y = X * W; y += W``, for drivers with ``Capability.IN_PLACE``."""

        def build(x: Any, w: Any) -> Any:
            target = self.fw.mul(x, w)
            self.fw.add_inplace(target, w)
            return target

        return self.fw.program(build, X, W)

    def weighted(self) -> Program:
        """The program ``relu(x) * W`` of a parameter W, for the value X of `x`."""
        weight = self.parameter(W)
        return self.fw.program(lambda x: self.fw.mul(self.fw.relu(x), weight), X)

    def values(self, context: OpContext) -> list[Any]:
        """What ``get_value()`` gives for both inputs of a product, as lists."""
        return self.lists([context.get_value(0), context.get_value(1)])

    def linear(self) -> Program:
        """The program of the framework's linear operator with all its inputs."""
        return self.fw.program(self.fw.linear, *self.linear_inputs())

    def linear_inputs(self) -> list[Any]:
        """The values of all inputs of the framework's linear operator."""
        return [X, W, B][: len(self.fw.names["linear"])]

    def data_input(self, op: str) -> int:
        """The position at which ``cat`` or ``split`` has the first tensor that it is given."""
        given = object()
        return [tensor is given for tensor in self.fw.inputs(op, given)].index(True)

    def lists(self, tensors: Sequence[Any]) -> list[Any]:
        """The values of tensors; None for one that is absent."""
        return [None if tensor is None else self.fw.to_list(tensor) for tensor in tensors]

    def noting(self) -> Callable[..., None]:
        """A routine that notes the values of its tensors, as one list."""
        return lambda *tensors: self.noted.append(self.lists(tensors))

    def counting(self, mark: Any = 1) -> Probe:
        """A tool that notes `mark` at each execution of a product."""
        return self.probe("mul", before=inserting(before_op=lambda *t: self.noted.append(mark)))

    def answers(
        self,
        program: Program,
        op: str = "",
        *,
        times: int = 1,
        **questions: Callable[[OpContext], Any],
    ) -> list[Any]:
        """The results of functions of a context, in the order in which analyses called them.

        Args:
            program: it is trained if a function is for a backward point, else run.
            op: the type of the operators that are analysed; "" for all.
            times: the number of runs.
            questions: a function for each point, such as ``before=lambda c: c.get_op_id()``.
        """
        tool = self.probe(op, **questions)
        has_backward = any(point.endswith("backward") for point in questions)
        (self.train if has_backward else self.run)(program, tool, times=times)
        return tool.seen

    def received(self, program: Program, op: str, method: str, **selection: Any) -> list[Any]:
        """The values that a routine gets in each execution of an operator.

        Args:
            program: it is trained if the routine is for gradients, else run.
            op: the type of the operator.
            method: of the context, which inserts the routine in an analysis before the operator.
            selection: its arguments.
        """
        start, routine = len(self.noted), self.noting()
        act = self.train if "backward" in method else self.run
        act(program, self.probe(op, before=lambda c: getattr(c, method)(routine, **selection)))
        return self.noted[start:]

    def run(self, program: Program, *tools: Tool, times: int = 1) -> Sequence[Any]:
        """The outputs of the last of some runs under the tools."""
        with self.apply(*tools):
            results = [program.run() for _ in range(times)]
        return results[-1]

    def train(self, program: Program, *tools: Tool, times: int = 1) -> Any:
        """The last of some training runs under the tools."""
        with self.apply(*tools):
            results = [program.train() for _ in range(times)]
        return results[-1]

    def parameter(self, values: Any) -> Any:
        """A parameter; the test is skipped if the framework does not distinguish parameters."""
        if not self.fw.has_parameters:
            pytest.skip("the framework has no parameters")
        return self.fw.parameter(values)

    def needs_separate_backward(self) -> None:
        """Skip where forward and backward are one graph that runs as a whole."""
        if Capability.STATIC_GRAPH in self.driver_cls.capabilities:
            pytest.skip("forward and backward run as one (Capability.STATIC_GRAPH)")

    def needs_concrete_tensors(self) -> None:
        """Skip where analyses see symbolic tensors."""
        if Capability.STATIC_GRAPH in self.driver_cls.capabilities:
            pytest.skip("analyses see symbolic tensors (Capability.STATIC_GRAPH)")
