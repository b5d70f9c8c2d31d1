"""The driver for compiled PyTorch: what Dynamo has captured runs under the tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import amanda
from amanda.errors import CoverageWarning
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, ThreadState, owned_locks
from amanda.testing import growth, interrupts
from amanda_torch.compiled.compilers import OWN_COMPILER
from amanda_torch.plugin import COMPILER_VARIABLE, TorchEagerDriver, TorchGraphDriver
from tests.torch.support import Counter, applied, fingerprint

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
def _fast_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # That of most of the tests; the others run operator by operator.
    monkeypatch.setenv(COMPILER_VARIABLE, "aot_eager")


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


# -- operator by operator ---------------------------------------------------


@amanda.traceable
def _entry(output: torch.Tensor) -> torch.Tensor:
    return output * torch.arange(3.0)[output[0, :1].long()]


class Indexed(nn.Module):
    """Takes the rows that the program asks for."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x + 1).abs()[index].neg()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_an_error_in_compiled_code_names_the_routine(
    monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """Where code that a compiler has made raises, the error says which tool, routine and operator
    did it; an error of the program's own says nothing of tools."""
    monkeypatch.setenv(COMPILER_VARIABLE, compiler)
    ran = torch.compile(Indexed(), backend=compiler)
    good, state = torch.tensor([0]), torch.get_rng_state()
    with compiled(on("abs", lambda c: c.insert_after_op(_entry))) as scope, torch.no_grad():
        for _ in range(2):
            ran(torch.zeros(2, 2), good)
        with pytest.raises((IndexError, RuntimeError)) as of_tool:
            ran(torch.full((2, 2), 9.0), good)
        with pytest.raises((IndexError, RuntimeError)) as of_program:
            ran(torch.zeros(2, 2), torch.tensor([7]))
        ran(torch.zeros(2, 2), good)
    assert list(scope.statistics.compiled.values()) == [f"by {compiler}"]
    assert of_tool.value.__notes__ == ["amanda: raised in Tool._entry at op Indexed/abs:0"]
    assert not getattr(of_program.value, "__notes__", ())
    assert torch.equal(torch.get_rng_state(), state)


@amanda.traceable
def _decides(output: torch.Tensor) -> torch.Tensor:
    return output * 2 if bool(output.sum() > 0) else output


def test_a_compiler_that_fails_on_a_routine_says_which(net: Net) -> None:
    """The warning that a graph runs operator by operator names the routine that was not traced."""
    function, x = torch.compile(net, backend="aot_eager"), torch.rand(4, 3)

    def run() -> None:
        for _ in range(3):
            function(x)

    tool = on("relu", lambda c: c.insert_after_op(_decides))
    with (
        compiled(tool) as scope,
        pytest.warns(CoverageWarning, match=r"raised in Tool._decides at"),
    ):
        run()
    assert list(scope.statistics.compiled.values()) == ["operator by operator"]


def _broken_code(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A compiler whose code draws a number, writes into what it is given, and fails."""

    def run(*inputs: torch.Tensor) -> None:
        torch.rand(1)
        for value in inputs:
            if not value.requires_grad:
                value.add_(1)
        raise RuntimeError("no such instruction")

    return run


def _no_backward(module: fx.GraphModule, inputs: Any) -> Any:
    """A compiler that cannot take backward passes."""

    def fails(module: fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("no backward pass")

    forward = make_boxed_compiler(lambda module, inputs: module.forward)
    return aot_autograd(fw_compiler=forward, bw_compiler=fails)(module, inputs)


@pytest.mark.parametrize("compiler", [_broken_code, _no_backward])
def test_code_that_a_compiler_makes_may_fail(
    net: Net, monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., Any]
) -> None:
    """A graph whose code fails when it first runs, or whose backward pass cannot be compiled, runs
    operator by operator, from the state before, and says why once."""
    monkeypatch.setenv(COMPILER_VARIABLE, OWN_COMPILER)

    def steps(model: Callable[..., torch.Tensor], net: Net) -> list[str]:
        torch.manual_seed(1)
        found = []
        for _ in range(4):
            loss = model(torch.rand(4, 3))
            loss.backward()
            gradients = [p.grad for p in net.parameters()]
            found.append(fingerprint([loss, *gradients, *net.buffers(), torch.get_rng_state()]))
        return found

    eager = copy.deepcopy(net)
    with amanda.apply(Prune(), drivers=[TorchEagerDriver]):
        wanted = steps(eager, eager)
    model = torch.compile(net, backend=compiler)
    with compiled(Prune()) as scope, pytest.warns(CoverageWarning) as said:
        assert steps(model, net) == wanted
    assert list(scope.statistics.compiled.values()) == ["operator by operator"]
    (text,) = (str(one.message) for one in said)
    assert "fails with" in text


def test_the_first_call_of_compiled_code_may_raise_what_the_program_raises() -> None:
    """An error of the program's own is that of eager mode, and the code is kept."""
    ran = torch.compile(Indexed(), backend="aot_eager")
    halved = amanda.traceable(lambda output: output * 0.5)
    with compiled(on("abs", lambda c: c.insert_after_op(halved))) as scope, torch.no_grad():
        ran(torch.zeros(2, 2), torch.tensor([0]))
        with pytest.raises(IndexError) as error:
            ran(torch.zeros(2, 2), torch.tensor([7]))
        assert error.value.__context__ is None
        ran(torch.zeros(2, 2), torch.tensor([0]))
    assert list(scope.statistics.compiled.values()) == ["by aot_eager"]


def test_one_interceptor(net: Net) -> None:
    """The two drivers of PyTorch are not used at once: each sees what the other one does."""
    with (
        applied(Counter()),
        pytest.raises(amanda.errors.CapabilityError, match=r"torch-graph.*torch-eager"),
        compiled(Counter()),
    ):
        pass


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
    return [dict(ATTACHED), list(LIVE_SCOPES), blocks, owned_locks(), torch.is_grad_enabled()]


def test_an_interrupt_leaves_the_compiler_vanilla() -> None:
    """An interrupt in code of ours leaves nothing behind, in compiled code either.

    A sample of the points is tried; AMANDA_INTERRUPTS=all tries them all.
    """
    assert one_scope() == [1.5, 2.0]
    before, is_ours = state(), interrupts.in_packages("amanda_torch")
    for point in interrupts.sample(interrupts.points(one_scope, is_ours)):
        interrupts.run(one_scope, is_ours, point)
        assert (str(point), state()) == (str(point), before)
        assert one_scope() == [1.5, 2.0]


def test_an_interrupt_as_a_routine_is_traced_leaves_gradients_on() -> None:
    """Wherever Python takes one in the function by which a compiler calls a routine."""

    def is_call(code: Any) -> bool:
        return code.co_name == "amanda_routine"

    points = interrupts.points(one_scope, is_call)
    assert points
    for point in points:
        interrupts.run(one_scope, is_call, point)
        assert torch.is_grad_enabled(), str(point)
    assert one_scope() == [1.5, 2.0]


def test_many_scopes_of_compiled_code_leave_nothing() -> None:
    """Neither our objects nor threads grow in number with the scopes that have ended.

    PyTorch's compiler leaves some 70 objects for each compilation, also without a scope (2.13).
    """
    grown = growth.grow(one_scope)
    print(f"torch-graph: {grown}")
    assert grown.threads <= 0
    assert grown.ours < 1
    assert state() == [{}, [], vars(ThreadState()), 0, True]
