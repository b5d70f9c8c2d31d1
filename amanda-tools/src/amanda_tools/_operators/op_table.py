"""The table of operators: what the tools know of each canonical type.

It has one row for each type, and a column for each question; a tool reads its column::

    row_of("conv2d").flops          # the formula of its FLOPs
    row_of("reshape").group         # "view"
    set_row("my_gate", like="relu") # a row of somebody else's

A type without a row, such as a custom operator, is unknown, and tools say so. Rows are given here
column by column.

The drivers have small tables of views as well. Those are about other questions: through which
operators a variable's value is followed (TensorFlow), and which outputs autograd treats as aliases
(PyTorch). The names of canonical attributes are in :mod:`amanda.tools.canonical`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from amanda import OpContext
from amanda.errors import close_matches
from amanda.tools.description import OpDescription
from amanda_tools._operators import cost, gradient_cost
from amanda_tools._operators.decompositions import COUNTS
from amanda_tools._operators.signature import CallShapes, Suffices


@attrs.frozen
class FlopFormula:
    """The FLOP formula of a type.

    Attributes:
        formula: the function, see :func:`amanda_tools.flops.register`.
        reads_outputs: False if it does not read ``call.outputs``.
        suffices: given the signature and the shapes of the inputs, None for unknown ones: True if
            it needs no other of these. None for a formula that may read each of them.
        source: where it comes from, as results show it.
    """

    formula: Callable[[CallShapes], int | None]
    reads_outputs: bool = True
    source: str = "formula"
    suffices: Suffices | None = None

    def flops(self, call: CallShapes) -> int | None:
        """Return the FLOPs of a call; None for a form that the formula does not know."""
        try:
            return self.formula(call)
        except (LookupError, TypeError, ValueError, StopIteration):
            return None


@attrs.frozen
class OperatorRow:
    """What the tools know of one type.

    Attributes:
        group: what it computes, one of :data:`GROUPS`; "" for a product or what is not known.
        traits: its properties, of :data:`TRAITS`.
        bounds: lower and upper bound of its outputs, where it saturates, else None.
        flops: the formula of its FLOPs; None without one.
        path: the extraction rule of ``path``, or the name of one of ``path``'s own; None without.
        default_of: tools that act on it unless told otherwise: ``quantize``, or ``prune:tile`` for
            a method.
    """

    group: str = ""
    traits: frozenset[str] = frozenset()
    bounds: tuple[float, float] | None = None
    flops: FlopFormula | None = None
    path: Callable[..., Any] | str | None = None
    default_of: frozenset[str] = frozenset()


# -- the columns, with the rows of this package ------------------------------------

GROUPS: Mapping[str, str] = {
    "view": """
        H T adjoint alias as_strided atleast_1d atleast_2d atleast_3d broadcast_to chunk
        conj data detach diagonal dsplit expand expand_as flatten getitem hsplit identity
        imag indices mH mT movedim moveaxis narrow permute positive ravel real resolve_conj
        resolve_neg reshape reshape_as select slice split split_with_sizes squeeze
        stop_gradient swapaxes swapdims t tensor_split transpose type_as unbind unflatten
        unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze values view
        view_as view_as_complex view_as_real vsplit contiguous to float double half bfloat16
        cpu cuda pin_memory lift_fresh type unsafe_view reshape_alias squeeze_multiple
        strided_slice
    """,
    "elementwise": """
        abs absolute acos acosh add addcdiv addcmul addr angle arccos arccosh arcsin arcsinh
        arctan arctan2 arctanh asin asinh assign assign_add assign_sub atan atan2 atanh
        bias_add bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
        bitwise_xor bool byte bitcast cdouble ceil celu cfloat chalf char clamp clamp_max
        clamp_min clip clone complex conj_physical copy copysign cos cosh deg2rad digamma
        div divide elu elu_ eq erf erfc erfinv exp exp2 expm1 fix float_power floor
        floor_divide fmax fmin fmod frac frexp gcd ge gelu ger glu greater greater_equal gt
        hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 iand identity_n idiv
        igamma igammac imod imul int ior isclose isfinite isin isinf isnan isneginf isposinf
        isreal isub ixor lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p
        log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
        logit long lt maximum minimum mish mod mul multiply mvlgamma nan_to_num ne neg
        negative nextafter not_equal outer polar polygamma pow prelu rad2deg reciprocal relu
        relu6 remainder round rrelu rrelu_with_noise rsqrt rsub selu sgn short sigmoid sign
        signbit silu sin sinc sinh softplus softshrink softsign special_digamma special_entr
        special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
        special_expm1 special_gammainc special_gammaincc special_gammaln special_i0
        special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
        special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
        special_round special_sinc special_xlog1py special_xlogy special_zeta sqrt square
        squared_difference sub subtract swish tan tanh threshold to_copy true_divide trunc
        where xlogy
    """,
    "moving": """
        affine_grid_generator argsort argwhere assert boolean_mask bucketize cat
        channel_shuffle col2im column_stack combinations concat_offset constant_pad_nd
        count_nonzero crop_and_resize diag diag_embed diagflat diagonal_scatter diff dstack
        dynamic_partition dynamic_stitch embedding embedding_bag expand_copy fill
        fill_diagonal flip fliplr flipud gather gather_nd hstack im2col index_add index_copy
        index_fill index_put index_reduce index_select invert_permutation kthvalue
        masked_fill masked_scatter masked_select matrix_band_part matrix_set_diag msort
        narrow_copy new new_tensor nonzero nonzero_static one_hot pad pad_sequence
        permute_copy pixel_shuffle pixel_unshuffle put read reflection_pad1d
        reflection_pad2d reflection_pad3d renorm repeat repeat_interleave replication_pad1d
        replication_pad2d replication_pad3d reverse_sequence roll rot90 row_stack scatter
        scatter_add scatter_nd scatter_reduce searchsorted segment_reduce segment_sum
        select_scatter set setitem shape shape_n size rank broadcast_gradient_args
        slice_scatter sort space_to_depth depth_to_space batch_to_space_nd space_to_batch_nd
        sparse_mask split_with_sizes_copy stack take take_along_dim tile topk tril triu
        tril_indices triu_indices unique unique_consecutive unique2 unfold_copy vstack
        grid_sampler grid_sampler_2d grid_sampler_3d upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d
        upsample_trilinear3d pad_packed_sequence pack_padded_sequence resize resize_as zero
        batch_norm_elemt to_dense to_sparse coalesce broadcast_tensors meshgrid
        cartesian_prod block_diag tensor from_numpy as_tensor asarray frombuffer
    """,
    "reducing": """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices
        adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices all allclose amax
        amin aminmax any argmax argmin avg_pool1d avg_pool2d avg_pool3d bincount cross
        cummax cummin cumprod cumsum cumulative_trapezoid dist equal fractional_max_pool2d
        fractional_max_pool3d fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices frobenius_norm gradient hash_tensor histc
        histogram in_top_k l2_loss linalg_cross linalg_matrix_norm linalg_norm
        linalg_vector_norm logcumsumexp logsumexp lp_pool1d lp_pool2d max max_pool1d
        max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
        max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mean median min mode
        nanmean nanmedian nanquantile nansum norm norm_except_dim nuclear_norm prod quantile
        special_logsumexp std std_mean sum sum_to_size trace trapezoid trapz var var_mean
    """,
    "normalizing": """
        batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_stats group_norm instance_norm layer_norm local_response_norm log_softmax
        native_batch_norm native_group_norm native_norm rms_norm safe_softmax softmax
        softmin special_log_softmax special_softmax fused_layer_norm sync_batch_norm
        weight_norm weight_norm_interface
    """,
    "loss": """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
        cosine_similarity cross_entropy_loss gaussian_nll_loss hinge_embedding_loss
        huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd pairwise_distance
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    """,
    "drawing": """
        alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout
        feature_dropout geometric log_normal multinomial native_dropout normal poisson rand
        rand_like randint randint_like randn randn_like random randperm
        stateless_random_uniform uniform random_shuffle truncated_normal
        stateless_truncated_normal
    """,
    "making": """
        arange bartlett_window blackman_window empty empty_like empty_permuted empty_strided
        eye full full_like hamming_window hann_window kaiser_window linspace logspace
        new_empty new_empty_strided new_full new_ones new_zeros ones ones_like range
        scalar_tensor vander zeros zeros_like const constant placeholder no_op variable
        read_variable assign_variable assign_add_variable assign_sub_variable var_handle
        variable_shape var_is_initialized
    """,
    "quantizing": """
        choose_qparams_optimized dequantize fake_quantize_per_channel_affine
        fake_quantize_per_tensor_affine fused_moving_avg_obs_fake_quant int_repr
        quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
    """,
    "calling": """
        CheckpointFunction has_compatible_shallow_copy_type parse_to call cond if while case
        stateful_partitioned_call partitioned_call stateless_if stateless_while no_gradient
        placeholder_with_default prevent_gradient control_trigger merge switch enter exit
        next_iteration loop_cond
    """,
}
"""What types compute. All of these count no floating-point operation, as papers that compare models
count: only sums of products do.

