"""The driver for compiled PyTorch: routines become a part of the compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, ThreadState, owned_locks
from amanda.testing import interrupts, soak
from amanda_torch.compiled.driver import COMPILER_VARIABLE
from amanda_torch.plugin import TorchEagerDriver, TorchGraphDriver

# PyTorch's compiler changes PyTorch when it is first used.
torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(1, requires_grad=True))

Analysis = Callable[[amanda.OpContext], Any]


class Net(nn.Module):
    """Linear, ReLU, batch norm, a buffer and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + self.shift).view(-1)[0:4].sum()


class Prune(amanda.Tool):
    """Masks the weights of linear operators; the mask is computed once, from the value."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ids.append(context.get_op_id())
        if context.get_op().__name__ == "linear":
            weight = context.get_value(1)
            mask = (weight.abs() > weight.abs().median()).float()
            context.insert_before_op(self.masked, inputs=["weight"], mask=mask)
        if context.get_op().__name__ == "relu":
            context.insert_after_op(self.halved)

    @amanda.traceable
    def masked(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask

    @amanda.traceable
    def halved(self, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5


def tool_of(analysis: Analysis) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    return tool


def on(name: str, act: Analysis) -> amanda.Tool:
    """A tool that acts on the operators of one name."""
    return tool_of(lambda c: act(c) if c.get_op().__name__ == name else None)


def compiled(*tools: amanda.Tool) -> amanda.apply:
    return amanda.apply(*tools, drivers=[TorchGraphDriver])


@pytest.fixture(autouse=True)
def _fast_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(COMPILER_VARIABLE, "aot_eager")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: Callable[..., torch.Tensor], net: Net) -> list[torch.Tensor]:
    """The loss and the gradients of one step."""
    net.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.rand(4, 3))
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_compiled_equals_eager(net: Net) -> None:
    """A traceable tool does in the compiled graph what it does in eager mode, bit for bit."""
    with amanda.apply(Prune(), drivers=[TorchEagerDriver]):
        eager = train(net, net)
    model = torch.compile(net, backend="aot_eager")
    with compiled(Prune()):
        runs = [train(model, net) for _ in range(2)]
    assert all(equal(run, eager) for run in runs)
    assert not equal(train(net, net), eager)


def test_code_with_routines_stays_in_its_scope(net: Net) -> None:
    """Before, between and after scopes the compiled function is vanilla."""
    model = torch.compile(net, backend="aot_eager")
    vanilla = train(model, net)
    for _ in range(2):
        with compiled(Prune()):
            assert not equal(train(model, net), vanilla)
            with amanda.disabled():
                assert equal(train(model, net), vanilla)
        assert equal(train(model, net), vanilla)


def test_watching_changes_nothing(net: Net) -> None:
    """A tool without actions leaves outputs and gradients as they are, bit for bit."""
    model = torch.compile(net, backend="aot_eager")
    vanilla = train(model, net)
    with compiled(tool_of(lambda context: None)):
        assert equal(train(model, net), vanilla)


def test_analysed_once(net: Net) -> None:
    """Each operator of the graph is analysed once, when the graph is first run."""
    tool = Prune()
    model = torch.compile(net, backend="aot_eager")
    with compiled(tool):
        for _ in range(3):
            train(model, net)
    assert len(tool.ids) == len(set(tool.ids))
    assert {"compiled.layers.0/linear:0", "compiled.layers.1/relu:0", "compiled/sum:0"} <= set(
        tool.ids
    )


def test_contexts(net: Net) -> None:
    """Contexts have the namespace, the module path and inputs in the order of eager mode."""
    seen = {}

    def analysis(context: amanda.OpContext) -> None:
        seen[context.get_op().__name__] = (
            context.namespace.tags[2],
            context.get_module(),
            context.get_input_names()[:3],
        )

    with compiled(tool_of(analysis)):
        train(torch.compile(net, backend="aot_eager"), net)
    assert seen["linear"] == ("graph", "layers.0", ["input", "weight", "bias"])
    assert seen["batch_norm"] == ("graph", "layers.2", ["input", "weight", "bias"])


def test_values(net: Net) -> None:
    """get_value gives parameters and buffers, and None for what the graph computes."""
    values: dict[str, Any] = {}

    def analysis(context: amanda.OpContext) -> None:
        if context.get_op_id() == "compiled/add:0":
            values.update(computed=context.get_value(0), buffer=context.get_value(1))

    with compiled(tool_of(analysis)):
        train(torch.compile(net, backend="aot_eager"), net)
    assert values["computed"] is None
    assert torch.equal(values["buffer"], net.shift)


def test_replace_op(net: Net) -> None:
    """A replaced operator takes part in AD: the identity removes it."""

    @amanda.traceable
    def identity(x: torch.Tensor) -> torch.Tensor:
        return x

    with compiled(on("relu", lambda c: c.replace_op(identity))):
        run = train(torch.compile(net, backend="aot_eager"), net)
    net.layers[1] = nn.Identity()
    assert equal(run, train(net, net))


def test_differentiable_routine(net: Net) -> None:
    """Recorded under ad_enabled(), a routine takes part in AD."""

    @amanda.traceable
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def analysis(context: amanda.OpContext) -> None:
        with amanda.ad_enabled():
            context.insert_before_op(doubled, inputs=[0])

    with compiled(on("relu", analysis)):
        run = train(torch.compile(net, backend="aot_eager"), net)
    net.layers.insert(1, Doubled())
    assert equal(run, train(net, net))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_run_time_routine_is_refused(net: Net) -> None:
    """A routine that is not traceable: an error naming it and what to do."""
    tool = on("relu", lambda c: c.insert_before_op(lambda x: x, inputs=[0]))
    with (
        compiled(tool),
        pytest.raises(Exception, match=r"compiled\.layers\.1/relu:0.*@amanda\.traceable"),
    ):
        train(torch.compile(net, backend="aot_eager"), net)


def test_backward_action_is_refused(net: Net) -> None:
    """An action on a backward operator: an error naming the missing capability."""
    tool = on("relu", lambda c: c.insert_after_backward_op(lambda g: g))
    with (
        compiled(tool),
        pytest.raises(Exception, match=r"insert_after_backward_op.*Capability\.BACKWARD"),
    ):
        train(torch.compile(net, backend="aot_eager"), net)


def test_reanalyse(net: Net) -> None:
    """After reanalyse() the graph is compiled again with what the analysis then records."""
    factors = [2.0, 3.0]

    def analysis(context: amanda.OpContext) -> None:
        factor = torch.tensor(factors.pop(0))
        context.insert_before_op(scaled, inputs=[0], factor=factor)

    @amanda.traceable
    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor

    tool = on("sum", analysis)
    model = torch.compile(net.eval(), backend="aot_eager")
    x = torch.rand(4, 3)
    vanilla = model(x)
    with compiled(tool):
        assert torch.allclose(model(x), vanilla * 2)
        tool.reanalyse()
        assert torch.allclose(model(x), vanilla * 3)


def test_what_compiled_code_hides_is_said() -> None:
    """A run of nothing but compiled code is not said to have been seen whole."""
    function = torch.compile(lambda x: x * 2, backend="aot_eager")
    with compiled(amanda.Tool()) as scope:
        function(torch.ones(2, requires_grad=True)).sum().backward()
    assert set(scope.statistics.not_seen) == {
        "backward operators of compiled functions",
        "operators outside of compiled functions (see: --driver torch-eager)",
    }


def one_scope() -> list[float]:
    """Compile a function and run it in a scope, and once more after it."""
    torch.compiler.reset()
    model = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    halved = amanda.traceable(lambda output: output * 0.5)
    with compiled(on("relu", lambda context: context.insert_after_op(halved))):
        inside = model(torch.ones(1))
        with amanda.disabled():
            model(torch.ones(1))
    return [inside.item(), model(torch.ones(1)).item()]


def state() -> list[Any]:
    """What a scope changes while it is open."""
    blocks = {name: getattr(STATE, name) for name in vars(ThreadState())}
    return [dict(ATTACHED), list(LIVE_SCOPES), blocks, owned_locks()]


def test_an_interrupt_at_any_line_leaves_the_compiler_vanilla() -> None:
    """An interrupt at any line of ours leaves nothing behind, in compiled code either.

    A sample of the lines is tried; AMANDA_INTERRUPTS=all tries them all.
    """
    assert one_scope() == [1.5, 2.0]
    before, is_ours = state(), interrupts.in_packages("amanda_torch")
    for point in interrupts.sample(interrupts.points(one_scope, is_ours)):
        interrupts.run(one_scope, is_ours, point)
        assert (str(point), state()) == (str(point), before)
        assert one_scope() == [1.5, 2.0]


def test_many_scopes_of_compiled_code_leave_nothing() -> None:
    """Neither our objects nor threads grow in number with the scopes that have ended.

    PyTorch's compiler leaves some 70 objects for each compilation, also without a scope (2.13).
    """
    growth = soak.grow(one_scope)
    print(f"torch-graph: {growth}")
    assert growth.threads <= 0
    assert growth.ours < 1
    assert state() == [{}, [], vars(ThreadState()), 0]
