"""The mapping rules for TensorFlow, on contexts made by hand: nothing here needs TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from amanda.interface.backward_context import BackwardOpContext
from amanda.interface.context import OpContext, OpState
from amanda_tensorflow import mapping_rules


class Forward(OpContext):
    """The context of an operator whose variables and constants have the shapes that are given."""

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        shapes: Mapping[int, Sequence[int]],
        attributes: Mapping[str, Any],
    ) -> None:
        op = SimpleNamespace(type=kind, name=kind)
        super().__init__(OpState(op, f"net/{kind}"), "tensorflow/2.21")
        self.names, self.shapes, self.attributes = names, shapes, attributes

    def get_attrs(self) -> dict[str, Any]:
        return dict(self.attributes)

    def get_input_names(self) -> list[str]:
        return list(self.names)

    def get_value(self, index: int) -> Any:
        shape = self.shapes.get(index)
        return None if shape is None else SimpleNamespace(shape=tuple(shape))


class Backward(BackwardOpContext):
    """The context of a backward operator whose outputs are the gradients of the named inputs."""

    def __init__(self, parent: OpContext, kind: str, names: Sequence[str]) -> None:
        op = SimpleNamespace(type=kind, name=kind)
        state = OpState(parent.get_op(), parent.get_op_id())
        super().__init__(parent, state.of_backward(op, f"{state.op_id}/grad/{kind}:0"))
        self.names = names

    def get_grad_input_names(self) -> list[str]:
        return list(self.names)


def forward(
    kind: str, names: str = "", shapes: Mapping[int, Sequence[int]] | None = None, **attributes: Any
) -> OpContext:
    """The context of an operator, as the rules leave it."""
    context = Forward(kind, names.split() or ["input", "filter"], shapes or {}, attributes)
    mapping_rules.standard(context)
    return context


def backward(parent: OpContext, kind: str, *names: str) -> OpContext:
    """The context of one of its backward operators, likewise."""
    context = Backward(parent, kind, names)
    mapping_rules.standard(context)
    return context


def keys(context: OpContext) -> tuple[Any, ...]:
    """Type, weight, bias and both layouts."""
    wanted = ("op_type", "weight_index", "bias_index", "weight_layout", "data_layout")
    return tuple(context[key] for key in wanted)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("AddV2", "add"),
        ("AddN", "add"),
        ("BatchMatMulV2", "matmul"),
        ("Cast", "to"),
        ("ConcatV2", "cat"),
        ("ExpandDims", "unsqueeze"),
        ("LogSoftmax", "log_softmax"),
        ("MatrixBandPart", "matrix_band_part"),
        ("Max", "amax"),
        ("MaxPool", "max_pool2d"),
        ("Mean", "mean"),
        ("ReadVariableOp", "read_variable"),
        ("Relu6", "relu6"),
        ("ResourceApplyAdam", "resource_apply_adam"),
        ("ScatterNd", "scatter_nd"),
        ("SegmentSumV2", "segment_sum"),
        ("StatelessRandomUniformV2", "rand"),
        ("StridedSlice", "getitem"),
        ("Transpose", "permute"),
        ("Unpack", "unbind"),
    ],
)
def test_types(kind: str, expected: str) -> None:
    """PyTorch's name where it has the operator, and else TensorFlow's in lower case."""
    assert forward(kind)["op_type"] == expected


@pytest.mark.parametrize(
    ("kind", "attributes", "expected"),
    [
        ("Conv2D", {"data_format": "NHWC"}, ("conv2d", 1, None, "HWIO", "NHWC")),
        ("Conv2D", {"data_format": "NCHW"}, ("conv2d", 1, None, "HWIO", "NCHW")),
        ("Conv3D", {"data_format": "NDHWC"}, ("conv3d", 1, None, "DHWIO", "NDHWC")),
        ("DepthwiseConv2dNative", {"data_format": "NHWC"}, ("conv2d", 1, None, "HWCM", "NHWC")),
        (
            "Conv2DBackpropInput",
            {"data_format": "NHWC"},
            ("conv_transpose2d", 1, None, "HWOI", "NHWC"),
        ),
        ("FusedBatchNormV3", {"data_format": "NHWC"}, ("batch_norm", 1, 2, "C", "NHWC")),
        ("BiasAdd", {"data_format": "NHWC"}, ("bias_add", None, 1, None, "NHWC")),
        ("AvgPool", {"data_format": "NCHW"}, ("avg_pool2d", None, None, None, "NCHW")),
        ("ResourceGather", {}, ("embedding", 0, None, "VE", None)),
        (
            "Conv",
            {"strides": [1, 1, 1, 1], "data_format": "CHANNELS_LAST"},
            ("conv2d", 1, None, "HWIO", "NHWC"),
        ),
        (
            "Conv",
            {"strides": [1] * 5, "data_format": "CHANNELS_FIRST"},
            ("conv3d", 1, None, "DHWIO", "NCDHW"),
        ),
        ("CudnnRNNV3", {"rnn_mode": "lstm"}, ("lstm", None, None, None, None)),
        ("CudnnRNN", {"rnn_mode": "rnn_tanh"}, ("rnn", None, None, None, None)),
    ],
)
def test_weights_and_layouts(
    kind: str, attributes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """Operators with weights tell where they are and what their axes mean."""
    assert keys(forward(kind, **attributes)) == expected


@pytest.mark.parametrize(
    ("kind", "shapes", "attributes", "expected"),
    [
        ("MatMul", {}, {}, ("matmul", None, None)),
        ("MatMul", {1: (3, 4)}, {"transpose_b": False}, ("linear", 1, "IO")),
        ("MatMul", {1: (3, 4)}, {"transpose_b": True}, ("linear", 1, "OI")),
        ("MatMul", {0: (3, 4)}, {"transpose_a": False}, ("linear", 0, "OI")),
        ("MatMul", {0: (3, 4)}, {"transpose_a": True}, ("linear", 0, "IO")),
        ("MatMul", {0: (3, 4), 1: (4, 3)}, {}, ("linear", 1, "IO")),
        ("BatchMatMulV2", {1: (3, 4)}, {"adj_y": True}, ("linear", 1, "OI")),
        ("BatchMatMulV2", {1: (2, 3, 4)}, {}, ("linear", 1, "BIO")),
        ("BatchMatMulV2", {1: (4,)}, {}, ("matmul", None, None)),
        ("GatherV2", {0: (100, 8)}, {}, ("embedding", 0, "VE")),
        ("GatherV2", {0: (4,)}, {}, ("index_select", None, None)),
        ("GatherV2", {}, {}, ("index_select", None, None)),
    ],
)
def test_products_and_selections(
    kind: str,
    shapes: dict[int, Sequence[int]],
    attributes: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    """A product with a weight is linear, and a selection from one an embedding."""
    context = forward(kind, "a b", shapes, **attributes)
    assert (context["op_type"], context["weight_index"], context["weight_layout"]) == expected


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("abc,cd->abd", {1: (8, 4)}, ("linear", 1, "IO")),
        ("abc,cde->abde", {1: (8, 2, 4)}, ("linear", 1, "IOO")),
        ("abcd,cde->abe", {1: (2, 4, 8)}, ("linear", 1, "IIO")),
        ("...x,xy->...y", {1: (8, 4)}, ("linear", 1, "IO")),
        ("xy,bx->by", {0: (8, 4)}, ("linear", 0, "IO")),
        ("gbi,gio->gbo", {1: (2, 8, 4)}, ("linear", 1, "BIO")),
        ("aecd,abcd->acbe", {}, ("matmul", None, None)),
        ("ii->i", {}, ("einsum", None, None)),
    ],
)
def test_einsum(equation: str, shapes: dict[int, Sequence[int]], expected: tuple[Any, ...]) -> None:
    """A product of two factors is named as one, with a letter per axis of the weight."""
    context = forward("Einsum", "inputs inputs", shapes, equation=equation)
    assert (context["op_type"], context["weight_index"], context["weight_layout"]) == expected


@pytest.mark.parametrize(
    ("kind", "gradient", "names", "expected"),
    [
        ("Conv2D", "Conv2DBackpropFilter", ["filter"], ("conv2d_backward", {"weight": 0})),
        ("Conv2D", "Conv2DBackpropFilter", [], ("conv2d_backward", {"weight": 0})),
        ("Conv2D", "Conv2DBackpropInput", ["input"], ("conv2d_backward", {"input": 0})),
        ("Conv2D", "Conv2DBackpropInput", [], ("conv2d_backward", {"input": 0})),
        ("Conv2D", "ShapeN", [], ("shape_n", None)),
        ("Conv2D", "AddN", [], ("accumulate_grad", None)),
        (
            "DepthwiseConv2dNative",
            "DepthwiseConv2dNativeBackpropFilter",
            [],
            ("conv2d_backward", {"weight": 0}),
        ),
        ("Relu", "ReluGrad", [], ("relu_backward", None)),
        ("MaxPool", "MaxPoolGrad", [], ("max_pool2d_backward", None)),
    ],
)
def test_backward_types_and_roles(
    kind: str, gradient: str, names: list[str], expected: tuple[Any, ...]
) -> None:
    """Backward operators are named after the forward operator, and tell what they produce."""
    context = backward(forward(kind), gradient, *names)
    assert (context["backward_op_type"], context["grad_input_roles"]) == expected


def test_gradients_of_a_batch_norm() -> None:
    """One operator produces all three gradients."""
    parent = forward("FusedBatchNormV3", "x scale offset mean variance")
    names = ("x", "scale", "offset", "", "")
    for given in (names, ()):
        roles = backward(parent, "FusedBatchNormGradV3", *given)["grad_input_roles"]
        assert roles == {"input": 0, "weight": 1, "bias": 2}


def test_gradients_of_a_product() -> None:
    """Both gradients of a linear operator are products; names tell which is the weight's."""
    parent = forward("MatMul", "a b", {1: (3, 4)})
    assert backward(parent, "MatMul", "b")["grad_input_roles"] == {"weight": 0}
    assert backward(parent, "MatMul", "a")["grad_input_roles"] == {"input": 0}
    assert backward(parent, "MatMul")["grad_input_roles"] is None
    assert backward(parent, "MatMul", "b")["backward_op_type"] == "linear_backward"
    left = forward("MatMul", "a b", {0: (3, 4)})
    assert backward(left, "MatMul", "a")["grad_input_roles"] == {"weight": 0}


def test_gradients_of_items_of_a_list() -> None:
    """Items of a list are told apart by their names; where they share one, nothing is guessed."""
    parent = forward("Einsum", "inputs[0] inputs[1]", {1: (8, 4)}, equation="ab,bc->ac")
    assert backward(parent, "Einsum", "inputs[1]")["grad_input_roles"] == {"weight": 0}
    assert backward(parent, "Einsum", "inputs[0]")["grad_input_roles"] == {"input": 0}
    parent = forward("Einsum", "inputs inputs", {1: (8, 4)}, equation="ab,bc->ac")
    assert backward(parent, "Einsum", "inputs")["grad_input_roles"] is None


def test_keys_of_others_stay() -> None:
    """A type that another rule has set is not set again."""
    context = forward("Relu")
    context["op_type"] = "mine"
    mapping_rules.standard(context)
    assert context["op_type"] == "mine"


def test_tables_agree() -> None:
    """Every operator with a weight has a canonical type, and no type has two."""
    kinds = [kind for kinds in mapping_rules.TYPES.values() for kind in kinds.split()]
    assert len(kinds) == len(set(kinds))
    assert set(mapping_rules.WEIGHTED) <= {*kinds, "Dilation2D"}
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in mapping_rules.TYPES)
