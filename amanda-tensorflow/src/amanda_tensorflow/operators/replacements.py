"""The results of a function that replaces an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from amanda.errors import RoutineResultError, described
from amanda.interface.action import Action


def replaced_outputs(
    result: Any, action: Action, count: int, is_tensor: Callable[[Any], bool]
) -> list[Any]:
    """The output tensors that the replacement of an operator has returned.

    That of an operator without outputs may return nothing, as it does.

    Args:
        count: how many outputs the operator has.
        is_tensor: whether a value is a tensor.

    Raises:
        RoutineResultError: they are not `count` tensors.
    """
    if not count and (result is None or isinstance(result, tf.Operation)):
        return []
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(outputs) != count or not all(map(is_tensor, outputs)):
        wanted = "its output tensor" if count == 1 else f"its {count} output tensors"
        raise RoutineResultError(
            f"{action.routine} replaces op {action.op_id} and must return {wanted}, "
            f"got {described(result)}"
        )
    return outputs
