"""FLOPs of backward operators, from the shapes of gradients.

A product has one gradient per factor, each of the same cost as the product itself; only gradients
that are computed count. A function takes the :class:`~amanda_tools._operators.signature.CallShapes`
of a backward operator::

    call = CallShapes(signature, grad_outputs, grad_inputs, forward, forward_flops)
    flops = FORMULAS["LinearBackward"](call)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NoReturn

from amanda_tools._operators.signature import CallShapes, Shape, Suffices, by_name, channels

Formula = Callable[[CallShapes], int]


def _missing() -> NoReturn:
    raise LookupError("no gradient")


def _received(call: CallShapes) -> Shape:
    """Return the shape of the first gradient that is taken.

    Raises:
        LookupError: there is none.
    """
    return call.given[0] if call.given and call.given[0] else _missing()


def _produced(call: CallShapes, index: int) -> Shape | None:
    """Return the shape of a gradient that is computed, None if it is not needed."""
    return call.outputs[index] if index < len(call.outputs) else None


def _of_forward(call: CallShapes) -> int:
    """Return the FLOPs of the forward operator.

    Raises:
        LookupError: they are not known.
    """
    if call.forward_flops is None:
        raise LookupError("the forward operator's FLOPs are not known")
    return call.forward_flops


def product(left: int, right: int) -> Formula:
    """Formula for a matrix product whose factors are the inputs at these positions."""

    def formula(call: CallShapes) -> int:
        if not any(shape is not None for shape in call.inputs):
            return 0
        *_, rows, columns = _received(call)
        first, second = _produced(call, left), _produced(call, right)
        return 2 * (math.prod(first or (0,)) * columns + math.prod(second or (0,)) * rows)

    return formula


def matrix_by_vector(vector: int) -> Formula:
    """Formula for a matrix-vector product: the vector's gradient. The matrix's is an outer
    product, without a sum."""

    def formula(call: CallShapes) -> int:
        size = _produced(call, vector)
        return 0 if size is None else 2 * math.prod(_received(call)) * math.prod(size)

    return formula


def convolution(call: CallShapes) -> int:
    """Gradients of the data and of the weight: one kernel at each position of the output."""
    count = sum(_produced(call, index) is not None for index in (0, 1))
    return count * one_convolution(call) if count else 0


def one_convolution(call: CallShapes) -> int:
    """The cost of one gradient of a convolution, where each gradient is an operator of its own."""
    forward = call.forward
    if forward is None:
        _missing()
    signature = forward.signature
    if "transpose" in signature.type or not signature.data_layout:
        return _of_forward(call)
    # TensorFlow's operators consume the weight or the data as well; the gradient comes last.
    given = [shape for shape in call.inputs if shape is not None]
    gradient = given[-1] if len(given) > 1 else _received(call)
    count = channels(gradient, signature.data_layout)
    return 2 * (math.prod(gradient) // max(count, 1)) * math.prod(forward.weight)


def matrix_product(call: CallShapes) -> int:
    """A matrix product among the backward operators, with factors transposed in any way."""
    result = _produced(call, 0)
    if result is None or len(result) < 2:
        _missing()
    factors = [None if s is None or len(s) < 2 else s for s in call.inputs]
    # One factor is enough: the first one has the rows of the result, the second one its columns.
    number, factor = next((i, shape) for i, shape in enumerate(factors) if shape is not None)
    outer = result[-1 if number == 1 and len(factors) == 2 else -2]
    if outer not in factor[-2:]:
        raise LookupError("not a product of these")
    return 2 * (math.prod(result) * factor[-1] * factor[-2] // max(outer, 1))


def fused_attention(call: CallShapes) -> int:
    """Scores computed again, and the gradients of scores, query, key and value."""
    query, key, value = (_produced(call, index) for index in range(3))
    if query is None or key is None or value is None:
        return _of_forward(call) * 5 // 2
    pairs = math.prod(query[:-1]) * key[-2]
    return 2 * pairs * (3 * query[-1] + 2 * value[-1])


def as_forward(call: CallShapes) -> int:
    """The cost of one gradient per factor, each that of the forward operator."""
    factors = [shape for shape in call.outputs if shape is not None and len(shape) > 1]
    return len(factors) * _of_forward(call)


def recurrent_layer(call: CallShapes) -> int:
    """One layer and direction: gradients of its data, its state and both of its weights."""
    data, of_data, of_state = (_produced(call, index) for index in range(3))
    if of_data is None or of_state is None:
        _missing()
    steps = math.prod(_received(call)[:-1])
    return 2 * steps * (math.prod(of_data) * (1 if data is None else 2) + 2 * math.prod(of_state))


def whole_recurrence(call: CallShapes) -> int:
    """A network in one operator: gradients of its data and of its weights."""
    return 2 * _of_forward(call)


FORMULAS = by_name({
    product(0, 1): "MmBackward BmmBackward MatmulBackward LinearBackward",
    product(1, 2): "AddmmBackward BaddbmmBackward",
    matrix_by_vector(1): "MvBackward",
    matrix_by_vector(2): "AddmvBackward",
    matrix_product: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    convolution: "ConvolutionBackward",
    # The data's gradient of a transposed convolution is a plain convolution.
    one_convolution: """
        Conv2DBackpropFilter Conv2DBackpropInput Conv3DBackpropFilterV2 Conv3DBackpropInputV2
        DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput
        Conv2D Conv3D DepthwiseConv2dNative
    """,
    fused_attention: """
        ScaledDotProductFlashAttentionForCpuBackward ScaledDotProductFlashAttentionBackward
        ScaledDotProductEfficientAttentionBackward ScaledDotProductCudnnAttentionBackward
        ScaledDotProductFusedAttentionOverrideableBackward attention_backward
    """,
    recurrent_layer: "MkldnnRnnLayerBackward",
    _of_forward: "SparseTensorDenseMatMul AffineGridGeneratorBackward",
    # The canonical types are of frameworks with one backward operator for each operator.
    whole_recurrence: """
        CudnnRnnBackward MiopenRnnBackward CudnnRNNBackprop CudnnRNNBackpropV3
        rnn_backward lstm_backward gru_backward rnn_tanh_cell_backward rnn_relu_cell_backward
        lstm_cell_backward gru_cell_backward
    """,
    as_forward: """
        AddbmmBackward TrilinearBackward GroupedMmBackward ConvTbcBackward Einsum
        linear_backward matmul_backward einsum_backward tensordot_backward bilinear_backward
        grouped_mm_backward conv1d_backward conv2d_backward conv3d_backward
        conv_transpose1d_backward conv_transpose2d_backward conv_transpose3d_backward
    """,
})  # fmt: skip
"""Formulas by the framework's name of a backward operator, without the number that PyTorch appends,
and by canonical type."""

READING_INPUTS = frozenset({one_convolution})
"""Formulas that do not read the shapes of the gradients that are computed."""

SUFFICING: Mapping[Formula, Suffices] = {
    matrix_product: lambda _, inputs: any(s is not None and len(s) > 1 for s in inputs)
}
"""By formula, whether these shapes of inputs are all that it reads."""
