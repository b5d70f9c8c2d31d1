"""The arithmetic of the optimization tools: the same on every framework, against numpy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from amanda.errors import UnsupportedProgramError
from amanda_tools._values.tensors import Arithmetic, arithmetic_of


def tensor(framework: str, array: Any, dtype: str = "float32") -> Any:
    module = pytest.importorskip(framework)
    if framework == "numpy":
        return module.array(array, dtype)
    if framework == "torch":
        return module.tensor(array, dtype=getattr(module, dtype))
    return module.constant(array, dtype=getattr(module, dtype))


@pytest.fixture(params=["torch", "tensorflow", "numpy"])
def framework(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def x() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)


@pytest.fixture
def arithmetic(framework: str, x: Any) -> Arithmetic:
    return arithmetic_of(tensor(framework, x))


def test_the_arithmetic_is_that_of_numpy(arithmetic: Arithmetic, framework: str, x: Any) -> None:
    t = tensor(framework, x)
    exponents = np.exp(x - x.max(-1, keepdims=True))
    flat = x.reshape(3, 20)
    cases = [
        (arithmetic.relu(t), np.maximum(x, 0)),
        (arithmetic.sigmoid(t), 1 / (1 + np.exp(-x))),
        (arithmetic.softmax(t), exponents / exponents.sum(-1, keepdims=True)),
        (arithmetic.matmul(t, arithmetic.transpose(t)), x @ x.swapaxes(-1, -2)),
        (arithmetic.mean(abs(t), [1, 2]), np.abs(x).mean((1, 2))),
        (arithmetic.mean(t, []), x),
        (arithmetic.sum(t, [0, -1]), x.sum((0, -1))),
        (arithmetic.reshape(t, [-1, 20]), flat),
        (arithmetic.take(t, [0, 0, 3], 1), x[:, [0, 0, 3]]),
        (arithmetic.take(t, [2, 0], -3), x[[2, 0]]),
        (arithmetic.where(t > 0, t, -1.0), np.where(x > 0, x, -1)),
        (t * arithmetic.constant(x > 0, t), x * (x > 0)),
        (arithmetic.stop_gradient(t), x),
    ]
    for found, expected in cases:
        assert np.allclose(arithmetic.wide_numpy(found), expected, atol=1e-6)


def test_the_top_are_exactly_as_many_as_asked_for(arithmetic: Arithmetic, framework: str) -> None:
    scores = tensor(framework, [[3.0, 1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    found = arithmetic.wide_numpy(arithmetic.top_mask(scores, 2))
    assert found.tolist() == [[1, 0, 1, 0, 0], [1, 1, 0, 0, 0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
def test_constants_have_the_type_of_what_they_meet(framework: str, dtype: str) -> None:
    if framework == "numpy" and dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    t = tensor(framework, [1.0, 2.0], dtype)
    arithmetic = arithmetic_of(t)
    assert arithmetic.is_floating(t)
    product = t * arithmetic.cast_like(arithmetic.constant(np.array([True, False]), t), t)
    assert product.dtype == t.dtype
    assert arithmetic.wide_numpy(product).tolist() == [1.0, 0.0]
    assert arithmetic.wide_numpy(product).dtype == ("float64" if dtype == "float64" else "float32")


def test_variables_can_be_trained_and_assigned(arithmetic: Arithmetic, framework: str) -> None:
    variable = arithmetic.variable(np.array([1.0, 2.0]), tensor(framework, [0.0]))
    if framework == "numpy":
        gradient = 2 * variable
    elif framework == "torch":
        (variable * variable).sum().backward()
        gradient = variable.grad
    else:
        module = importlib.import_module("tensorflow")
        with module.GradientTape() as tape:
            loss = module.reduce_sum(variable * variable)
        gradient = tape.gradient(loss, variable)
    assert arithmetic.wide_numpy(gradient).tolist() == [2.0, 4.0]
    arithmetic.assign(variable, np.array([5.0, 6.0]))
    assert arithmetic.wide_numpy(variable).tolist() == [5.0, 6.0]


def test_a_value_that_is_no_variable_cannot_be_assigned() -> None:
    t = tensor("tensorflow", [1.0])
    with pytest.raises(TypeError, match="not a variable"):
        arithmetic_of(t).assign(t, np.array([2.0]))


def test_integers_are_not_floating(framework: str) -> None:
    t = tensor(framework, [1, 2], "int32")
    assert not arithmetic_of(t).is_floating(t)


def test_other_arrays_are_refused_by_name() -> None:
    arithmetic = arithmetic_of([1.0])
    assert arithmetic.refusal([1.0]) == "is of builtins.list, which is no array"
    with pytest.raises(UnsupportedProgramError, match=r"cannot compute .* builtins\.list"):
        arithmetic.constant(np.ones(1), [1.0])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_numpy_rounds_to_8_bit_floats_as_ml_dtypes_does(name: str) -> None:
    """Ties, subnormal numbers and zeros included."""
    kind = getattr(pytest.importorskip("ml_dtypes"), name)
    values = np.arange(-(2**15), 2**15).astype(np.int16).view(np.float16).astype(np.float32)
    values = values[
        np.abs(values)
        <= float(np.abs(np.array(0x7E if "e4" in name else 0x7B, np.uint8).view(kind)))
    ]
    found = arithmetic_of(values).round_trip(values, name)
    assert np.array_equal(found, values.astype(kind).astype(np.float32))
