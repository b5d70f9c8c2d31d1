"""FLOPs of products from the shapes of a call: matrices, convolutions, attention, recurrences.

A function takes a :class:`~amanda_tools._operators.signature.CallShapes`, and returns the
floating-point operations of one execution, two for each multiply-accumulate::

    convolution(CallShapes(OpSignature.of(context, "conv2d"), inputs, outputs))

Counted are the products in the mathematical definition of an operator: positions in a padded border
count like others, a causal attention counts in full, the addition of a bias does not count.

Sources: the definitions of the operators; for recurrent cells, Hochreiter & Schmidhuber (1997) and
Cho et al. (2014) in the form of the frameworks' manuals, in which each weight matrix is applied
once per step; for solvers and decompositions, see :mod:`decompositions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from amanda_tools._operators.einsum import einsum
from amanda_tools._operators.signature import CallShapes, Shape, Suffices, broadcast, by_name


def linear(call: CallShapes) -> int:
    """``data @ weight``: one product per element of the data and output feature."""
    if "equation" in call.attributes:
        return einsum(call)
    return 2 * math.prod(call.data) * call.weight_axes("O")


def matmul(call: CallShapes) -> int:
    """Matrix product with vectors, batches and broadcasting; of three inputs the first is an
    addend."""
    attributes = call.attributes
    if "equation" in attributes:
        return einsum(call)
    left, right = call.given[-2:]
    left_flip = bool(attributes.get("transpose_a") or attributes.get("adj_x"))
    right_flip = bool(attributes.get("transpose_b") or attributes.get("adj_y"))
    *left_batch, rows, shared = _matrix(left, flip=left_flip, is_row=True)
    *right_batch, _, columns = _matrix(right, flip=right_flip, is_row=False)
    return 2 * math.prod(broadcast(left_batch, right_batch)) * rows * shared * columns


def sparse_matmul(call: CallShapes) -> int:
    """Product of a sparse matrix, given by its values, with a dense one."""
    columns = call.named("b")[-2 if call.attributes["adjoint_b"] else -1]
    return 2 * math.prod(call.named("a_values")) * columns


def grouped_matmul(call: CallShapes) -> int:
    """Products of groups of rows or columns, which end at given offsets: each with its matrix.

    Of two matrices without a batch, the groups are parts of the axis over which is summed.
    """
    left, right = call.given[:2]
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]


def rows_by_matrix(call: CallShapes) -> int:
    """A product whose first input has the rows, and whose other inputs may be packed or scales."""
    return 2 * math.prod(call.output) * call.given[0][-1]


def packed(call: CallShapes) -> int:
    """A linear operator or convolution whose weight is in an object of PyTorch."""
    held = next(value for value in call.attributes.values() if hasattr(value, "unpack"))
    weight: Sequence[int] = held.unpack()[0].shape
    source = call.given[0] if "transpose" in call.signature.type else call.output
    return 2 * math.prod(source) * math.prod(weight[1:])


def chain(call: CallShapes) -> int:
    """Product of several matrices in the cheapest order; the first and last may be vectors."""
    first, *others = call.given
    sizes = [*((1, *first) if len(first) == 1 else first), *(s[-1] for s in others)]
    if others and len(others[-1]) == 1:
        sizes[-1] = 1
    count = len(sizes) - 1
    costs: dict[tuple[int, int], int] = {(i, i): 0 for i in range(count)}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            costs[i, j] = min(
                costs[i, k] + costs[k + 1, j] + 2 * sizes[i] * sizes[k + 1] * sizes[j + 1]
                for k in range(i, j)
            )
    return costs[0, count - 1]


def power(call: CallShapes) -> int:
    """Power of a matrix by repeated squares, of its inverse for a negative exponent."""
    exponent = int(call.attributes["n"])
    bits, count = f"{abs(exponent):b}", abs(exponent).bit_length()
    products = max(count - 1, 0) + max(bits.count("1") - 1, 0) + (exponent < 0)
    return 2 * products * math.prod(call.given[0]) * call.given[0][-1]


def covariance(call: CallShapes) -> int:
    """Products of all rows with each other; of a vector with itself."""
    rows = call.given[0][0] if len(call.given[0]) > 1 else 1
    return 2 * rows * math.prod(call.given[0])


def dot(call: CallShapes) -> int:
    """Product of two vectors, or of vectors in pairs."""
    return 2 * math.prod(broadcast(*call.given[:2]))


def inner(call: CallShapes) -> int:
    """Products of all rows of one factor with all rows of the other."""
    left, right = call.given
    if not left or not right:
        return 2 * math.prod(left) * math.prod(right)
    return 2 * (math.prod(left) * math.prod(right) // max(left[-1], 1))


def tensordot(call: CallShapes) -> int:
    """Contraction over pairs of axes."""
    left, right = call.given[:2]
    axes: Sequence[int] = call.attributes["dims_self"]
    shared = math.prod([left[axis] for axis in axes])
    return 2 * (math.prod(left) * math.prod(right) // max(shared, 1))


def bilinear(call: CallShapes) -> int:
    """``x1 @ weight``, and the result times ``x2``."""
    first = call.inputs[0] or ()
    features, _, size = call.weight
    batch = math.prod(first[:-1])
    return 2 * batch * (math.prod(call.weight) + features * size)


def grid(call: CallShapes) -> int:
    """Each position times a matrix, which has a column more."""
    return 2 * math.prod(call.output) * (call.output[-1] + 1)


def convolution(call: CallShapes) -> int:
    """Per output element one kernel over the input channels of its group."""
    features = "O" if "O" in call.signature.weight_layout else "CM"
    return 2 * (
        math.prod(call.output) * math.prod(call.weight) // max(call.weight_axes(features), 1)
    )


def transposed_convolution(call: CallShapes) -> int:
    """Per input element one kernel over the output channels of its group."""
    features = "I" if "I" in call.signature.weight_layout else "CM"
    return 2 * (math.prod(call.data) * math.prod(call.weight) // max(call.weight_axes(features), 1))


def general_convolution(call: CallShapes) -> int:
    """``torch.convolution``, whose first weight axis is that of the direction it runs in."""
    data, weight = call.given[:2]
    source = data if call.attributes.get("transposed") else call.output
    return 2 * (math.prod(source) * math.prod(weight) // max(weight[0], 1))


def temporal_convolution(call: CallShapes) -> int:
    """``conv_tbc``: data (time, batch, channels), weight (width, in, out)."""
    weight = call.named("weight")
    return 2 * math.prod(call.output) * weight[0] * weight[1]


def attention(call: CallShapes) -> int:
    """Scores of all queries with all keys, and the weighted sum of the values."""
    names = call.signature.names
    if "qkv_weight" in names:
        return projected_attention(call)
    query, key, value = (call.named(name) for name in ("query", "key", "value"))
    batch = math.prod(broadcast(query[:-2], key[:-2]))
    return 2 * batch * query[-2] * key[-2] * (query[-1] + value[-1])


def projected_attention(call: CallShapes) -> int:
    """Multi-head attention with its four projections in one operator."""
    source = call.all_named("query") or call.all_named("src")
    key = (call.all_named("key") or source)[0]
    *batch, length, width = source[0]
    size, keys = math.prod(batch), key[-2]
    projections = size * width * width * (2 * length + 2 * keys)
    return 2 * (projections + 2 * size * length * keys * width)


def encoder_layer(call: CallShapes) -> int:
    """A transformer encoder layer in one operator: attention and two linear layers."""
    source = call.named("src")
    weights: list[Shape] = [call.named("ffn_weight_1"), call.named("ffn_weight_2")]
    tokens = math.prod(source[:-1])
    return projected_attention(call) + 2 * tokens * sum(map(math.prod, weights))


def recurrent(call: CallShapes) -> int:
    """Each weight matrix of each layer and direction, once per step."""
    data = call.named("input") if "input" in call.signature.names else call.given[0]
    weights: list[Shape] = [shape for shape in call.all_named("params") if len(shape) == 2]
    weights += [*call.all_named("W"), *call.all_named("R")]  # ONNX, with an axis of directions
    if not weights and call.signature.weight is not None:
        weights = [call.weight]
        # TensorFlow's BlockLSTM: the data (time, batch, features) come after the sequence length.
        data = next(shape for shape in call.inputs if shape is not None and len(shape) == 3)
    if not weights:
        raise LookupError("no weight matrices")
    return 2 * (math.prod(data) // max(data[-1], 1)) * sum(map(math.prod, weights))


def recurrent_cell(call: CallShapes) -> int:
    """Each weight matrix, once."""
    weights = call.all_named("w_ih") + call.all_named("w_hh")
    if not weights:
        weights = [call.weight]
    data = call.given[0]
    return 2 * math.prod(data[:-1]) * sum(map(math.prod, weights))


def _matrix(shape: Shape, *, flip: bool, is_row: bool) -> Sequence[int]:
    """Return the shape of a factor as (*batch, rows, columns)."""
    if len(shape) == 1:
        return (1, *shape) if is_row else (*shape, 1)
    return (*shape[:-2], shape[-1], shape[-2]) if flip else shape


_PACKED = "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d"

FORMULAS = by_name({
    linear: "linear",
    matmul: "matmul linalg_matmul addmm addmv addbmm mv _addmm_activation",
    einsum: "einsum",
    sparse_matmul: "sparse_tensor_dense_mat_mul",
    grouped_matmul: "grouped_mm",
    dot: "dot vdot linalg_vecdot",
    rows_by_matrix: "_int_mm _scaled_mm _weight_int8pack_mm _weight_int4pack_mm",
    packed: " ".join(
        f"packed_{kind}{suffix}"
        for kind in _PACKED.split()
        for suffix in ("", "_relu", "_dynamic", "_relu_dynamic")
    ),
    chain: "linalg_multi_dot chain_matmul",
    power: "linalg_matrix_power matrix_power",
    covariance: "cov corrcoef",
    inner: "inner",
    tensordot: "tensordot",
    bilinear: "bilinear",
    grid: "affine_grid_generator",
    general_convolution: "conv _convolution",
    convolution: "conv1d conv2d conv3d",
    temporal_convolution: "conv_tbc",
    transposed_convolution: "conv_transpose1d conv_transpose2d conv_transpose3d",
    attention: "attention",
    encoder_layer: "_transformer_encoder_layer_fwd",
    recurrent: "rnn lstm gru",
    recurrent_cell: "rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell",
})  # fmt: skip
"""Formulas by canonical type."""

READING_OUTPUTS = frozenset(
    {convolution, general_convolution, grid, temporal_convolution, rows_by_matrix, packed}
)
"""Formulas that read the shapes of the outputs."""

SUFFICING: Mapping[Callable[[CallShapes], int], Suffices] = {
    convolution: lambda signature, inputs: (
        signature.weight is not None and inputs[signature.weight] is not None
    )
}
"""By formula, whether these shapes of inputs are all that it reads."""