- view: their outputs may share the memory of their input;
- moving: they move, select or pad elements; drawing: they draw random numbers;
- making: their outputs depend on no tensor, or on its shape;
- calling: they run other operators, which count for themselves, or only order them.
"""

_FAMILIES = (
    # Steps of optimizers, element by element.
    "_foreach_", "_fused_", "_amp_", "apply_", "resource_apply_", "sparse_apply_",
    "resource_sparse_apply_",
    # Checks, and operators that pass values on: datasets, lists, tables, variables.
    "_assert", "anonymous_", "iterator_", "make_iterator", "optional_", "tensor_list_",
    "tensor_array_", "lookup_table_", "resource_scatter_", "resource_gather", "scatter_nd_",
    "stateless_random_", "stateful_", "segment_", "sparse_segment_", "unsorted_segment_",
)  # fmt: skip
"""Prefixes of further types that count no floating-point operation."""

TRAITS: Mapping[str, str] = {
    "passes_values": """
        cat embedding flip gather index_select masked_select pixel_shuffle pixel_unshuffle
        relu repeat repeat_interleave roll scatter slice_scatter sort stack take
        take_along_dim tile topk where clone copy threshold clamp_min clamp_max hardtanh
        relu6 max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d amax amin max min maximum minimum abs neg identity_n
        column_stack hstack vstack dstack tril triu
    """,
    "places_values": """
        const constant constant_pad_nd empty empty_like empty_permuted empty_strided fill
        fill_diagonal full full_like index_fill masked_fill new new_empty new_empty_strided
        new_full new_tensor nan_to_num pad set setitem tensor from_numpy as_tensor read
        read_variable
    """,
    "no_activation": """
        const constant placeholder rank read_variable shape shape_n size variable_shape
    """,
    "uninitialized": """
        empty empty_like empty_permuted empty_strided new_empty new_empty_strided
    """,
    "takes_sizes": """
        shape shape_n size rank zeros_like ones_like empty_like full_like rand_like
        randn_like new_zeros new_ones new_empty new_full
    """,
    "selects_rows": """
        embedding embedding_bag index_select gather gather_nd take
    """,
    "reads_variable": """
        read_variable identity cast
    """,
    "queries_variable": """
        variable_shape var_is_initialized is_variable_initialized
    """,
    "scales_scores": """
        add sub mul div masked_fill where to float type cast identity reshape view clamp
    """,
    "multiplies_activations": """
        matmul einsum
    """,
    "recurrent": """
        lstm gru rnn lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    "allocates_nothing": """
        identity_n read_variable expand_dims
    """,
    "converts": """
        bfloat16 double float half to type type_as
    """,
}
"""Properties of types.

- passes_values: its outputs are elements of its inputs, or zero: it makes no NaN from numbers. So
  are those of views that do not convert;
- places_values: it writes values that the program gave, or leaves memory as it is;
- no_activation: its outputs are values of parameters, constants or sizes. Nor are those of views;
- uninitialized: its output is what the memory happened to hold;
- takes_sizes: its output depends on the shape of its input only;
- selects_rows: it selects elements of a weight;
- reads_variable: it passes a variable's value on to the operators that use it;
- queries_variable: it takes a variable's handle without reading or changing its value;
- scales_scores: it may stand between the product of queries and keys and the softmax;
- multiplies_activations: a product that counts as ``linear`` if one of the factors is a parameter;
- recurrent: a network over steps, or one step of it, with several weights;
- allocates_nothing: its outputs take no memory of their own in a graph, as those of views;
- converts: it may convert to an element type with a smaller range, which can make infinities.
"""

