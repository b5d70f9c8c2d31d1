"""Canonical types and attributes of the most used operators, against hand-written ones."""

from __future__ import annotations

from typing import Any

import amanda
import numpy as np
import pytest
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from onnx import TensorProto, helper

from models import FLOAT, INT64, model, session

X = np.arange(1 * 4 * 6 * 6, dtype=np.float32).reshape(1, 4, 6, 6)
M = np.arange(12, dtype=np.float32).reshape(3, 4)


def f(*shape: int) -> Any:
    """A weight."""
    return np.ones(shape, np.float32)


def i(*numbers: int) -> Any:
    """Numbers that an operator has as an input."""
    return np.array(numbers, np.int64)


def described(kind: str, tensors: Any, attributes: Any) -> dict[str, Any]:
    """The keys and the canonical attributes of an operator; the first tensor is an input."""
    data, *constants = tensors
    names = ["x", *("" if c is None else f"c{n}" for n, c in enumerate(constants))]
    known = {f"c{n}": c for n, c in enumerate(constants) if c is not None}
    outputs = ["y", "z"] if kind in ("Split", "TopK") else ["y"]
    node = helper.make_node(kind, names, outputs, **attributes)
    types = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64, np.dtype(bool): 9}
    made = model([node], {"x": types[data.dtype]}, {}, known, opset=22)
    made.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    found: dict[str, Any] = {}

    def look(context: Any) -> None:
        found.update(context)
        found["attributes"] = canonical.attributes(context)

    tool = amanda.Tool()
    tool.depends_on(MappingTool.standard())
    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        session(made).run(None, {"x": data})
    return found


