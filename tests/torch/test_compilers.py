"""Compilers, tracers and TorchScript: captured, left alone, or said not to be seen."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

import amanda
from amanda.errors import CoverageWarning
from tests.torch.support import Counter, ForwardCounter, On, after, applied, before


class Backend:
    """A compiler that counts what it compiles and how often the result runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: fx.GraphModule, _inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x)) + 1


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def _doubling() -> On:
    return On(linear=after(lambda y: y * 2))


# -- torch.compile --------------------------------------------------------


def test_compiled_module_runs_captured_and_says_so_once(small: Small) -> None:
    """Under a scope a compiled model runs as captured, without its compiler, which one warning and
    the statistics say; after it the code that was compiled before runs again."""
    torch.compiler.reset()
    backend, counter = Backend(), ForwardCounter()
    compiled = torch.compile(small, backend=backend)
    wanted = compiled(X)
    assert (backend.compiled, backend.runs) == (1, 1)
    with applied(counter) as scope, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled(X)
        seen = compiled(X)
    assert [w.category for w in said] == [CoverageWarning]
    assert "torch.compile" in str(said[0].message)
    assert [*scope.statistics.compiled.values()] == ["operator by operator"]
    assert (backend.compiled, backend.runs) == (1, 1)
    assert torch.equal(seen, wanted)
    assert set(counter.ids) == {"Small.layer/linear:0", "Small/relu:0", "Small/add:0"}
    assert torch.equal(compiled(X), wanted)
    assert (backend.compiled, backend.runs) == (1, 2)


def test_compiled_first_inside_a_scope(small: Small) -> None:
    """A function that is first called under a scope compiles when it is called outside."""
    torch.compiler.reset()
    backend = Backend()
    compiled = torch.compile(small, backend=backend)
    with pytest.warns(CoverageWarning), applied(_doubling()):
        inside = compiled(X)
    assert backend.compiled == 0
    outside = compiled(X)
    assert (backend.compiled, backend.runs) == (1, 1)
    assert torch.equal(outside, small(X))
    assert torch.equal(inside, torch.relu(small.layer(X) * 2) + 1)


def test_compiled_inside_a_scope_is_pytorchs_own(small: Small) -> None:
    """A model that is compiled inside a scope is compiled whole afterwards, without us."""
    torch.compiler.reset()
    backend, graphs = Backend(), Backend()
    torch.compile(Small(), backend=graphs)(X)
    with applied(_doubling()):
        compiled = torch.compile(small, backend=backend)
    assert torch.equal(compiled(X), small(X))
    assert (backend.compiled, backend.runs) == (graphs.compiled, graphs.runs) == (1, 1)
    held = vars(compiled)["forward"]
    while hasattr(held, "__wrapped__"):
        held = held.__wrapped__
    assert not held.__module__.startswith("amanda")


def test_module_compiled_in_place(small: Small) -> None:
    """``module.compile()`` is treated as ``torch.compile`` is: same ids, captured in a scope."""
    torch.compiler.reset()
    backend, counter = Backend(), ForwardCounter()
    small.compile(backend=backend)
    wanted = small(X)
    with pytest.warns(CoverageWarning), applied(counter):
        small(X)
    assert set(counter.ids) == {"Small.layer/linear:0", "Small/relu:0", "Small/add:0"}
    assert torch.equal(small(X), wanted)
    assert (backend.compiled, backend.runs) == (1, 2)


def test_another_thread_keeps_its_compiled_functions(small: Small) -> None:
    """A thread that no scope covers runs compiled functions compiled."""
    torch.compiler.reset()
    backend = Backend()
    compiled = torch.compile(small, backend=backend)
    compiled(X)
    ready, done = threading.Event(), threading.Event()

    def run() -> None:
        ready.wait()
        compiled(X)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    with applied(ForwardCounter()):
        ready.set()
        assert done.wait(60)
    thread.join()
    assert backend.runs == 2