_BACKWARD_TRAITS: Mapping[str, str] = {
    "passes_values": """
        alias_backward cat_backward clone_backward detach_backward flip_backward
        narrow_backward permute_backward reshape_backward reshape_alias_backward
        select_backward slice_backward split_backward squeeze_backward stack_backward
        t_backward transpose_backward unbind_backward unsafe_split_backward
        unsafe_view_backward unsqueeze_backward view_backward relu_backward
        max_pool2d_with_indices_backward accumulate_grad
    """,
}
"""Properties of backward types. The operator that reads a sum of gradients checks it."""

_BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "softmax"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), (-1.0, 1.0)),
    "relu6": (-math.inf, 6.0),
}
"""Lower and upper bounds of the outputs of saturating types."""

_PATH_RULES: Mapping[str, str] = {
    "passing": """
        identity identity_n clone contiguous to float double half bfloat16 type detach alias
        reshape view flatten squeeze unsqueeze unflatten ravel view_as reshape_as
        unsafe_view lift_fresh cpu cuda bias_add
    """,
    "elementwise": """
        relu6 leaky_relu elu selu celu gelu silu swish mish sigmoid hardsigmoid hardswish
        hardtanh tanh softplus softsign prelu erf erfc log_sigmoid threshold hardshrink
        softshrink log2 exp2 exp log log1p expm1 sqrt rsqrt square pow reciprocal abs neg
        sin cos clamp clip clamp_min clamp_max dropout dropout2d dropout3d feature_dropout
        alpha_dropout native_dropout softmax log_softmax safe_softmax layer_norm rms_norm
        group_norm instance_norm local_response_norm mul div true_divide maximum minimum
        squared_difference div_no_nan floor_divide addcmul atan2 mul_no_nan real_div
    """,
    "moving": """
        permute transpose t numpy_T T mT adjoint H swapaxes swapdims movedim moveaxis select
        narrow slice getitem split split_with_sizes chunk tensor_split unsafe_split
        unsafe_chunk unbind stack cat hstack vstack dstack column_stack expand expand_as
        broadcast_to repeat tile flip fliplr flipud roll rot90 index_select gather gather_nd
        take take_along_dim pad constant_pad_nd reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle
        pixel_unshuffle channel_shuffle unfold im2col diagonal diag_embed tril triu where
        masked_fill masked_select repeat_interleave space_to_depth depth_to_space
        space_to_batch_nd batch_to_space_nd upsample_nearest1d upsample_nearest2d
        upsample_nearest3d as_strided matrix_band_part boolean_mask reverse_sequence
        snapshot strided_slice
    """,
}
"""Extraction rules of :mod:`amanda_tools.path.rules` that hold for many types, by name."""

