"""Multiply-accumulates (MACs) of backward operators, from the shapes of gradients.

A product has one gradient per factor, each of the same cost as the product itself; only gradients
that are computed count. Backward operators are known by their framework's names, since one forward
operator may have several, of which some compute products and others do not::

    formula = formula_of("LinearBackward0")
    macs = formula(GradientShapes(forward_call, forward_macs, grad_outputs, grad_inputs))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import attrs

from amanda_tools._operators.signature import CallShapes, Shape, channels

Shapes = Sequence[Shape | None]


@attrs.frozen
class GradientShapes:
    """One execution of a backward operator.

    Attributes:
        forward: shapes of the last execution of the forward operator.
        forward_macs: its MACs.
        grad_outputs: shapes of the gradients that the backward operator consumes.
        grad_inputs: shapes of those that it produces; None for gradients that are not computed.
    """

    forward: CallShapes
    forward_macs: int
    grad_outputs: Shapes
    grad_inputs: Shapes

    @property
    def received(self) -> Shape:
        """Shape of the first gradient consumed.

        Raises:
            LookupError: there is none.
        """
        return next((s for s in self.grad_outputs if s is not None), None) or _missing()

    def produced(self, index: int) -> Shape | None:
        """Return the shape of a gradient that is produced, None if it is not computed."""
        return self.grad_inputs[index] if index < len(self.grad_inputs) else None


Formula = Callable[[GradientShapes], int]


def _missing() -> NoReturn:
    raise LookupError("no gradient")


def product(left: int, right: int) -> Formula:
    """Formula for a matrix product whose factors are the inputs at these positions."""

    def macs(call: GradientShapes) -> int:
        if not any(shape is not None for shape in call.grad_outputs):
            return 0
        *_, rows, columns = call.received
        first, second = call.produced(left), call.produced(right)
        return math.prod(first or (0,)) * columns + math.prod(second or (0,)) * rows

    return macs


def matrix_by_vector(vector: int) -> Formula:
    """Formula for a matrix-vector product: the vector's gradient. The matrix's is an outer
    product, without a sum."""

    def macs(call: GradientShapes) -> int:
        size = call.produced(vector)
        return 0 if size is None else math.prod(call.received) * math.prod(size)

    return macs


def convolution(call: GradientShapes) -> int:
    """Gradients of the data and of the weight: one kernel at each position of the output."""
    count = sum(call.produced(index) is not None for index in (0, 1))
    return count * _one_gradient(call) if count else 0


def one_convolution(call: GradientShapes) -> int:
    """The cost of one gradient of a convolution, where each gradient is an operator of its own."""
    return _one_gradient(call)


def _one_gradient(call: GradientShapes) -> int:
    signature = call.forward.signature
    if "transpose" in signature.type or not signature.data_layout:
        return call.forward_macs
    # TensorFlow's operators consume the weight or the data as well; the gradient comes last.
    given = [shape for shape in call.grad_outputs if shape is not None]
    gradient = given[-1] if len(given) > 1 else call.received
    count = channels(gradient, signature.data_layout)
    return math.prod(gradient) // max(count, 1) * math.prod(call.forward.weight)


def matrix_product(call: GradientShapes) -> int:
    """A matrix product among the backward operators, with factors transposed in any way."""
    result = call.produced(0)
    if result is None or len(result) < 2:
        _missing()
    factors = [None if s is None or len(s) < 2 else s for s in call.grad_outputs]
    # One factor is enough: the first one has the rows of the result, the second one its columns.
    number, factor = next((i, shape) for i, shape in enumerate(factors) if shape is not None)
    outer = result[-1 if number == 1 and len(factors) == 2 else -2]
    if outer not in factor[-2:]:
        raise LookupError("not a product of these")
    return math.prod(result) * factor[-1] * factor[-2] // max(outer, 1)


def fused_attention(call: GradientShapes) -> int:
    """Scores computed again, and the gradients of scores, query, key and value."""
    query, key, value = (call.produced(index) for index in range(3))
    if query is None or key is None or value is None:
        return call.forward_macs * 5 // 2
    pairs = math.prod(query[:-1]) * key[-2]
    return pairs * (3 * query[-1] + 2 * value[-1])


def as_forward(call: GradientShapes) -> int:
    """The cost of one gradient per factor, each that of the forward operator."""
    factors = [shape for shape in call.grad_inputs if shape is not None and len(shape) > 1]
    return len(factors) * call.forward_macs


def recurrent_layer(call: GradientShapes) -> int:
    """One layer and direction: gradients of its data, its state and both of its weights."""
    data, of_data, of_state = (call.produced(index) for index in range(3))
    if of_data is None or of_state is None:
        _missing()
    steps = math.prod(call.received[:-1])
    return steps * (math.prod(of_data) * (1 if data is None else 2) + 2 * math.prod(of_state))


def whole_recurrence(call: GradientShapes) -> int:
    """A network in one operator: gradients of its data and of its weights."""
    return 2 * call.forward_macs


_FUSED = dict.fromkeys(
    (
        "ScaledDotProductFlashAttentionForCpuBackward",
        "ScaledDotProductFlashAttentionBackward",
        "ScaledDotProductEfficientAttentionBackward",
        "ScaledDotProductCudnnAttentionBackward",
        "ScaledDotProductFusedAttentionOverrideableBackward",
    ),
    fused_attention,
)

GRADIENTS: Mapping[str, Formula] = {
    "MmBackward": product(0, 1),
    "BmmBackward": product(0, 1),
    "LinearBackward": product(0, 1),
    "AddmmBackward": product(1, 2),
    "BaddbmmBackward": product(1, 2),
    "AddbmmBackward": as_forward,
    "AddmvBackward": matrix_by_vector(2),
    "MvBackward": matrix_by_vector(1),
    "TrilinearBackward": as_forward,
    "GroupedMmBackward": as_forward,
    "ConvTbcBackward": as_forward,
    "ConvolutionBackward": convolution,
    "MkldnnRnnLayerBackward": recurrent_layer,
    "CudnnRnnBackward": whole_recurrence,
    "MiopenRnnBackward": whole_recurrence,
    **_FUSED,
    "MatMul": matrix_product,
    "BatchMatMul": matrix_product,
    "BatchMatMulV2": matrix_product,
    "BatchMatMulV3": matrix_product,
    "Einsum": as_forward,
    "Conv2DBackpropFilter": one_convolution,
    "Conv2DBackpropInput": one_convolution,
    "Conv3DBackpropFilterV2": one_convolution,
    "Conv3DBackpropInputV2": one_convolution,
    "DepthwiseConv2dNativeBackpropFilter": one_convolution,
    "DepthwiseConv2dNativeBackpropInput": one_convolution,
    # The data's gradient of a transposed convolution is a plain convolution.
    "Conv2D": one_convolution,
    "Conv3D": one_convolution,
    "DepthwiseConv2dNative": one_convolution,
    "CudnnRNNBackprop": whole_recurrence,
    "CudnnRNNBackpropV3": whole_recurrence,
}
"""Formulas by name of a backward operator, without the number that PyTorch appends."""


def needs_produced(formula: Formula) -> bool:
    """Return whether a formula reads the shapes of the gradients that are produced."""
    return formula is not one_convolution


def needs_received(formula: Formula, shapes: Shapes) -> bool:
    """Return whether a formula has to know more shapes of the gradients that are consumed.

    Args:
        shapes: those that are known; None for others.
    """
    is_enough = len(shapes) == 2 and any(s is not None and len(s) >= 2 for s in shapes)
    return formula is not matrix_product or not is_enough


def formula_of(name: str) -> Formula | None:
    """Return the formula of a backward operator; None if it computes no known product."""
    return GRADIENTS.get(name) or GRADIENTS.get(name.rstrip("0123456789"))
