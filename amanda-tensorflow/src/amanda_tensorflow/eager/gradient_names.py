"""Names of gradients: the forward input whose gradient an output of a backward operator is.

TensorFlow does not record it. Three sources are used, in this order; an output that none of them
identifies has no name:

1. an earlier run of the same operator's gradient function: its results, compared by identity with
   the outputs of the backward operators;
2. the types of the forward and of the backward operator, where these determine it;
3. for products, the forward input that the backward operator consumes: the gradient of one factor
   is computed from the other; where an operator broadcasts its inputs, the shape of the one to
   which the gradient is reduced.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_tensorflow.mapping_rules import unversioned

_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

_BROADCASTING = frozenset(_TABLES["broadcasting"].split())
"""Operators whose gradient function ends by a sum and a Reshape for each broadcast input."""

_POSITIONS: Mapping[str, Mapping[str, Sequence[int]]] = _TABLES["positions"]
"""By forward and by backward type, without versions, the input whose gradient each output is."""


def gradient_names(
    forward: str,
    backward: str,
    consumed: Sequence[Any],
    inputs: Sequence[Any],
    names: Sequence[str],
) -> list[str]:
    """The names of a backward operator's outputs, from its type and its inputs.

    Args:
        forward, backward: types of the forward and of the backward operator.
        consumed: inputs of the backward operator.
        inputs: the forward operator's inputs; None for those that are gone.
        names: declared names of the forward operator's inputs.
    """
    positions = _POSITIONS.get(unversioned(forward), {}).get(unversioned(backward), ())
    if backward == forward and len(inputs) == 2:
        if forward in _PRODUCTS or (forward == "Mul" and _is_elementwise(*inputs)):
            positions = _other_factor(consumed, inputs)
    elif backward == "Reshape" and forward in _BROADCASTING and all(x is not None for x in inputs):
        shape = np.asarray(consumed[1]).tolist()
        found = [i for i, tensor in enumerate(inputs) if tensor.shape.as_list() == shape]
        positions = found if len(found) == 1 else ()
    return [names[position] for position in positions if position < len(names)]


def _other_factor(consumed: Sequence[Any], inputs: Sequence[Any]) -> Sequence[int]:
    """The position of the factor whose gradient a product is: it consumes the other factor."""
    left, right = inputs
    uses = [any(value is factor for value in consumed if value is not None) for factor in inputs]
    if (left is None and right is None) or uses[0] == uses[1] or not _is_plain(left, right):
        return ()
    return (1,) if uses[0] else (0,)


def _is_elementwise(left: Any, right: Any) -> bool:
    """True if no sum follows the product of a gradient and a factor (``_MulGrad``, 2.16 to
    2.21)."""
    is_known = left is not None and right is not None and left.dtype in (tf.int32, tf.float32)
    return bool(is_known and left.shape == right.shape)


def _is_plain(left: Any, right: Any) -> bool:
    """True if no sum over broadcast dimensions follows, as far as the shapes show."""
    if left is None or right is None:
        return bool((left if right is None else right).shape.rank == 2)
    return bool(left.shape[:-2] == right.shape[:-2])


def learned_names(
    results: Sequence[Any], produced: Mapping[tuple[str, int], Sequence[Any]], names: Sequence[str]
) -> dict[tuple[str, int], list[str]]:
    """The names of all backward operators' outputs, from the results of a gradient function.

    Args:
        results: the gradient of each forward input.
        produced: by type and number of a backward operator, its outputs.
        names: declared names of the forward operator's inputs.
    """
    where = {id(result): name for result, name in zip(results, names, strict=False)}
    where.pop(id(None), None)
    return {
        key: [where.get(id(output), "") for output in outputs] for key, outputs in produced.items()
    }
