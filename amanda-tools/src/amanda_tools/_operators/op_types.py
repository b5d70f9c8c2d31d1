"""Sets of canonical operator types: views, free of arithmetic, unable to produce NaN.

A type that is in none of the sets (a decomposition, a Fourier transform, a custom operator) is
unknown, and tools say so.

The drivers have small tables of views as well. Those are about other questions: through which
operators a variable's value is followed (TensorFlow), and which outputs autograd treats as aliases
(PyTorch).
"""

from __future__ import annotations

import re

from amanda import OpContext
from amanda.tools.description import OpDescription

VIEWS = frozenset(
    """
    H T adjoint alias as_strided atleast_1d atleast_2d atleast_3d broadcast_to chunk
    conj data detach diagonal dsplit expand expand_as flatten getitem hsplit identity imag
    indices mH mT movedim moveaxis narrow permute positive ravel real resolve_conj
    resolve_neg reshape reshape_as select slice split split_with_sizes squeeze stop_gradient
    swapaxes swapdims t tensor_split transpose type_as unbind unflatten unfold unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze values view view_as view_as_complex
    view_as_real vsplit contiguous to float double half bfloat16 cpu cuda pin_memory lift_fresh
    type unsafe_view reshape_alias squeeze_multiple strided_slice
    """.split()
)
"""Types whose outputs may share the memory of their input."""

WITHOUT_ACTIVATION = VIEWS | frozenset(
    "const constant placeholder rank read_variable shape shape_n size variable_shape".split()
)
"""Types whose outputs are not activations: views, values of parameters, constants, and sizes."""

_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul addr angle arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh asin asinh assign assign_add assign_sub atan atan2 atanh bias_add bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool byte bitcast
    cdouble ceil celu cfloat chalf char clamp clamp_max clamp_min clip clone complex conj_physical
    copy copysign cos cosh deg2rad digamma div divide elu elu_ eq erf erfc erfinv exp exp2 expm1 fix
    float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu ger glu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 iand identity_n
    idiv igamma igammac imod imul int ior isclose isfinite isin isinf isnan isneginf isposinf isreal
    isub ixor lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit long lt maximum
    minimum mish mod mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal outer
    polar polygamma pow prelu rad2deg reciprocal relu relu6 remainder round rrelu rrelu_with_noise
    rsqrt rsub selu sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign
    special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
    special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0
    special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
    special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round
    special_sinc special_xlog1py special_xlogy special_zeta sqrt square squared_difference sub
    subtract swish tan tanh threshold to_copy true_divide trunc where xlogy
"""

_MOVING = """
    affine_grid_generator argsort argwhere assert boolean_mask bucketize cat channel_shuffle
    col2im column_stack combinations concat_offset constant_pad_nd count_nonzero crop_and_resize
    diag diag_embed diagflat diagonal_scatter diff dstack dynamic_partition dynamic_stitch
    embedding embedding_bag expand_copy fill fill_diagonal flip fliplr flipud gather gather_nd
    hstack im2col index_add index_copy index_fill index_put index_reduce index_select
    invert_permutation kthvalue masked_fill masked_scatter masked_select matrix_band_part
    matrix_set_diag msort narrow_copy new new_tensor nonzero nonzero_static one_hot pad
    pad_sequence permute_copy pixel_shuffle pixel_unshuffle put read reflection_pad1d
    reflection_pad2d reflection_pad3d renorm repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reverse_sequence roll rot90 row_stack scatter scatter_add
    scatter_nd scatter_reduce searchsorted segment_reduce segment_sum select_scatter set setitem
    shape shape_n size rank broadcast_gradient_args slice_scatter sort space_to_depth
    depth_to_space batch_to_space_nd
    space_to_batch_nd sparse_mask split_with_sizes_copy stack take take_along_dim tile topk
    tril triu tril_indices triu_indices unique unique_consecutive unique2 unfold_copy vstack
    grid_sampler grid_sampler_2d grid_sampler_3d upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d
    upsample_trilinear3d pad_packed_sequence pack_padded_sequence resize resize_as zero
    batch_norm_elemt to_dense to_sparse coalesce broadcast_tensors meshgrid cartesian_prod
    block_diag tensor from_numpy as_tensor asarray frombuffer
"""

_REDUCING = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices all allclose amax amin
    aminmax any argmax argmin avg_pool1d avg_pool2d avg_pool3d bincount cross cummax cummin
    cumprod cumsum cumulative_trapezoid dist equal fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices frobenius_norm gradient
    hash_tensor histc histogram in_top_k l2_loss linalg_cross linalg_matrix_norm linalg_norm
    linalg_vecdot linalg_vector_norm logcumsumexp logsumexp lp_pool1d lp_pool2d max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mean median min mode nanmean
    nanmedian nanquantile nansum norm norm_except_dim nuclear_norm prod quantile special_logsumexp
    std std_mean sum sum_to_size trace trapezoid trapz var var_mean
"""

_NORMALIZING = """
    batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats
    group_norm instance_norm layer_norm local_response_norm log_softmax
    native_batch_norm native_group_norm native_norm rms_norm safe_softmax softmax softmin
    special_log_softmax special_softmax fused_layer_norm sync_batch_norm weight_norm
    weight_norm_interface
"""

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity
    cross_entropy_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
    nll_loss_nd pairwise_distance poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss
