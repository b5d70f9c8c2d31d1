"""The formulas of ``flops`` alone: layouts and forms of other frameworks, and the toy framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amanda.tools.description import OpDescription
from amanda_tools._operators.cost import FORMULAS
from amanda_tools._operators.decompositions import COUNTS
from amanda_tools._operators.flop_registry import backward_formula_of, formula_of
from amanda_tools._operators.op_table import GROUPS
from amanda_tools._operators.signature import CallShapes, OpSignature


def macs(kind: str, inputs: list[Any], outputs: list[Any] | None = None, **signature: Any) -> int:
    """Half of the FLOPs: multiply-accumulates."""
    formula = formula_of(kind)
    assert formula is not None
    flops = formula.flops(CallShapes(OpSignature(kind, **signature), inputs, outputs or []))
    assert flops is not None
    return flops // 2


def gradient(name: str, forward: str, call: CallShapes) -> int | None:
    about = OpDescription(name, f"{forward}_backward", name, "", "tensorflow/2/graph", forward)
    formula = backward_formula_of(about, OpDescription(forward, forward, forward, "", ""))
    assert formula is not None
    return formula.flops(call)


def test_no_type_is_both_counted_and_free() -> None:
    """A type has a formula or counts zero."""
    free = {kind for kinds in GROUPS.values() for kind in kinds.split()}
    assert (FORMULAS.keys() | COUNTS.keys()) & free == set()


CONVOLUTIONS = {
    "OIHW": ([(2, 4, 9, 9), (6, 4, 3, 3)], (2, 6, 7, 7)),
    "HWIO": ([(2, 9, 9, 4), (3, 3, 4, 6)], (2, 7, 7, 6)),
    "OIHW, groups": ([(2, 4, 9, 9), (6, 2, 3, 3)], (2, 6, 7, 7)),
    "HWIO, groups": ([(2, 9, 9, 4), (3, 3, 2, 6)], (2, 7, 7, 6)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_both_layouts(name: str) -> None:
    """A convolution costs the same, however its weight and data are laid out."""
    layout, _, groups = name.partition(", ")
    inputs, output = CONVOLUTIONS[name]
    expected = 2 * 7 * 7 * 6 * 3 * 3 * (2 if groups else 4)
    assert macs("conv2d", [*inputs], [output], weight=1, weight_layout=layout) == expected


def test_depthwise_convolutions_of_both_layouts() -> None:
    """TensorFlow has an operator of its own, PyTorch groups; the figure is one."""
    ours = macs("conv2d", [(1, 4, 8, 8), (8, 1, 3, 3)], [(1, 8, 6, 6)], weight=1,
                weight_layout="OIHW")  # fmt: skip
    theirs = macs("conv2d", [(1, 8, 8, 4), (3, 3, 4, 2)], [(1, 6, 6, 8)], weight=1,
                  weight_layout="HWCM")  # fmt: skip
    assert ours == theirs == 6 * 6 * 8 * 9


def test_transposed_convolutions_of_both_frameworks() -> None:
    """TensorFlow passes the wanted sizes first and the data last."""
    ours = macs("conv_transpose2d", [(1, 4, 5, 5), (4, 6, 3, 3)], weight=1, weight_layout="IOHW")
    theirs = macs("conv_transpose2d", [(4,), (3, 3, 6, 4), (1, 5, 5, 4)], weight=1,
                  weight_layout="HWOI")  # fmt: skip
    assert ours == theirs == 5 * 5 * 4 * 6 * 9


def test_products_with_weights_in_every_layout() -> None:
    """``x @ w``, ``x @ w.T``, a weight at the left, and an Einstein sum with a weight."""
    assert macs("linear", [(2, 3, 4), (5, 4), (5,)], weight=1, bias=2, weight_layout="OI") == 120
    assert macs("linear", [(6, 4), (4, 5)], weight=1, weight_layout="IO") == 120
    assert macs("linear", [(5, 4), (4, 6)], weight=0, weight_layout="OI") == 120
    addmm = macs("linear", [(5,), (6, 4), (4, 5)], weight=2, bias=0, weight_layout="IO")
    assert addmm == 120
    equation = {"equation": "abc,cde->abde"}
    shapes = [(2, 3, 4), (4, 2, 5)]
    assert macs("linear", shapes, weight=1, weight_layout="IOO", attributes=equation) == 240


@pytest.mark.parametrize(
    ("attributes", "left", "right"),
    [
        ({}, (7, 3, 4), (7, 4, 5)),
        ({"transpose_a": True}, (4, 3), (4, 5)),
        ({"transpose_b": True}, (3, 4), (5, 4)),
        ({"adj_x": True, "adj_y": True}, (7, 4, 3), (7, 5, 4)),
    ],
)
def test_products_of_transposed_factors(
    attributes: dict[str, Any], left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """TensorFlow says by attributes which factor it transposes."""
    batch = 7 if len(left) == 3 else 1
    assert macs("matmul", [left, right], attributes=attributes) == batch * 3 * 4 * 5


def test_a_block_of_lstm_cells() -> None:
    """TensorFlow's BlockLSTM: one weight for data and state, after the sequence length."""
    inputs = [(), (5, 2, 3), (2, 4), (2, 4), (7, 16)]
    assert macs("lstm", inputs, weight=4, weight_layout="IO") == 5 * 2 * 7 * 16


