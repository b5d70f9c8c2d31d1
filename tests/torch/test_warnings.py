"""Warnings are shown where they would be shown without a scope."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amanda
from tests.torch.support import TRANSPARENT, On, applied

X = torch.ones(2, 3, 4, requires_grad=True)


class _Warning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.add(x, 1, out=torch.empty(1))
        return torch.tensor(x)


class _WarningBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for level in range(1, 6):
            warnings.warn("a level", stacklevel=level)
        return gradients[0] * 2


def _hooked() -> None:
    module = nn.Linear(3, 3)
    module.register_full_backward_hook(lambda *_: warnings.warn("a level", stacklevel=3))
    module(torch.ones(3)).sum().backward()


_WARNING: dict[str, Callable[[], Any]] = {
    "a property": lambda: X.T,
    "a function": lambda: torch.tensor(X),
    "a function of Python": lambda: torch.meshgrid(torch.ones(2), torch.ones(2)),
    "out=": lambda: torch.add(torch.ones(2), 1, out=torch.empty(5)),
    "a method": lambda: torch.ones(2, dtype=torch.complex64).to(torch.float32),
    "an index": lambda: torch.ones(2)[torch.tensor([1, 0], dtype=torch.uint8)],
    "a loss": lambda: functional.mse_loss(torch.ones(2, 1), torch.ones(2)),
    "a dimension": lambda: functional.softmax(X),
    "an initializer": lambda: nn.init.kaiming_uniform_(torch.empty(0, 3)),
    "an initializer of a module": lambda: nn.Linear(3, 0),
    "a module": lambda: _Warning()(torch.ones(2)),
    "a backward pass": lambda: (X * 2).sum().backward(create_graph=True),
    "a hook": _hooked,
    "a backward": lambda: torch.autograd.grad(_WarningBackward.apply(X).sum(), X),
    "a tracer": lambda: torch.jit.trace_module(nn.ReLU(), {"forward": torch.ones(1)}),
    "a script": lambda: torch.jit.script(nn.ReLU()),
}


@pytest.fixture(autouse=True)
def _always() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def _warned(function: Callable[[], Any]) -> list[Any]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    X.grad = None
    return [(w.category, str(w.message), w.filename, w.lineno) for w in found]


@pytest.mark.parametrize("make", [amanda.Tool, *TRANSPARENT, amanda.tools.load("trace")])
def test_warnings_are_shown_at_the_line_of_the_program(
    interceptor: str, make: Callable[[], amanda.Tool]
) -> None:
    """PyTorch's warnings have the texts and the places that they have without a scope; those in a
    backward pass up to the line that has called the function that warns."""
    for case, function in _WARNING.items():
        if (interceptor, case) == ("mode", "a hook"):
            continue  # PyTorch warns of the caller of what it has reported to the mode.
        # TorchScript warns once more where it is first used.
        _warned(function)
        expected = _warned(function)
        assert expected, case
        with applied(make()):
            assert [_warned(function) for _ in range(3)] == [expected] * 3, case


_ONES = torch.ones(2, 3, 4, 4)

_WARNING_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "softmax": lambda: functional.softmax(_ONES),
    "softmin": lambda: functional.softmin(_ONES),
    "log_softmax": lambda: functional.log_softmax(_ONES),
    "gumbel_softmax": lambda: functional.gumbel_softmax(_ONES, eps=1e-3),
    "dropout2d": lambda: functional.dropout2d(_ONES[0]),
    "dropout2d of a vector": lambda: functional.dropout2d(_ONES[0, 0]),
    "dropout3d": lambda: functional.dropout3d(_ONES[0]),
    "embedding_bag": lambda: functional.embedding_bag(_ONES[0, 0], torch.tensor([[0, 1]])),
    "kl_div": lambda: functional.kl_div(_ONES, _ONES),
    "a reduction": lambda: functional.l1_loss(_ONES, _ONES, size_average=False),
    "smooth_l1_loss": lambda: functional.smooth_l1_loss(_ONES, _ONES[:1]),
    "huber_loss": lambda: functional.huber_loss(_ONES, _ONES[:1]),
    "l1_loss": lambda: functional.l1_loss(_ONES, _ONES[:1]),
    "mse_loss": lambda: functional.mse_loss(_ONES, _ONES[:1]),
    "upsample": lambda: functional.upsample(_ONES, 8),
    "upsample_nearest": lambda: functional.upsample_nearest(_ONES, 8),
    "upsample_bilinear": lambda: functional.upsample_bilinear(_ONES, 8),
    "grid_sample": lambda: functional.grid_sample(_ONES, torch.ones(2, 4, 4, 2)),
    "affine_grid": lambda: functional.affine_grid(torch.ones(2, 2, 3), [2, 3, 4, 4]),
    "affine_grid of one": lambda: functional.affine_grid(
        torch.ones(2, 2, 3), [2, 3, 1, 4], align_corners=True
    ),
    "masks": lambda: nn.MultiheadAttention(4, 2)(
        _ONES[0],
        _ONES[0],
        _ONES[0],
        attn_mask=torch.zeros(3, 3),
        key_padding_mask=torch.zeros(4, 3, dtype=torch.bool),
    ),
    "resize": lambda: torch.ones(4).resize(2, 2),
    "a scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.ones(1)], lr=0.1), 1
    ).step(3),
}
"""Functions of PyTorch, mostly in Python, that warn of their callers."""

_WARNING_MODULES = {
    "Softmax": nn.Softmax,
    "Softmin": nn.Softmin,
    "LogSoftmax": nn.LogSoftmax,
    "Dropout2d": nn.Dropout2d,
    "Sequential": lambda: nn.Sequential(nn.Softmax(), nn.Sequential(nn.LogSoftmax())),
}


class _Calls(nn.Module):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function()
        for level in (1, 2, 3, 4):
            warnings.warn("a level", stacklevel=level)
        return x + 1


class _Acts(amanda.Tool):
    """Gives each operator copies of its inputs."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_before_op(_copies))


