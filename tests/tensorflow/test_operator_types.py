"""The tables of the mapping rules against TensorFlow's own registry of operators."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from amanda_tensorflow import mapping_rules


def test_every_type_exists() -> None:
    """The tables name no operator that TensorFlow has in no version."""
    kinds = {kind for kinds in mapping_rules.TYPES.values() for kind in kinds.split()}
    known = {mapping_rules.unversioned(name) for name in dir(tf.raw_ops)}
    assert {kind for kind in kinds - known if op_def_registry.get(kind) is None} == set()


def test_weights_are_where_the_table_says() -> None:
    """The inputs in the table are the operator's weight and bias."""
    weights = {"filter", "scale", "gamma", "w", "resource"}
    for kind, (weight, bias, _) in mapping_rules.WEIGHTED.items():
        names = [argument.name for argument in op_def_registry.get(kind).input_arg]
        assert weight is None or names[weight] in weights, kind
        assert bias is None or names[bias] in {"offset", "beta", "b", "bias"}, kind


def test_different_operators_stay_apart() -> None:
    """A name in lower case that no table knows is not another operator's canonical type."""
    known = set(mapping_rules.TYPES)
    kinds = {kind for kinds in mapping_rules.TYPES.values() for kind in kinds.split()}
    unmapped = [
        name
        for name in dir(tf.raw_ops)
        if not name.startswith("_")
        and mapping_rules.unversioned(name) not in kinds
        and op_def_registry.get(name) is not None
    ]
    assert {mapping_rules.canonical(name) for name in unmapped} & known == set()
