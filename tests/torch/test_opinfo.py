"""PyTorch's own database of operators, with and without tools that change nothing.

A usual run takes the first sample of every third operator. ``AMANDA_OPINFO=first`` takes that of
every operator, ``AMANDA_OPINFO=all`` every sample.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from amanda.errors import AmandaWarning
from tests.torch.support import TRANSPARENT, applied, bits

ASKED = os.environ.get("AMANDA_OPINFO", "")
SAMPLES = None if ASKED == "all" else 1
STRIDE = 1 if ASKED else 3
UNINITIALISED = ("empty", "new_empty", "linalg.lstsq")
"""Operators whose results hold memory that nobody has written."""
OPS = [op for op in op_db if torch.float32 in op.dtypes and not op.name.startswith(UNINITIALISED)][
    ::STRIDE
]
CHUNKS = 8
DEVICE = "cpu"
"""Where the samples are; ``test_cuda.py`` runs them on another device."""


def leaves(value: Any) -> list[Any]:
    """What is in nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def cloned(value: Any) -> Any:
    """A copy of nested arguments whose tensors are new leaves."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cloned, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(cloned, value))
    return value


def account(value: Any) -> list[Any]:
    """A comparable account of a result."""
    return [bits(v) if isinstance(v, torch.Tensor) else repr(v) for v in leaves(value)]


def executed(op: Any, sample: Any, scope: contextlib.AbstractContextManager[Any]) -> Any:
    """Outputs, gradients, inputs afterwards and random state; or the error."""
    arguments = cloned([sample.input, list(sample.args), sample.kwargs])
    torch.manual_seed(0)
    try:
        with scope:
            output = op(arguments[0], *arguments[1], **arguments[2])
            gradients = gradient(leaves(output), leaves(arguments))
    except Exception as error:
        if type(error).__module__.startswith("amanda"):
            raise
        return f"raised {type(error).__name__}"
    states = [torch.get_rng_state().tolist()]
    if DEVICE == "cuda":
        states.append(torch.cuda.get_rng_state().tolist())
    return account(output), account(gradients), account(arguments), states


def gradient(outputs: list[Any], inputs: list[Any]) -> Any:
    """The gradients of all inputs that ask for one."""
    ends = [t for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    starts = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not ends or not starts:
        return ()
    ones = [torch.ones_like(t) for t in ends]
    return torch.autograd.grad(ends, starts, ones, allow_unused=True)


def samples_of(op: Any) -> Iterator[Any]:
    """The samples of an operator that this run looks at."""
    torch.manual_seed(0)
    samples = op.sample_inputs(DEVICE, torch.float32, requires_grad=op.supports_autograd)
    yield from itertools.islice(samples, SAMPLES)


def check(op: Any, sample: Any) -> tuple[bool, list[str]]:
    """Whether the plain run can be compared, and the tools under which it differs."""
    nothing = contextlib.nullcontext()
    plain = executed(op, sample, nothing)
    if isinstance(plain, str) or executed(op, sample, nothing) != plain:
        return False, []
    wrong = []
    for make in TRANSPARENT:
        try:
            result = executed(op, sample, applied(make()))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if result != plain:
            what = result if isinstance(result, str) else differences(plain, result)
            wrong.append(f"{op.formatted_name} under {make.__name__}: {what}")
    return True, wrong


def differences(plain: Any, result: Any) -> str:
    """Which parts of two accounts differ."""
    names = ("outputs", "gradients", "inputs", "random state")
    pairs = zip(names, plain, result, strict=True)
    return ", ".join(name for name, one, other in pairs if one != other)


def check_chunk(chunk: int) -> None:
    """Check each operator of a part of them."""
    compared, wrong, ops = 0, [], OPS[chunk::CHUNKS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", AmandaWarning)
        for op in ops:
            results = [check(op, sample) for sample in samples_of(op)]
            compared += any(comparable for comparable, _ in results)
            wrong += [line for _, lines in results for line in lines]
    assert not wrong, "\n".join(wrong)
    assert compared >= 0.9 * len(ops)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_stay_bit_identical(chunk: int) -> None:
    """Outputs, gradients, mutated inputs and random state stay the same, for the chosen ops."""
    check_chunk(chunk)