def test_gradients_that_are_operators_of_their_own() -> None:
    """TensorFlow makes one operator for each gradient; together they cost the forward twice."""
    signature = OpSignature("conv2d", weight=1, weight_layout="HWIO", data_layout="NHWC")
    data, weight, output = (2, 9, 9, 4), (3, 3, 4, 6), (2, 7, 7, 6)
    forward = CallShapes(signature, [data, weight], [output])
    cost = FORMULAS["conv2d"](forward)
    of_data = CallShapes(signature, [(4,), weight, output], [data], forward, cost)
    of_weight = CallShapes(signature, [data, (4,), output], [weight], forward, cost)
    assert gradient("Conv2DBackpropInput", "conv2d", of_data) == cost
    assert gradient("Conv2DBackpropFilter", "conv2d", of_weight) == cost
    assert gradient("DepthwiseConv2dNativeBackpropInput", "conv2d", of_data) == cost
    assert gradient("DepthwiseConv2dNativeBackpropFilter", "conv2d", of_weight) == cost
    product = CallShapes(OpSignature("matmul"), [(3, 4), (4, 5)])
    for factors, result in (([(3, 5), (4, 5)], (3, 4)), ([(3, 4), (3, 5)], (4, 5))):
        call = CallShapes(product.signature, factors, [result], product, 120)
        assert gradient("MatMul", "matmul", call) == 120


SIZES = st.integers(min_value=1, max_value=4)


@settings(max_examples=60)
@given(st.permutations("abcde"), st.permutations("abcde"), st.data())
def test_a_contraction_of_two_factors_is_the_size_of_its_loops(
    first: list[str], second: list[str], data: st.DataObject
) -> None:
    """numpy's own optimizer counts the same loops: one multiplication and one addition each."""
    left, right = "".join(first[:3]), "".join(second[:3])
    result = "".join(sorted(set(left + right))[: data.draw(st.integers(0, 4))])
    size = {letter: data.draw(SIZES) for letter in "abcde"}
    shapes = [tuple(size[c] for c in letters) for letters in (left, right)]
    alone = [c for c in set(left) ^ set(right) if c not in result]
    found = macs("einsum", [*shapes], attributes={"equation": f"{left},{right}->{result}"})
    loops = math.prod(size[c] for c in set(left + right) - set(alone))
    assert found == loops
    if not alone:
        arrays = [np.empty(shape) for shape in shapes]
        text = np.einsum_path(f"{left},{right}->{result}", *arrays)[1]
        [line] = [line for line in text.splitlines() if "Naive FLOP" in line]
        naive = float(line.split(":")[1])
        # numpy adds the additions wherever the factors share a letter.
        is_sum = len(left + right) > len(set(left + right))
        assert naive == pytest.approx(loops * (2 if is_sum else 1), rel=1e-3)


SQUARE, TALL = [(6, 6)], [(2, 9, 6)]


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "flops"),
    [
        ("linalg_lu_factor", SQUARE, {}, 2 * 6**3 / 3),
        ("linalg_lu_factor", [(9, 6)], {}, 6**2 * (9 - 2)),
        ("linalg_det", [(4, 6, 6)], {}, 4 * 2 * 6**3 / 3),
        ("linalg_cholesky", SQUARE, {}, 6**3 / 3),
        ("linalg_inv", SQUARE, {}, 2 * 6**3),
        ("linalg_solve", [(6, 6), (6, 2)], {}, 2 * 6**3 / 3 + 2 * 6**2 * 2),
        ("linalg_solve", [(6, 6), (6,)], {}, 2 * 6**3 / 3 + 2 * 6**2),
        ("linalg_solve", [(3, 6, 6), (6, 2)], {}, 3 * (2 * 6**3 / 3 + 2 * 6**2 * 2)),
        ("linalg_solve", [(6, 6), (2, 6)], {"left": False}, 2 * 6**3 / 3 + 2 * 6**2 * 2),
        ("linalg_solve_triangular", [(6, 6), (6, 2)], {}, 6**2 * 2),
        ("cholesky_solve", [(6, 2), (6, 6)], {}, 2 * 6**2 * 2),
        ("linalg_lu_solve", [(6, 6), (6,), (6, 2)], {}, 2 * 6**2 * 2),
        ("linalg_qr", TALL, {"mode": "r"}, 2 * 2 * 6**2 * (9 - 2)),
        ("linalg_qr", TALL, {"mode": "reduced"}, 2 * 2 * 2 * 6**2 * (9 - 2)),
        ("linalg_qr", TALL, {"full_matrices": False}, 2 * 2 * 2 * 6**2 * (9 - 2)),
        (
            "linalg_qr",
            TALL,
            {"mode": "complete"},
            2 * (2 * 6**2 * (9 - 2) + 4 * (9**2 * 6 - 9 * 6**2 + 6**3 / 3)),
        ),
        ("linalg_lstsq", [(9, 6), (9, 1)], {}, 2 * 6**2 * (9 - 2) + 4 * 9 * 6 - 2 * 6**2 + 6**2),
    ],
)
def test_decompositions_cost_what_the_literature_says(
    kind: str, inputs: list[Any], attributes: dict[str, Any], flops: float
) -> None:
    """The terms of the highest order of Golub & Van Loan, which those of LAPACK agree with."""
    assert 2 * macs(kind, inputs, attributes=attributes) == flops


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((6, 16), (2, 16, 8), 6 * 16 * 8),
        ((2, 6, 16), (16, 8), 6 * 16 * 8),
        ((6, 16), (16, 8), 6 * 16 * 8),
        ((3, 6, 16), (3, 16, 8), 3 * 6 * 16 * 8),
    ],
)
def test_products_of_groups_cost_what_their_parts_cost(
    left: Any, right: Any, expected: int
) -> None:
    """Of the experts of a mixture: each row, column or summand belongs to one group."""
    assert macs("grouped_mm", [left, right, (2,), None]) == expected