WINDOW = {"stride": (2, 2), "padding": ((1, 1), (0, 2)), "dilation": (1, 1)}
PADS = {"strides": [2, 2], "pads": [1, 0, 1, 2]}
CASES: list[tuple[str, Any, dict[str, Any], str, dict[str, Any]]] = [
    ("Conv", [X, f(8, 2, 3, 3)], {**PADS, "group": 2}, "conv2d",
     {"kernel_size": (3, 3), **WINDOW, "groups": 2}),
    ("Conv", [X, f(8, 4, 3, 3)], {"auto_pad": "SAME_UPPER"}, "conv2d",
     {"kernel_size": (3, 3), "stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1),
      "groups": 1}),
    ("Conv", [X[..., 0], f(8, 4, 3)], {}, "conv1d",
     {"kernel_size": (3,), "stride": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 1}),
    ("ConvTranspose", [X, f(4, 8, 3, 3)], {"output_padding": [1, 1], "strides": [2, 2]},
     "conv_transpose2d",
     {"kernel_size": (3, 3), "stride": (2, 2), "padding": ((0, 0), (0, 0)), "dilation": (1, 1),
      "groups": 1, "output_padding": (1, 1)}),
    ("MaxPool", [X], {**PADS, "kernel_shape": [3, 3]}, "max_pool2d",
     {"kernel_size": (3, 3), **WINDOW, "ceil_mode": False}),
    ("AveragePool", [X], {"kernel_shape": [2, 2], "ceil_mode": 1}, "avg_pool2d",
     {"kernel_size": (2, 2), "stride": (1, 1), "padding": ((0, 0), (0, 0)), "ceil_mode": True,
      "count_include_pad": False}),
    ("GlobalAveragePool", [X], {}, "adaptive_avg_pool2d", {"output_size": (1, 1)}),
    ("GlobalMaxPool", [X], {}, "adaptive_max_pool2d", {"output_size": (1, 1)}),
    ("Gemm", [M, f(5, 4), f(5)], {"transB": 1}, "linear", {"in_features": 4, "out_features": 5}),
    ("MatMul", [M, f(4, 5)], {}, "linear", {"in_features": 4, "out_features": 5}),
    ("Einsum", [M, f(4, 5)], {"equation": "ab, bc->ac"}, "einsum", {"equation": "ab,bc->ac"}),
    ("BatchNormalization", [X, *[f(4)] * 4], {"epsilon": 0.5}, "batch_norm",
     {"eps": 0.5, "training": False}),
    ("InstanceNormalization", [X, f(4), f(4)], {}, "instance_norm",
     {"eps": pytest.approx(1e-5), "training": True}),
    ("GroupNormalization", [X, f(4), f(4)], {"num_groups": 2}, "group_norm",
     {"eps": pytest.approx(1e-5), "groups": 2}),
    ("LayerNormalization", [X, f(6, 6)], {"axis": -2}, "layer_norm",
     {"eps": pytest.approx(1e-5), "axis": (2, 3)}),
    ("LRN", [X], {"size": 3}, "local_response_norm",
     {"size": 3, "alpha": pytest.approx(1e-4), "beta": 0.75, "k": 1.0}),
    ("Softmax", [M], {}, "softmax", {"axis": 1}),
    ("LogSoftmax", [M], {"axis": 0}, "log_softmax", {"axis": 0}),
    ("Gelu", [M], {"approximate": "tanh"}, "gelu", {"approximate": "tanh"}),
    ("LeakyRelu", [M], {"alpha": 0.25}, "leaky_relu", {"alpha": 0.25}),
    ("Elu", [M], {}, "elu", {"alpha": 1.0}),
    ("Softplus", [M], {}, "softplus", {"beta": 1.0}),
    ("Clip", [M, np.float32(0), np.float32(6)], {}, "clamp", {"min": 0.0, "max": 6.0}),
    ("Clip", [M, None, np.float32(6)], {}, "clamp", {"max": 6.0}),
    ("Concat", [M, f(3, 1)], {"axis": -1}, "cat", {"axis": 1}),
    ("Split", [M, i(1, 3)], {"axis": 1}, "split", {"axis": 1, "sizes": (1, 3)}),
    ("Split", [M], {"axis": 0, "num_outputs": 2}, "split", {"axis": 0, "sizes": (2, 1)}),
    ("Squeeze", [X, i(0)], {}, "squeeze", {"axis": (0,)}),
    ("Squeeze", [X], {}, "squeeze", {"axis": (0,)}),
    ("Unsqueeze", [M, i(0, -1)], {}, "unsqueeze", {"axis": (0, 3)}),
    ("Reshape", [X, i(0, -1)], {}, "reshape", {"shape": (1, 144)}),
    ("Flatten", [X], {"axis": 2}, "reshape", {"shape": (4, 36)}),
    ("Expand", [M, i(2, 1, 4)], {}, "broadcast_to", {"shape": (2, 3, 4)}),
    ("Transpose", [X], {"perm": [0, 2, 3, 1]}, "permute", {"perm": (0, 2, 3, 1)}),
    ("Transpose", [M], {}, "permute", {"perm": (1, 0)}),
    ("Tile", [M, i(2, 1)], {}, "tile", {"repeats": (2, 1)}),
    ("Pad", [M, i(0, 1, 0, 2), np.float32(3)], {}, "pad",
     {"padding": ((0, 0), (1, 2)), "mode": "constant", "value": 3.0}),
    ("Pad", [M, i(1, 2), None, i(-1)], {"mode": "edge"}, "pad",
     {"padding": ((0, 0), (1, 2)), "mode": "replicate"}),
    ("Slice", [M, i(1), i(99), i(1), i(2)], {}, "getitem", {"index": ((0, 3, 1), (1, 4, 2))}),
    ("Gather", [M, i(0)], {"axis": 1}, "index_select", {"axis": 1}),
    ("GatherElements", [M, np.zeros((1, 4), np.int64)], {}, "gather", {"axis": 0}),
    ("CumSum", [M, i(1)[0]], {}, "cumsum", {"axis": 1}),
    ("ReduceMean", [X, i(-1, -2)], {"keepdims": 0}, "mean", {"axis": (2, 3), "keepdim": False}),
    ("ReduceSum", [X], {}, "sum", {"axis": (0, 1, 2, 3), "keepdim": True}),
    ("ReduceMax", [M, i(1)], {}, "amax", {"axis": (1,), "keepdim": True}),
    ("ReduceMin", [M, i(1)], {}, "amin", {"axis": (1,), "keepdim": True}),
    ("ReduceProd", [M, i(1)], {}, "prod", {"axis": (1,), "keepdim": True}),
    ("ReduceL2", [M, i(0)], {}, "norm", {"axis": (0,), "keepdim": True, "ord": 2.0}),
    ("ReduceLogSumExp", [M, i(0)], {}, "logsumexp", {"axis": (0,), "keepdim": True}),
    ("ArgMax", [M], {"axis": 1}, "argmax", {"axis": (1,), "keepdim": True}),
    ("TopK", [M, i(2)], {}, "topk", {"k": 2, "axis": 1, "largest": True}),
    ("Cast", [M], {"to": TensorProto.INT64}, "to", {"dtype": "int64"}),
    ("OneHot", [i(0, 2), i(3), f(2)], {}, "one_hot", {"depth": 3}),
    ("Trilu", [M, np.array(1)], {"upper": 0}, "tril", {"diagonal": 1}),
    ("Dropout", [M], {}, "dropout", {"p": 0.5, "training": False}),
    ("Resize", [X, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"},
     "upsample_bilinear2d", {"output_size": (12, 12), "align_corners": False}),
    ("Add", [M, M], {}, "add", {"alpha": 1}),
    ("Sub", [M, M], {}, "sub", {"alpha": 1}),
    *((kind, [M], {}, kind.lower(), {})
      for kind in ("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Erf", "Abs", "Neg", "Reciprocal",
                   "Floor", "Ceil", "Round", "Sign", "Cos", "Sin", "Mish", "Identity", "Shape")),
    *((kind, [M, M], {}, name, {})
      for kind, name in (("Mul", "mul"), ("Div", "div"), ("Pow", "pow"), ("Equal", "eq"),
                         ("Greater", "gt"), ("Less", "lt"), ("Max", "maximum"),
                         ("Min", "minimum"))),
    ("HardSwish", [M], {}, "hardswish", {}),
    ("Not", [M > 1], {}, "logical_not", {}),
    ("And", [M > 1, M > 2], {}, "logical_and", {}),
    ("Where", [M > 1, M, M], {}, "where", {}),
    ("ConstantOfShape", [i(2, 3)], {}, "full", {}),
    ("NonZero", [M], {}, "nonzero", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tensors", "attributes", "op_type", "expected"),
    CASES,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)],
)
def test_types_and_attributes(
    kind: str, tensors: Any, attributes: Any, op_type: str, expected: Any
) -> None:
    """Each operator has its canonical type, and the attributes of the vocabulary."""
    found = described(kind, tensors, attributes)
    assert found["op_type"] == op_type
    assert found["attributes"] == expected
    assert set(expected) <= set(canonical.ATTRIBUTES[op_type])


