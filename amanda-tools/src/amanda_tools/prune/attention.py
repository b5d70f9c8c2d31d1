"""Attention pruning: leaves out blocks of keys that get little attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda.tools.graph import Graph, TracedOp
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.weights import Untreatable, treatable
from amanda_tools._values.shapes import rank_of, shape_of
from amanda_tools._values.tensors import Arithmetic, arithmetic_of
from amanda_tools.prune.options import PruneOptions

CAUSAL = "it is causal: the choice of keys would depend on later queries"
"""Reason to skip an operator."""

_FUSED = ["query", "key", "value", "attn_mask"]

_HIDDEN = -9000.0
"""Additive masks hide keys with -inf, the type's lowest number, or -10000: all below this."""


class AttentionPruning:
    """For each sample, leaves out the blocks of keys that get the least attention.

    The attention of a block is the sum of the attention weights of its keys over all heads and
    queries (Block-Skim, Guan et al., AAAI 2022, trains a classifier for the same purpose). The
    remaining weights are normalized again. A query that would have no key left keeps those that it
    had. The method acts on fused attention, through its mask, and on a softmax between two matrix
    products.

    Attention that hides later keys from earlier queries in its first execution is causal, and left
    alone: which keys matter would depend on later queries.

    Attributes:
        causal: ids of operators that were found to be causal when they ran.
    """

    def __init__(self, options: PruneOptions) -> None:
        self._options = options
        self._known: set[str] = set()
        self.causal: set[str] = set()

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Make an attention leave out blocks of keys.

        Raises:
            Untreatable: the operator is not attention, or causal attention.
        """
        if op.type == "softmax":
            check_softmax(context)
            context.insert_after_op(self._without_blocks, outputs=[0], op_id=op.id)
            return
        if context.get_input_names()[:4] != _FUSED:
            raise Untreatable("its attention weights are not accessible: projections are fused in")
        if reason := _refusal(context.get_inputs()):
            raise Untreatable(f"one of its inputs {reason}")
        attributes = context.get_attrs()
        if attributes.get("is_causal"):
            raise Untreatable(CAUSAL)
        context.replace_op(
            self._fused, operator=context.get_function(), scale=attributes.get("scale"), op_id=op.id
        )

    # -- fused ------------------------------------------------------------

    def _fused(self, *inputs: Any, operator: Any, scale: float | None, op_id: str) -> Any:
        """Replacement routine: the attention with a mask that hides more keys."""
        query, key, value, mask = inputs[:4]
        if _refusal(inputs):
            return operator(*inputs)
        arithmetic = arithmetic_of(query)
        query, key = arithmetic.stop_gradient(query), arithmetic.stop_gradient(key)
        weights = attention_weights(arithmetic, query, key, mask, scale)
        if self._is_causal(arithmetic, weights, op_id):
            return operator(*inputs)
        # As a boolean mask: True for keys that may be attended to.
        kept = self._kept(arithmetic, weights) > 0
        return operator(inputs[0], inputs[1], value, hide(arithmetic, mask, kept))

    # -- softmax ----------------------------------------------------------

    def _without_blocks(self, weights: Any, op_id: str) -> Any:
        """Instrumentation routine: set the attention weights of blocks to zero."""
        arithmetic = arithmetic_of(weights)
        if arithmetic.refusal(weights):
            return None
        if self._is_causal(arithmetic, weights, op_id):
            return None
        kept = self._kept(arithmetic, arithmetic.stop_gradient(weights))
        rest = weights * kept
        total = arithmetic.sum(rest, [-1])[..., None]
        is_empty = total <= 0
        rest = rest / arithmetic.where(is_empty, 1.0, total)
        return arithmetic.where(is_empty, weights, rest)

    def _is_causal(self, arithmetic: Arithmetic, weights: Any, op_id: str) -> bool:
        """True if no query attends to a later key; the first execution with several keys
        decides."""
        queries, keys = shape_of(weights)[-2:]
        if op_id not in self._known and queries == keys > 1:
            self._known.add(op_id)
            later = arithmetic.constant(np.triu(np.ones((queries, keys)), 1), weights)
            rank = len(shape_of(weights))
            total = arithmetic.sum(arithmetic.stop_gradient(weights) * later, list(range(rank)))
            # Under torch.vmap there is one for each sample.
            if not arithmetic.wide_numpy(total).any():
                self.causal.add(op_id)
        return op_id in self.causal

    # -- blocks -----------------------------------------------------------

    def _kept(self, arithmetic: Arithmetic, weights: Any) -> Any:
        """Return 1 for keys that stay, else 0, broadcastable to the weights (batch, ...,
        queries, keys)."""
        shape = shape_of(weights)
        keys, rank = shape[-1], len(shape)
        blocks = -(-keys // self._options.block)
        count = max(1, blocks - round(self._options.sparsity * blocks))
        # A query that may attend to no key has weights of NaN.
        finite = arithmetic.where(weights == weights, weights, 0.0)
        attention = arithmetic.sum(finite, list(range(1, rank - 1)))
        if self._options.block == 1:
            kept = arithmetic.top_mask(attention, count)
        else:
            members = np.arange(keys)[:, None] // self._options.block == np.arange(blocks)
            by_block = arithmetic.matmul(attention, arithmetic.constant(members, weights))
            chosen = arithmetic.top_mask(by_block, count)
            kept = arithmetic.matmul(chosen, arithmetic.constant(members.T, weights))
        return arithmetic.reshape(kept, [-1, *[1] * (rank - 2), keys])


def _refusal(tensors: Sequence[Any]) -> str:
    """Return why tools cannot compute with one of these tensors, "" if they can with all."""
    reasons = (arithmetic_of(tensor).refusal(tensor) for tensor in tensors if tensor is not None)
    return next(filter(None, reasons), "")


def attention_weights(
    arithmetic: Arithmetic, query: Any, key: Any, mask: Any, scale: float | None
) -> Any:
    """Compute the attention weights inside of fused attention; grouped heads of keys are shared."""
    heads, key_heads = shape_of(query)[-3], shape_of(key)[-3]
    if heads != key_heads:
        key = arithmetic.take(key, [i * key_heads // heads for i in range(heads)], -3)
    if scale is None:
        scale = 1 / float(np.sqrt(shape_of(query)[-1]))
    scores = arithmetic.matmul(query, arithmetic.transpose(key)) * scale
    if mask is not None and arithmetic.is_floating(mask):
        scores = scores + arithmetic.stop_gradient(mask)
    elif mask is not None:
        scores = arithmetic.where(mask, scores, float("-inf"))
    return arithmetic.softmax(scores)


def hide(arithmetic: Arithmetic, mask: Any, kept: Any) -> Any:
    """Return a mask for fused attention that also hides the keys that do not stay."""
    if mask is None:
        return kept
    is_added = arithmetic.is_floating(mask)
    visible = (mask > _HIDDEN if is_added else mask) & kept
    some = arithmetic.sum(arithmetic.where(visible, 1.0, 0.0), [-1])[..., None] > 0
    if is_added:
        return arithmetic.where(some & ~kept, float("-inf"), mask)
    return arithmetic.where(some, visible, mask)


def check_softmax(context: OpContext) -> None:
    """Check that a softmax makes the weights of an attention.

    Raises:
        Untreatable: the softmax does not normalize attention.
    """
    scores = treatable(context.get_inputs()[0])
    attributes = context.get_attrs()
    rank = rank_of(scores)
    axis = attributes.get("dim", attributes.get("axis"))
    if rank is None or rank < 3 or axis not in (None, -1, rank - 1):
        raise Untreatable("it is not a softmax over keys")
    graph: Graph = context["graph"]
    source = graph.tensor_of(scores)
    producer = source.producer if source is not None else ""
    if not producer or not _is_score(graph, graph.op(producer)):
        raise Untreatable("its input is not a product of queries and keys")


def _is_score(graph: Graph, op: TracedOp) -> bool:
    if op.type == "matmul":
        return not any(t is not None and t.is_parameter for t in op.inputs)
    if "scales_scores" not in row_of(op.type).traits:
        return False
    return any(_is_score(graph, producer) for producer in graph.producers(op.id))