def _copies(*tensors: Any) -> Any:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize(
    "make", [amanda.Tool, amanda.tools.load("count"), amanda.tools.load("summary"), _Acts]
)
def test_functions_of_pytorch_warn_of_their_callers_as_without_tools(
    make: Callable[[], amanda.Tool],
) -> None:
    """Warnings about a caller, however far up, name its file and line, as often as without a scope:
    within a module that is PyTorch's own line."""
    modules = {case: module() for case, module in _WARNING_MODULES.items()}
    runs: dict[str, Callable[[], Any]] = {
        **_WARNING_FUNCTIONS,
        **{case: functools.partial(module, _ONES[0]) for case, module in modules.items()},
        **{
            f"{case} in a module": functools.partial(_Calls(function), torch.ones(1))
            for case, function in _WARNING_FUNCTIONS.items()
        },
    }
    for case, function in runs.items():
        expected = _warned(function)
        assert expected, case
        with applied(make()):
            assert [_warned(function) for _ in range(4)] == [expected] * 4, case


def _compute_sparse() -> None:
    matrix = torch.eye(4).to_sparse_csr()
    (matrix @ X[0, :1].mT.expand(4, 4)).sum()
    (torch.eye(4).to_sparse_csr().requires_grad_() @ torch.ones(4, 4)).sum().backward()


def _compute_quantized() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.quint8)
    torch.relu(quantized).dequantize()


def _compute_nested() -> None:
    torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)]) * 2


def _compute_half_complex() -> None:
    torch.ones(2, 2, dtype=torch.complex32).mT.clone()


@pytest.mark.parametrize(
    "run", [_compute_sparse, _compute_quantized, _compute_nested, _compute_half_complex]
)
@pytest.mark.parametrize("tool", ["count", "trace", "nan", "stats", "path", "summary", "profile"])
def test_tools_that_watch_warn_of_no_kind_of_tensor(
    tool: str, run: Callable[[], None], interceptor: str
) -> None:
    """PyTorch warns of sparse, quantized, nested and half complex tensors as often as without a
    tool, which looks at them, also where operators are known; with the gate at the same lines."""
    _warned(run)
    expected = _warned(run)
    found = []
    with applied(amanda.tools.load(tool)()):
        for _ in range(5):
            found.append(_warned(run))
            amanda.new_iteration()
    assert expected
    assert [len(warned) for warned in found] == [len(expected)] * 5
    if interceptor == "gate":
        assert found == [expected] * 5


@pytest.mark.usefixtures("interceptor")
def test_each_line_of_the_program_is_warned_of() -> None:
    """Two lines get a warning each, where Python shows it once per line, and a filter by the
    program's module meets them."""

    def two_lines() -> None:
        torch.tensor(X)
        torch.tensor(X)

    with warnings.catch_warnings(record=True) as found, applied(amanda.Tool()):
        warnings.simplefilter("default")
        two_lines()
    assert len({w.lineno for w in found}) == 2
    assert {w.filename for w in found} == {__file__}
    with warnings.catch_warnings(), applied(amanda.Tool()):
        warnings.filterwarnings("ignore", module=__name__)
        two_lines()


def test_tracebacks_end_at_the_line_of_the_program() -> None:
    """An operator that raises is called at the program's line, as a traceback shows."""
    with applied(amanda.Tool()), pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "torch.ones(2) @ torch.ones(3)")


@pytest.mark.usefixtures("interceptor")
def test_replaced_operators_warn_of_a_result_that_is_resized() -> None:
    """A tensor of ``out=`` that gets another shape is warned of as PyTorch does, also where a tool
    replaces the operator; an empty one is not."""
    wanted = torch.ones(2, 3, dtype=torch.float64)

    def added(*shape: int) -> Callable[[], Any]:
        return lambda: torch.add(wanted, 1, out=torch.empty(*shape, dtype=torch.float64))

    tool = On(add=lambda context: context.replace_op(lambda x: x + 1))
    for resized in (added(0), added(2, 3), added(5), added(1, 2, 3)):
        expected = _warned(resized)
        with applied(tool):
            assert _warned(resized) == expected
    assert len(tool.met) == 4