"""

_DRAWING = """
    alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout
    feature_dropout geometric log_normal multinomial native_dropout normal poisson rand rand_like
    randint randint_like randn randn_like random randperm stateless_random_uniform uniform
    random_shuffle truncated_normal stateless_truncated_normal
"""

_MAKING = """
    arange bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye full
    full_like hamming_window hann_window kaiser_window linspace logspace new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor vander
    zeros zeros_like const constant placeholder no_op variable read_variable assign_variable
    assign_add_variable assign_sub_variable var_handle variable_shape var_is_initialized
"""

_QUANTIZING = """
    choose_qparams_optimized dequantize fake_quantize_per_channel_affine
    fake_quantize_per_tensor_affine fused_moving_avg_obs_fake_quant int_repr quantize_per_channel
    quantize_per_tensor quantize_per_tensor_dynamic
"""

_CALLING = """
    CheckpointFunction has_compatible_shallow_copy_type parse_to call cond if while case
    stateful_partitioned_call partitioned_call
    stateless_if stateless_while no_gradient placeholder_with_default prevent_gradient
    control_trigger merge switch enter exit next_iteration loop_cond
"""
"""Types that run other operators, which count for themselves, or only order them."""

FREE = VIEWS.union(
    *(
        text.split()
        for text in (
            _ELEMENTWISE,
            _MOVING,
            _REDUCING,
            _NORMALIZING,
            _LOSSES,
            _DRAWING,
            _MAKING,
            _QUANTIZING,
            _CALLING,
        )
    )
)
"""Types that count no floating-point operation, as papers that compare models count.

Only sums of products count, not operators that compute element by element, move, select, reduce,
normalize or draw numbers.
"""


_FREE_FAMILIES = (
    # Steps of optimizers, element by element.
    "_foreach_", "_fused_", "_amp_", "apply_", "resource_apply_", "sparse_apply_",
    "resource_sparse_apply_",
    # Checks, and operators that pass values on: datasets, lists, tables, variables.
    "_assert", "anonymous_", "iterator_", "make_iterator", "optional_", "tensor_list_",
    "tensor_array_", "lookup_table_", "resource_scatter_", "resource_gather", "scatter_nd_",
    "stateless_random_", "stateful_", "segment_", "sparse_segment_", "unsorted_segment_",
)  # fmt: skip
"""Prefixes of further types that count none."""

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def is_free_name(name: str) -> bool:
    """True if operators of this name in a framework (``StridedSlice``) count no operation."""
    return is_free(_WORD.sub("_", re.sub(r"V\d+$", "", name)).lower())


def is_free(kind: str) -> bool:
    """True if a canonical type counts no operation."""
    if kind.lstrip("_") in FREE:
        return True
    return kind.startswith(_FREE_FAMILIES) or kind.endswith(("_dataset", "_summary"))


def is_free_backward(kind: str, name: str) -> bool:
    """True if a backward operator counts no operation.

    Args:
        kind: its canonical type.
        name: the framework's name for it.
    """
    is_sum = kind == "accumulate_grad"
    return is_sum or is_free(kind.removesuffix("_backward")) or is_free_name(name)


CONVERTING = frozenset("bfloat16 double float half to type type_as".split())
"""Types that may convert to an element type with a smaller range, which can make infinities."""


PASSING = (VIEWS - CONVERTING) | frozenset(
    """
    cat chunk embedding flip gather index_select masked_select pixel_shuffle pixel_unshuffle
    relu repeat repeat_interleave roll scatter slice_scatter sort stack take take_along_dim tile
    topk where clone copy threshold clamp_min clamp_max hardtanh relu6 max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin max min
    maximum minimum abs neg identity_n column_stack hstack vstack dstack tril triu
    """.split()
)
"""Types whose outputs are elements of their inputs, or zero: they cannot make a NaN from numbers.
"""


PLACING = frozenset(
    """
    const constant constant_pad_nd empty empty_like empty_permuted empty_strided fill
    fill_diagonal full full_like index_fill masked_fill new new_empty new_empty_strided new_full
    new_tensor nan_to_num pad set setitem tensor from_numpy as_tensor read read_variable
    """.split()
)
"""Types that write values that the program gave, or leave memory uninitialized."""


PASSING_BACKWARD = frozenset(
    f"{kind}_backward"
    for kind in """
    alias cat clone detach flip narrow permute reshape reshape_alias select slice split squeeze
    stack t transpose unbind unsafe_split unsafe_view unsqueeze view relu max_pool2d_with_indices
    """.split()
) | {"accumulate_grad"}
""":data:`PASSING` of backward operators. A sum of gradients is checked where it is read."""


def can_produce(op: OpDescription) -> bool:
    """True if an operator can produce a NaN or infinity from finite inputs."""
    if op.direction == "backward":
        return op.type not in PASSING_BACKWARD
    return op.type not in PASSING and op.type not in PLACING


def updates_a_value(context: OpContext, name: str) -> bool:
    """Whether the operator writes into a parameter or buffer: a batch norm counts its batches.

    Args:
        name: the framework's name for the operator.
    """
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place and bool(context.get_inputs()) and context.get_value(0) is not None
