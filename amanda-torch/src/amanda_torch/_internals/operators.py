"""Operators, their overloads and schemas."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch

from amanda_torch._internals.symbols import require, symbol

OPERATORS_MODULE = "torch._ops"
"""The module of higher-order operators and of ``torch.ops``."""

OpOverload = symbol("torch._ops.OpOverload")
OpOverloadPacket = symbol("torch._ops.OpOverloadPacket")
getitem = operator.getitem

TENSOR_BASE = symbol("torch._C.TensorBase")
BUILTIN_METHODS = (TENSOR_BASE, torch.Tensor)
BUILTIN_FUNCTIONS = tuple(
    symbol(f"torch._C.{name}")
    for name in "_VariableFunctionsClass _nn _fft _linalg _special _sparse _nested".split()
)
"""Where PyTorch keeps the operators that are written in C++, of its own namespaces."""

OPERATOR_CLASSES = (
    OpOverload,
    symbol("torch._ops.TorchBindOpOverload"),
    OpOverloadPacket,
    symbol("torch._ops.HigherOrderOperator"),
)
"""The classes of operators whose ``__call__`` is written in Python."""

schemas_of: Callable[[str], list[Any]] = symbol("torch._C._jit_get_schemas_for_operator")
"""The schemas of all overloads of ``aten::add`` or another operator."""


_is_dispatched = symbol("torch._C._dispatch_has_kernel")
_has_kernel = symbol("torch._C._dispatch_has_kernel_for_dispatch_key")


@functools.cache
def is_one_node(name: str) -> bool:
    """True if autograd has a formula for all overloads of an operator of ATen, and so makes one
    node for each call. No overload is composed of other operators, which would have nodes of their
    own."""
    schemas = schemas_of(f"aten::{name}")
    names = [f"{s.name}.{s.overload_name}".rstrip(".") for s in schemas]
    # Some schemas are TorchScript's only (`aten::mul.left_t` repeats a list).
    names = [full for full in names if _is_dispatched(full)]
    # Those on lists of tensors have a node for each of them.
    if not names or name.startswith("_foreach_"):
        return False
    return not any(_has_kernel(full, "CompositeImplicitAutograd") for full in names)


require("torch.ops.aten.add.Tensor._schema", "torch.ops.aten.add._qualified_op_name")


def namespace_of(operator_: Any) -> str:
    """The namespace of an operator of ``torch.ops``, or of one of its overloads: ``aten``."""
    packet = getattr(operator_, "overloadpacket", operator_)
    return cast(str, packet._qualified_op_name.partition("::")[0])


def is_registered(function: Any) -> bool:
    """True if a function is an operator of ``torch.ops``; see :func:`namespace_of`."""
    return isinstance(function, (OpOverload, OpOverloadPacket))


def schema_of(overload: Any) -> Any:
    """The schema of one of ``torch.ops``' overloads, such as ``torch.ops.aten.add.Tensor``."""
    return overload._schema


OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
OVERRIDE_CHECKERS = (torch.functional, torch.nn.functional)
"""Modules of Python-level operators that call these checks before they compute."""

require(*(f"{m.__name__}.{check}" for m in OVERRIDE_CHECKERS for check in OVERRIDE_CHECKS))
require("torch.overrides.has_torch_function")


require(
    "torch.autograd._engine_run_backward",
    "torch._C._functions.AccumulateGrad._sequence_nr",
    "torch._C._functions.ExpBackward0._saved_result",
    "torch._C._FunctionBase.apply",
    "torch.utils.checkpoint.CheckpointFunction._backward_cls._forward_cls",
)
