"""Layers of Keras with PyTorch as its backend: their names, and calls that compute nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from amanda_torch import _internals


def is_backend() -> bool:
    """True if Keras computes with PyTorch."""
    config = sys.modules.get("keras.config")
    return config is not None and config.backend() == "torch"


def layer_name(module: Any) -> str:
    """The name that a layer of Keras has; "" for another module.

    Models of Keras (3.15) keep their layers in lists, where PyTorch finds no names for them.
    """
    layer = getattr(sys.modules.get("keras.layers"), "Layer", None)
    return str(module.name) if layer is not None and isinstance(module, layer) else ""


def is_symbolic(module: Any, inputs: Any) -> bool:
    """True if Keras calls a layer on tensors that only stand for others: to build a model, or to
    learn the shapes of its results. That is no call of the program."""
    layer = getattr(sys.modules.get("keras.layers"), "Layer", ())
    if not isinstance(module, layer) or not is_backend():
        return False
    keras = sys.modules["keras"]
    return any(isinstance(item, keras.KerasTensor) for item in keras.tree.flatten(inputs))


def with_values(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of an operator, with variables of Keras replaced by their tensors.

    Such a variable is not a tensor: its ``__torch_function__`` calls the operator again, with the
    tensor (Keras 3.15).
    """
    given = (*args, *kwargs.values()) if kwargs else args
    if _internals.PLAIN.issuperset(map(type, given)) or not is_backend():
        return args, kwargs
    variable = getattr(sys.modules["keras"], "Variable", ())
    if not any(isinstance(value, variable) for value in given):
        return args, kwargs
    tensors = [value.value if isinstance(value, variable) else value for value in given]
    return tuple(tensors[: len(args)]), dict(zip(kwargs, tensors[len(args) :], strict=True))