def test_sixty_operators_are_tested() -> None:
    """The table above covers at least sixty operators."""
    assert len({case[0] for case in CASES}) >= 60


@pytest.mark.parametrize(
    ("kind", "tensors", "attributes", "expected"),
    [
        ("Conv", [X, f(8, 4, 3, 3)], {}, (1, 2, "OIHW", "NCHW")),
        ("ConvTranspose", [X, f(4, 8, 3, 3)], {}, (1, 2, "IOHW", "NCHW")),
        ("Gemm", [M, f(5, 4), f(5)], {"transB": 1}, (1, 2, "OI", None)),
        ("Gemm", [M, f(4, 5)], {}, (1, 2, "IO", None)),
        ("MatMul", [M, f(4, 5)], {}, (1, None, "IO", None)),
        ("MatMul", [M, f(2, 4, 5)], {}, (1, None, "BIO", None)),
        ("MatMul", [M, f(4)], {}, (None, None, None, None)),
        ("LayerNormalization", [M, f(4), f(4)], {}, (1, 2, "C", None)),
    ],
)
def test_roles_and_layouts(kind: str, tensors: Any, attributes: Any, expected: Any) -> None:
    """Weights and biases have their places and layouts."""
    found = described(kind, tensors, attributes)
    keys = ("weight_index", "bias_index", "weight_layout", "data_layout")
    assert tuple(found.get(key) for key in keys) == expected