def test_dynamo_disable_and_is_compiling(small: Small) -> None:
    """Code that asks whether it is compiled is told what it is told without a scope."""
    asked = []

    @torch.compile(backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        asked.append(torch.compiler.is_compiling())
        return small(x)

    torch.compiler.reset()
    run(X)
    with applied(ForwardCounter()):
        run(X)
    assert asked == [True, True]


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_flex_attention_runs_under_a_scope(is_compiled: bool) -> None:
    """``flex_attention``, which compiles itself, is one operator with the vanilla result."""
    torch.compiler.reset()
    attention = torch.compile(flex_attention, backend="eager") if is_compiled else flex_attention
    q, k = torch.rand(2, 1, 2, 16, 16)

    def run() -> Any:
        return attention(q, k, q, score_mod=lambda score, b, h, i, j: score + i - j)

    wanted, counter = run(), ForwardCounter()
    with warnings.catch_warnings(), applied(counter):
        warnings.simplefilter("ignore", CoverageWarning)
        assert torch.equal(run(), wanted)
    assert counter.ops["flex_attention"] == 1


# -- tracers --------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_function_alone(small: Small, mode: str, gradients: bool) -> None:
    """A graph made by ``make_fx`` is the same as without a scope, that of a backward pass too."""

    def run(x: torch.Tensor) -> Any:
        if gradients:
            return torch.autograd.grad(small(x).sum(), small.layer.weight)
        return torch.nn.functional.linear(x, x).relu() + 1

    vanilla = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=gradients)(X)
    with applied(_doubling(), Counter()):
        traced = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=gradients)(X)
    assert traced.code == vanilla.code


def test_the_scope_goes_on_after_a_tracer(small: Small) -> None:
    """After tracing inside a scope, operators are instrumented as before, also if it failed."""
    counter = ForwardCounter()

    class Untraceable(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with applied(counter):
        fx.symbolic_trace(small)
        with pytest.raises(fx.proxy.TraceError):
            fx.symbolic_trace(Untraceable())
        seen = len(counter.ids)
        small(X)
    assert counter.ids[seen:] == ["Small.layer/linear:0", "Small/relu:0", "Small/add:0"]


def test_running_a_traced_graph_is_seen(small: Small) -> None:
    """The operators of an ``fx.GraphModule`` are ordinary operators."""
    traced = fx.symbolic_trace(small)
    counter = ForwardCounter()
    with applied(counter):
        traced(X)
    assert sorted(counter.ops) == ["add", "linear", "relu"]


def test_replays_of_cuda_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run what was captured, without a call of an operator."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: 3)
    with amanda.apply(amanda.Tool()) as scope:
        assert torch.cuda.CUDAGraph.replay(None) == 3  # type: ignore[arg-type]
    assert scope.statistics.not_seen == {"replays of CUDA graphs": 1}


# -- TorchScript ----------------------------------------------------------


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("program", [Small(), _double], ids=["module", "function"])
def test_scripted_programs_are_counted_as_not_seen(program: Any) -> None:
    """A TorchScript module or function runs unseen, and its calls and the nodes that differentiate
    them are counted."""
    scripted, x = torch.jit.script(program), X.clone().requires_grad_()
    scope, counter = applied(Counter()), Counter()
    with scope:
        first, second = scripted(x), scripted(x)
        (first + second).sum().backward()
    assert torch.equal(first, program(X))
    [calls, gradients] = [
        n for reason, n in scope.statistics.not_seen.items() if "Script" in reason
    ]
    with applied(counter):
        (program(x) + program(x)).sum().backward()
    assert calls == 2
    assert 0 < gradients <= counter.backward_ops.total()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_inside_a_scope(small: Small) -> None:
    """Compiling to TorchScript inside a scope works and records nothing of ours."""
    vanilla = torch.jit.script(small).code
    with applied(On(linear=before(lambda *_: None))):
        scripted = torch.jit.script(small)
    assert scripted.code == vanilla


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_classes_find_the_names_of_their_program() -> None:
    """``@torch.jit.script`` on a class looks names up where the program wrote it."""
    with applied(Counter()):

        @torch.jit.script
        def successor(x: int) -> int:
            return x + 1

        @torch.jit.script
        class Pair:
            def __init__(self, x: int) -> None:
                self.x = x

            def following(self) -> int:
                return successor(self.x)

    assert Pair(2).following() == 3
