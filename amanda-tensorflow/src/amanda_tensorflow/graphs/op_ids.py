"""Ids of operators in graphs.

=====================================  =========================================================
operator                               id
=====================================  =========================================================
made by a layer                        as in eager execution: ``net/c1/Conv2D:0``
                                       (:mod:`amanda_tensorflow.keras_layers.paths`)
of the loss of a compiled model        as in eager execution: ``loss/mse/Mean:0``
else, in a function of Keras' trainer  as in eager execution: ``/optimizer/Mul:0``; in a forward
                                       pass without a name scope ``step/Mean:0``; of metrics and
                                       data ``/other/step/Mean:0``
else                                   ``<function or graph>/<name>``: ``step/Sum``
=====================================  =========================================================
"""

from __future__ import annotations

import re
from typing import Any

from amanda_tensorflow.labels import LOSS, in_ids
from amanda_tensorflow.operators.description import named_with_type
from amanda_tensorflow.operators.phases import phase_of_node

_TRAINER = re.compile(r"(one|multi)_step_on_(data|iterator)(_distributed)?(@\d+)?(/|$)")
"""Beginnings of the keys of operators in functions by which ``fit``, ``evaluate`` and ``predict``
of Keras run steps (Keras 3)."""


def scope_outside_layers(op: Any, ids: str) -> str | None:
    """The scope of an operator outside of layers in its id, ``/optimizer/``; None for one that is
    called by its name in the graph.

    Args:
        ids: the prefix of the keys of its graph's operators.
    """
    name_scope = op.name[: op.name.rfind("/") + 1]
    if name_scope.startswith(LOSS):
        return in_ids(name_scope)
    if not _TRAINER.match(ids):
        return None
    phase = phase_of_node(op, False)
    # Without a scope it would share its id with operators that run eagerly: metrics are read so
    # after each epoch. In other phases TensorFlow's own functions open scopes, which eager
    # execution has not.
    if phase == "forward":
        return name_scope or "step/"
    return "/other/step/" if phase == "other" else f"/{phase}/"


def key_of(op: Any, ids: str, names: Any) -> str:
    """The key of an operator: its name within all graphs that the driver has met.

    Args:
        ids: the prefix of the keys of its graph's operators.
        names: the names of these operators.
    """
    name = named_with_type(op.name, op.type)
    if name != op.name and name in names:
        # tf.tensordot makes a Reshape called `Tensordot` beside `Tensordot/Reshape`, which would
        # both get the second name.
        name = f"{op.name}:{op.type}"
    return f"{ids}/{name}"