_LAYERS = f"""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear
    {TRAITS["recurrent"]}
"""
"""The types of layers that are mostly products with weights."""

_DEFAULTS: Mapping[str, str] = {
    "inject": "conv2d linear matmul attention",
    "quantize": _LAYERS,
    "prune:magnitude": _LAYERS,
    "prune:nm": _LAYERS,
    "prune:tile": _LAYERS,
    "prune:channel": "conv2d",
    "prune:activation": "conv2d",
    "prune:attention": "attention softmax",
}
"""The types that a tool acts on unless told otherwise; a matrix product with a weight counts as a
linear one."""


# -- the table ---------------------------------------------------------------------

_Columns = dict[str, Any]
"""Some attributes of an :class:`OperatorRow`, by name."""


def _fill(forward: dict[str, _Columns], backward: dict[str, _Columns]) -> None:
    """Add the rows of this package to the tables of forward and backward types."""

    def put(kinds: Iterable[str], **columns: Any) -> None:
        for kind in kinds:
            forward.setdefault(kind, {}).update(columns)

    for kind in dict.fromkeys(" ".join(_DEFAULTS.values()).split()):
        tools = (tool for tool, kinds in _DEFAULTS.items() if kind in kinds.split())
        put([kind], default_of=frozenset(tools))
    for group, kinds in GROUPS.items():
        put(kinds.split(), group=group)
    for table, traits in ((forward, TRAITS), (backward, _BACKWARD_TRAITS)):
        for trait, kinds in traits.items():
            for kind in kinds.split():
                row = table.setdefault(kind, {})
                row["traits"] = row.get("traits", frozenset()) | {trait}
    for kind, bounds in _BOUNDS.items():
        put([kind], bounds=bounds)
    for rule, kinds in _PATH_RULES.items():
        put(kinds.split(), path=rule)
    for kind, formula in {**cost.FORMULAS, **COUNTS}.items():
        reads_outputs = formula in cost.READING_OUTPUTS
        suffices = cost.SUFFICING.get(formula)
        found = FlopFormula(formula, reads_outputs, suffices=suffices)
        forward.setdefault(kind, {})["flops"] = found
    for kind, gradient in gradient_cost.FORMULAS.items():
        reads_outputs = gradient not in gradient_cost.READING_INPUTS
        suffices = gradient_cost.SUFFICING.get(gradient)
        found = FlopFormula(gradient, reads_outputs, suffices=suffices)
        backward.setdefault(kind, {})["flops"] = found


