"""Modules with a native fast path in eval mode: fused, unless a tool acts on an operator inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.python.bytecode import returns_something
from tests.torch.support import TRANSPARENT, ForwardCounter, On, after, applied, before

# Of PyTorch, where an encoder gets a mask.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
MASK = torch.tensor([[False, False, True], [False, False, False]])
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "encoder": (lambda: nn.TransformerEncoder(_layer(), 2), lambda m: m(X)),
    "encoder with mask": (
        lambda: nn.TransformerEncoder(_layer(), 2),
        lambda m: m(X, src_key_padding_mask=MASK),
    ),
    "layer": (_layer, lambda m: m(X)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m: m(X, X, X, need_weights=False)[0],
    ),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Callable[[], list[torch.Tensor]]:
    """Two runs of a fused module in inference."""
    make, run = PROGRAMS[request.param]
    model = make().eval()

    def twice() -> list[torch.Tensor]:
        with torch.no_grad():
            return [run(model), run(model)]

    return twice


@pytest.fixture
def unfused() -> Any:
    """A function that runs another one with PyTorch's fast paths switched off."""

    def run(function: Callable[[], Any]) -> Any:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return function()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return run


ACTING: dict[str, Callable[[], On]] = {
    "before": lambda: On(linear=before(lambda x, w, b: [None, w * 0.5, None])),
    "after": lambda: On(linear=after(lambda y: y.round())),
    "replace": lambda: On(linear=lambda c: c.replace_op(lambda x, w, b: x @ w.t())),
}


@pytest.mark.parametrize("make", ACTING.values(), ids=ACTING)
def test_a_tool_that_acts_inside_acts_in_every_run(make: Any, program: Any, unfused: Any) -> None:
    """Where a tool changes the value of an operator inside, the unfused path runs, with its ids."""
    with applied(wanted := make()):
        expected = unfused(program)
    with applied(tool := make()):
        found = program()
    assert all(map(torch.equal, found, expected))
    assert tool.met == wanted.met != []


@pytest.mark.parametrize("make", TRANSPARENT, ids=lambda tool: tool.__name__)
def test_a_tool_that_changes_nothing_keeps_the_fused_operator(make: Any, program: Any) -> None:
    """Under routines that change no value the result is the fused operator's, bit by bit."""
    expected = program()
    with applied(make()):
        assert all(map(torch.equal, program(), expected))


def test_watching_sees_the_fused_operator_alone(program: Any) -> None:
    """Routines that return nothing run for the fused operators, and for none inside; a tool that
    declares that it only watches is not asked about those inside."""
    listed: list[str] = []
    watching, counter = amanda.Tool(), ForwardCounter()
    watching.only_watches = True
    watching.add_inst_for_op(lambda context: listed.append(context.get_op_id()))
    with applied(watching):
        program()
    with applied(counter):
        program()
    assert set(listed) == set(counter.ids)
    assert not any("linear" in op_id for op_id in listed)
    assert any("_fwd" in op_id or "_native" in op_id for op_id in listed)


def test_an_action_elsewhere_keeps_the_fused_operator(program: Any) -> None:
    """A tool that acts on other operators than those inside leaves the fast path as it is."""
    expected = program()
    with applied(On(conv2d=after(lambda y: y * 2))):
        assert all(map(torch.equal, program(), expected))


def test_a_routine_may_begin_to_act_later() -> None:
    """A routine that has changed nothing at first is asked again in every run."""
    model, calls = _layer().eval(), list[None]()

    def from_the_fifth_on(y: torch.Tensor) -> Any:
        calls.append(None)
        return y * 2 if len(calls) > 4 else None

    with torch.no_grad():
        expected = model(X)
        with applied(On(linear=after(from_the_fifth_on))):
            first, second = model(X), model(X)
    assert torch.equal(first, expected)
    assert not torch.equal(second, expected)
    assert len(calls) == 8


def test_whether_a_routine_returns_something() -> None:
    """A routine that can only return None is told from all others."""

    def nothing(x: Any) -> None:
        if x:
            return
        x.append(1)

    def sometimes(x: Any) -> Any:
        return x * 2 if x else None

    def early(x: Any) -> Any:
        if x:
            return x
        return None

    assert not returns_something(nothing)
    assert not returns_something(lambda _: None)
    assert all(map(returns_something, (sometimes, early, lambda x: x, torch.relu, [].append)))
