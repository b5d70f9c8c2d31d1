"""The contract's adapters of TensorFlow without Amanda, against values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from amanda.testing.contract.base import ONES, B, W, X, product, times
from amanda.testing.framework import Framework, Trained
from tests.tensorflow import adapters

FRAMEWORKS = (
    adapters.EagerTensorFlow,
    adapters.TapeInside,
    adapters.TapeOutside,
    adapters.SessionFramework,
)


@pytest.fixture(params=FRAMEWORKS)
def fw(request: pytest.FixtureRequest) -> Framework:
    """Each of the adapters."""
    framework: Framework = request.param()
    return framework


def test_products(fw: Framework) -> None:
    """X * W, its gradients, and the same at every run."""
    program = fw.program(fw.mul, X, W)
    for _ in range(2):
        assert program.run() == [product(X, W)]
        assert program.train() == Trained([product(X, W)], [W, X])


def test_second_gradients(fw: Framework) -> None:
    """The second derivative of a cube; of an input that is not used there is none."""
    program = fw.program(lambda x, w: fw.mul(fw.mul(x, x), x), X, W)
    assert program.train().gradients == [times(product(X, X), 3.0), None]
    assert program.second_gradients() == [times(X, 6.0), None]


def test_linear(fw: Framework) -> None:
    """A row of the weight per output, with and without a bias."""
    # x = [[1, -2], [3, 4]]; w = [[0.5, 1], [2, -1]]
    expected = [[-1.5, 4.0], [5.5, 2.0]]
    assert fw.program(fw.linear, X, W).run() == [expected]
    shifted = [[a + b for a, b in zip(row, B, strict=True)] for row in expected]
    assert fw.program(fw.linear, X, W, B).run() == [shifted]
    gradients = fw.program(fw.linear, X, W, B).train().gradients
    assert gradients == [[[2.5, 0.0]] * 2, [[4.0, 2.0]] * 2, [2.0, 2.0]]


def test_lists_of_tensors(fw: Framework) -> None:
    """Concatenation and halves."""
    assert fw.program(lambda *t: fw.cat(t), X, W, X).run() == [[*X, *W, *X]]
    assert fw.program(fw.split, X).run() == [[X[0]], [X[1]]]


def test_parameters_and_constants(fw: Framework) -> None:
    """A parameter that is made before the program, and a constant within it."""
    weight = fw.parameter(W)
    program = fw.program(lambda x: fw.add(fw.mul(fw.relu(x), weight), fw.tensor(ONES)), X)
    assert program.run() == [[[1.5, 1.0], [7.0, -3.0]]]
    assert program.train().gradients == [[[0.5, 0.0], [2.0, -1.0]]]


def test_random_numbers(fw: Framework) -> None:
    """They differ from run to run, repeat from the seed on, and change the state."""
    program = fw.program(fw.dropout, ONES)
    fw.seed()
    start = fw.rng_state()
    first, second = program.run(), program.run()
    assert first != second
    assert fw.rng_state() != start
    fw.seed()
    assert fw.rng_state() == start
    assert program.run() == first


def test_operator_of_the_user(fw: Framework) -> None:
    """The compiled operator doubles its input."""
    kind, function = fw.user_op()
    assert kind == "AmandaTwice"
    assert fw.program(function, X).run() == [times(X, 2.0)]


@pytest.mark.parametrize("helper", ["scale", "cast"])
def test_helpers_of_routines(fw: Framework, helper: str) -> None:
    """The helpers that routines call work on tensors of a run."""
    calls: dict[str, Any] = {"scale": lambda t: fw.scale(t, 2.0), "cast": fw.cast}
    expected = {"scale": times(X, 2.0), "cast": X}
    assert fw.to_list(calls[helper](fw.tensor(X))) == expected[helper]