_FORWARD: dict[str, _Columns] = {}
_BACKWARD: dict[str, _Columns] = {}
_fill(_FORWARD, _BACKWARD)


def row_of(kind: str, *, backward: bool = False) -> OperatorRow:
    """Return the row of a canonical type, or of a framework's own name; an empty one if unknown."""
    return OperatorRow(**(_BACKWARD if backward else _FORWARD).get(kind, {}))


def set_row(name: str, *, backward: bool = False, like: str = "", **columns: Any) -> None:
    """Add a row to the table, or set columns of the row that a type has.

    Args:
        name: the canonical type; the framework's own name for an operator without one.
        backward: True for the type or name of a backward operator.
        like: a type whose columns the row begins with; "" for those that it has.
        columns: attributes of :class:`OperatorRow`. A function as ``flops`` is a formula that reads
            the shapes of the outputs, too.

    Raises:
        TypeError: there is no such column, or `name` is no text.
        ValueError: there is no such group, trait or type to be like.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an operator is text, not {name!r}")
    table = _BACKWARD if backward else _FORWARD
    if like:
        _check(like, table, "type")
    if columns.get("group"):
        _check(columns["group"], GROUPS, "group")
    if "traits" in columns:
        columns["traits"] = frozenset(columns["traits"])
    for trait in columns.get("traits", ()):
        _check(trait, TRAITS, "trait")
    if callable(flops := columns.get("flops")):
        columns["flops"] = FlopFormula(flops)
    columns = {**table.get(like or name, {}), **columns}
    OperatorRow(**columns)
    table[name] = columns


def _check(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        guess = close_matches(name, list(known))
        raise ValueError(f"there is no {what} {name!r} in the table of operators{guess}")


def default_types(tool: str) -> tuple[str, ...]:
    """Return the types that a tool acts on unless told otherwise: of ``quantize``, ``prune:nm``."""
    return tuple(kind for kind, row in _FORWARD.items() if tool in row.get("default_of", ()))


# -- questions to several columns --------------------------------------------------


def is_free(kind: str) -> bool:
    """Return True if a canonical type counts no floating-point operation."""
    if row_of(kind.lstrip("_")).group:
        return True
    return kind.startswith(_FAMILIES) or kind.endswith(("_dataset", "_summary"))


_PER_ELEMENT = {"elementwise": 1, "reducing": 1, "loss": 1, "normalizing": 5}
"""Operations for each element of the largest tensor, by group. A softmax has five: the maximum, a
difference, an exponential, a sum and a quotient; a norm has about as many."""


def elementwise_formula(kind: str) -> FlopFormula | None:
    """Return the formula of work that counts zero by convention; None for types without any.

    Args:
        kind: canonical type, also that of a backward operator.
    """
    each = _PER_ELEMENT.get(row_of(kind.removesuffix("_backward").lstrip("_")).group)
    if each is None:
        return None
    return FlopFormula(
        lambda call: (
            each * max(math.prod(s) for s in (*call.inputs, *call.outputs) if s is not None)
        )
    )


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def is_free_name(name: str) -> bool:
    """Return True if operators of this name in a framework (``StridedSlice``) count no FLOP."""
    return is_free(_WORD.sub("_", re.sub(r"V\d+$", "", name)).lower())


def is_free_backward(kind: str, name: str) -> bool:
    """Return True if a backward operator counts no floating-point operation.

    Args:
        kind: its canonical type.
        name: the framework's name for it.
    """
    is_sum = kind == "accumulate_grad"
    return is_sum or is_free(kind.removesuffix("_backward")) or is_free_name(name)


def is_view(kind: str) -> bool:
    """Return True if the outputs of a type may share the memory of its input."""
    return row_of(kind).group == "view"


def has_activation(kind: str) -> bool:
    """Return True if the outputs of a type are activations."""
    row = row_of(kind)
    return row.group != "view" and "no_activation" not in row.traits


def can_produce(op: OpDescription) -> bool:
    """Return True if an operator can produce a NaN or infinity from finite inputs."""
    row = row_of(op.type, backward=op.direction == "backward")
    if op.direction == "forward" and row.group == "view":
        return "converts" in row.traits
    return "passes_values" not in row.traits and "places_values" not in row.traits


def updates_a_value(context: OpContext, name: str) -> bool:
    """Return True if the operator writes into a parameter or buffer: a batch norm counts batches.

    Args:
        name: the framework's name for the operator.
    """
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place and bool(context.get_inputs()) and context.get_value(0) is not None
