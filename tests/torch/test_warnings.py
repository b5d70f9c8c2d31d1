"""Warnings are shown where they would be shown without a scope."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amanda
from amanda_torch.plugin import TorchEagerDriver
from tests.torch.support import TRANSPARENT, On, applied, interceptors

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
        for level in (1, 2, 3):
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


@pytest.mark.parametrize("name", interceptors("mode", "gate"))
@pytest.mark.parametrize("make", [amanda.Tool, *TRANSPARENT, amanda.tools.load("trace")])
def test_warnings_are_shown_at_the_line_of_the_program(
    name: str, make: Callable[[], amanda.Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's warnings have the texts and the places that they have without a scope."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, name)
    for case, function in _WARNING.items():
        if (name, case) == ("mode", "a hook"):
            continue  # PyTorch warns of the caller of what it has reported to the mode.
        # TorchScript warns once more where it is first used.
        _warned(function)
        expected = _warned(function)
        assert expected, case
        with applied(make()):
            assert [_warned(function) for _ in range(3)] == [expected] * 3, case


@pytest.mark.parametrize("name", interceptors("mode", "gate"))
def test_each_line_of_the_program_is_warned_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines get a warning each, where Python shows it once per line, and a filter by the
    program's module meets them."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, name)

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


@pytest.mark.parametrize("name", interceptors("mode", "gate"))
def test_replaced_operators_warn_of_a_result_that_is_resized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of ``out=`` that gets another shape is warned of as PyTorch does, also where a tool
    replaces the operator; an empty one is not."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, name)
    wanted = torch.ones(2, 3, dtype=torch.float64)

    def added(*shape: int) -> Callable[[], Any]:
        return lambda: torch.add(wanted, 1, out=torch.empty(*shape, dtype=torch.float64))

    tool = On(add=lambda context: context.replace_op(lambda x: x + 1))
    for resized in (added(0), added(2, 3), added(5), added(1, 2, 3)):
        expected = _warned(resized)
        with applied(tool):
            assert _warned(resized) == expected
    assert len(tool.met) == 4
