"""Functions made by ``torch.compile`` under the eager driver: captured, or eager with a reason."""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import amanda
from amanda.cli.last_line import last_line
from amanda.engine.op_ids import MANY
from amanda.errors import CoverageWarning
from tests.torch.compiled.support import Counting, X, compiled_eagerly
from tests.torch.support import Counter, applied, fingerprint

pytestmark = pytest.mark.filterwarnings(
    "ignore::amanda.errors.CoverageWarning", "ignore:The .grad attribute:UserWarning"
)

Step = Callable[..., torch.Tensor]
Make = Callable[[nn.Module, Callable[[Any], Any]], Step]
"""Makes a step of a model; the second argument compiles a function or does nothing."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4))


def _breaks(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        y = y * 2 if y.sum() > 0 else y * 3
        return (net(y) + y.sum().item()).sum()

    return compiled(step)


def _recompiles(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    @compiled
    def run(x: torch.Tensor, times: int, flag: bool) -> torch.Tensor:
        y = net(x)
        for _ in range(times):
            y = y + 1
        return y.sum() if flag else y.relu().sum()

    return lambda x: run(x, 1, True) + run(x, 2, True) + run(x[:2], 1, False) + run(x[:1], 1, True)


def _nested(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    inner = compiled(net)
    outer = compiled(lambda x: inner(x * 2) + 1)
    return lambda x: outer(x).sum() + inner(x).sum()


def _modes(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = net(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = net(x)
        return (net(x) * y).sum() + z.float().sum()

    return compiled(step)


class _Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss, labels = nn.CrossEntropyLoss(), torch.tensor([0, 1, 2])
        return loss(self.net(x), labels) + nn.MSELoss()(x, self.net(x))


def _made_modules(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    return compiled(_Loss(net))


def _in_place(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = net(x).clone()
        y[0] = 1.0
        y.add_(2)
        y.view(-1)[3:5] *= 2
        left, right = y.chunk(2, dim=1)
        return (left * right).sum()

    return compiled(step)


@torch.library.custom_op("amanda_captured::third", mutates_args=())
def _third(x: torch.Tensor) -> torch.Tensor:
    return x / 3


@_third.register_fake
def _third_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _operators(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.relu(net(x)) + torch.ops.aten.sin.default(x)
        return torch.einsum("ij,kj->ik", y, torch.ops.amanda_captured.third(x)).sum()

    return compiled(step)


def _with_step(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model, advance = compiled(net), compiled(optimizer.step)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        if loss.grad_fn is not None and net.training:
            advance()
        return loss

    return step


def _modules(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    # Blocks whose forward has one code.
    blocks = [compiled(nn.Sequential(nn.LayerNorm(4), net)) for _ in range(3)]
    return lambda x: blocks[2](blocks[1](blocks[0](x))).sum()


def _loop(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    # In a function, each call of an outermost module after the first begins an iteration.
    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        for column in range(3):
            x = net(x * 2) + x[:, column : column + 1]
        return x.sum()

    return run


def _turns(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    # Two compiled models take turns within one step.
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    first, second = compiled(net), compiled(other)
    return lambda x: (first(x) * second(x)).sum() + second(x * 2).sum() + first(x).sum()


class _Break(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def _layers_that_break(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    layers = compiled(nn.Sequential(net, _Break(), nn.Linear(4, 4)))
    return lambda x: layers(x).sum()


def _fused_layer(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval().requires_grad_(False)
    block, inner = compiled(layer), compiled(nn.LSTM(4, 4, batch_first=True))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = block(x[None])
        return inner(net(y))[0].sum()

    return step


def _run(make: Make, compile_: Callable[[Any], Any], scope: bool) -> tuple[Any, Counter, Any]:
    net, tool = _model(), Counter()
    step, results = make(net, compile_), []

    def train() -> None:
        for _ in range(3):
            net.zero_grad()
            torch.manual_seed(1)
            loss = step(X)
            loss.backward()
            results.append(fingerprint([loss, *[p.grad for p in net.parameters()]]))

    if not scope:
        train()
        return results, tool, None
    with applied(tool) as opened:
        train()
    return results, tool, opened.statistics


class _Weak:
    """A forward of a module that a library has put there."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.run = weakref.ref(module), type(module).forward

    def __call__(self, *args: Any) -> Any:
        return self.run(self.module(), *args)


class _Named(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"layer-1": net})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["layer-1"](x).sum()


def _forwards(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    model = _Named(net)
    for module in (model, *net.modules()):
        module.forward = _Weak(module)  # type: ignore[method-assign, assignment]
    return compiled(model)


@pytest.mark.parametrize(
    "make",
    [
        *(_breaks, _recompiles, _nested, _modes, _made_modules, _in_place, _operators),
        *(_with_step, _modules, _loop, _forwards, _turns),
    ],
    ids=lambda make: str(make.__name__),
)
def test_compiled_functions_run_captured(make: Make) -> None:
    """A compiled function stays captured, with its own results and the ids of eager mode."""
    own, _, _ = _run(make, compiled_eagerly, scope=False)
    torch.compiler.reset()
    _, eager, _ = _run(make, lambda function: function, scope=True)
    results, found, statistics = _run(make, compiled_eagerly, scope=True)
    assert results == own
    assert found.ids == eager.ids
    assert found.backward_ids == eager.backward_ids
    captured = list(statistics.compiled.values()).count("operator by operator")
    # What is around the update of an optimizer calls our hooks, and is not captured.
    assert len(statistics.compiled) - captured == (make is _with_step)
    assert f"compiled code ran operator by operator: {captured}" in last_line(statistics, 1.0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("make", [lambda step: step, lambda step: lambda: step()])
def test_compiled_steps_of_optimizers_do_not_warn(
    make: Callable[[Any], Any], optimizer: type[torch.optim.Optimizer]
) -> None:
    """Dynamo traces nothing of ours in a compiled step: it neither warns nor captures that."""

    def train() -> Any:
        net = _model()
        step = compiled_eagerly(make(optimizer(net.parameters()).step))  # type: ignore[call-arg]
        for _ in range(3):
            torch.manual_seed(1)
            net(X).sum().backward()
            step()
        return fingerprint([*net.parameters()])

    expected = train()
    torch.compiler.reset()
    tool = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with applied(tool, amanda.tools.load("count")()):
            assert train() == expected
    assert not [str(w.message) for w in caught if "Dynamo" in str(w.message)]
    assert any(op_id.startswith("/optimizer/") for op_id in tool.ids)


@pytest.mark.parametrize("make", [_layers_that_break, _fused_layer], ids=lambda make: make.__name__)
def test_layers_of_pytorch_have_their_ids_where_they_are_not_captured(make: Make) -> None:
    """A compiled layer of ``torch.nn`` that Dynamo does not capture whole has its eager ids."""
    wanted, eager, _ = _run(make, lambda function: function, scope=True)
    results, found, _ = _run(make, compiled_eagerly, scope=True)
    assert results == wanted
    assert (found.ids, found.backward_ids) == (eager.ids, eager.backward_ids)


def test_random_numbers_of_python_add_no_operator() -> None:
    """A compiled function that draws Python's random numbers runs eagerly: Dynamo takes them as
    tensors, which code around the graph makes."""

    def noisy(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
        return compiled(lambda x: (net(x) * random.uniform(1, 2)).sum())

    random.seed(3)
    wanted, eager, _ = _run(noisy, lambda function: function, scope=True)
    random.seed(3)
    results, found, statistics = _run(noisy, compiled_eagerly, scope=True)
    assert results == wanted
    assert (found.ids, found.backward_ids) == (eager.ids, eager.backward_ids)
    assert set(statistics.compiled.values()) == {"eagerly (it takes random numbers of Python)"}


def test_the_programs_own_compiler_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """On request a graph whose routines are traceable goes on to the compiler of the program."""
    monkeypatch.setenv("AMANDA_TORCH_COMPILER", "own")
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        number = len(runs)
        runs.append(0)

        def run(*args: Any) -> Any:
            runs[number] += 1
            return graph.forward(*args)

        return run

    model, tool = torch.compile(_model().eval(), backend=backend), amanda.Tool()
    doubled = amanda.traceable(lambda y: y * 2)
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(doubled)
            if context.get_op_id() == "Sequential.3/linear:0"
            else 0
        )
    )
    wanted = model(X) * 2
    with applied(tool) as scope:
        results = [model(X) for _ in range(3)]
    assert all(torch.equal(result, wanted) for result in results)
    assert runs == [1, 2]
    assert [*scope.statistics.compiled.values()] == ["by backend"]


class _Values(amanda.Tool):
    """Notes what operators of modules are given and give, by routines that are not traceable."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        if op_id.startswith("/"):
            return
        context.insert_before_op(self.note, op_id=op_id)
        context.insert_after_op(self.note, op_id=f"{op_id} first")
        context.insert_after_op(self.note, op_id=f"{op_id} second")

    def note(self, *tensors: Any, op_id: str) -> None:
        self.values.append((op_id, [None if x is None else x.tolist() for x in tensors]))


def test_routines_that_are_not_traceable_run_in_no_code_of_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph with such routines runs operator by operator, also where a compiler is asked for."""
    monkeypatch.setenv("AMANDA_TORCH_COMPILER", "own")
    tool, run = _Values(), torch.compile(_model(), backend="aot_eager")
    with applied(tool) as scope:
        run(X).sum().backward()
        run(X).sum().backward()
    assert len(tool.values) == 2 * 3 * len({op_id.split()[0] for op_id, _ in tool.values})
    assert [*scope.statistics.compiled.values()] == ["operator by operator"]


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, args, output: None)
    yield
    handle.remove()


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_Mode, "another TorchFunctionMode is on"),
        (lambda: torch.compiler.set_stance("force_eager"), "set_stance() is in force"),
        (_hooked, "there are hooks on all modules"),
    ],
    ids=["mode", "stance", "hooks"],
)
def test_what_is_not_captured_runs_eagerly(make: Callable[[], Any], reason: str) -> None:
    """Where a compiled function cannot be captured, it runs eagerly, and the reason is said."""
    model, tool = torch.compile(_model().eval(), backend="eager"), Counter()
    with applied(tool) as scope, make(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(X)
        model(X)
    texts = [str(one.message) for one in said if one.category is CoverageWarning]
    assert len(texts) == 1
    assert "runs eagerly" in texts[0]
    (way,) = scope.statistics.compiled.values()
    assert way.startswith("eagerly (")
    assert reason in way
    assert tool.ops["linear"] == 4


def test_a_graph_with_a_graph_inside_runs_eagerly() -> None:
    """What Dynamo captures with a graph inside runs eagerly, for a reason in the last line."""
    net, tool = _model().eval(), Counter()

    @compiled_eagerly
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False) * 2

    with applied(tool) as scope:
        assert torch.equal(run(X), net(X) * 2)
    assert tool.ops["linear"] == 4
    with applied(tool) as later:
        run(X)
    for one in (scope, later):
        assert "eagerly (" in last_line(one.statistics, 1.0)
        assert "runs a graph of its own" in last_line(one.statistics, 1.0)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.recurrent(x.relu())[0]


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4), _Recurrent], ids=["layer", "model"])
def test_the_last_line_of_each_scope_says_what_dynamo_leaves_alone(
    make: Callable[[], nn.Module],
) -> None:
    """What Dynamo cannot take runs eagerly, and each scope's last line gives Dynamo's reason."""
    run = compiled_eagerly(make())
    for _ in range(2):
        with applied(Counter()) as scope:
            run(X[None])
        line = last_line(scope.statistics, 1.0)
        assert "eagerly (Dynamo: " in line
        assert "RNN, GRU, or LSTM" in line


class _Heads(nn.Module):
    """Its operators get constants that equal the size of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(x.shape[0], 3, 2, 2)
        return torch.roll(heads, (x.shape[0], 2), (1, 2)).sum() * heads.numel()


def test_a_symbolic_size_is_told_from_an_equal_constant() -> None:
    """With ``dynamic=True`` all batches have the results of eager mode, gradients included,
    where the first one is as large as a constant."""

    def trained(run: Callable[[torch.Tensor], torch.Tensor], net: nn.Module) -> Any:
        results: list[Any] = []
        with applied(tool := Counter()):
            for size in (2, 5, 3):
                net.zero_grad()
                loss = run(torch.ones(size, 4))
                loss.backward()
                results.append(fingerprint([loss, *[p.grad for p in net.parameters()]]))
        return results, tool.ids, tool.backward_ids

    net = _Heads()
    compiled = torch.compile(net, backend="eager", dynamic=True)
    assert trained(compiled, net) == trained(net, net)


class _Points(Counter):
    """Notes passes and iterations among the operators."""

    def __init__(self) -> None:
        super().__init__()
        for end in (False, True):
            self.add_inst_for_iteration(self.note, end=end)
            self.add_inst_for_pass(self.note, end=end)

    def note(self, point: Any) -> None:
        self.ids.append(f"{point.point.name} {point.id} {point.iteration}")


def _two_models(net: nn.Module, compiled: Callable[[Any], Any]) -> Step:
    head = nn.Linear(4, 1)
    return compiled(lambda x: (head(net(x * 2) + 1) * head(x)).sum())


@pytest.mark.parametrize("make", [_two_models, _breaks, _loop, _with_step])
def test_tools_are_told_of_the_passes_in_compiled_functions(make: Make) -> None:
    """Calls of outermost modules that are captured within a function are forward passes, which
    begin and end among the operators as in eager mode, and begin iterations."""

    def told(compile_: Callable[[Any], Any]) -> list[str]:
        torch.manual_seed(0)
        step = make(_model().eval(), compile_)
        with applied(tool := _Points()):
            for _ in range(3):
                step(X).backward()
            with torch.no_grad():
                step(X)
        return tool.ids

    assert told(compiled_eagerly) == told(lambda function: function)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_mode_of_the_compiler_is_said_to_do_nothing() -> None:
    """The one warning that a function runs without its compiler says that its mode does nothing."""
    run = torch.compile(_model().eval(), mode="reduce-overhead")
    with applied(Counter()), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(X), run(X)
    (text,) = [str(one.message) for one in said if one.category is CoverageWarning]
    assert "without its compiler inductor, whose mode or options (triton.cudagraphs) do" in text


def _scopes(net: nn.Module, run: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """What inner and outer scopes see, and the results, with scopes in a caller of `run`."""
    outer, inner, halving = Counter(), Counter(), amanda.Tool()
    halving.add_inst_for_op(
        lambda context: (
            context.insert_after_op(lambda y: y * 0.5)
            if context.get_op().__name__ == "relu"
            else None
        )
    )
    results: list[torch.Tensor] = []

    def caller() -> None:
        with applied(inner, halving):
            results.append(run(X))
        results.append(run(X))

    caller()
    with applied(outer):
        results.append(run(X))
        caller()
        with amanda.disabled():
            results.append(run(X))
            caller()
        with applied(inner):
            results.append(run(X))
        caller()
    results.append(run(X))
    return outer.ids, inner.ids, fingerprint(results)


def test_scopes_open_and_end_between_calls_of_a_compiled_function() -> None:
    """Nested scopes, and ``disabled()``, act on each call of a compiled function as in eager mode,
    and the function's own code is as before when they have ended."""
    net = _model().eval()
    compiled = compiled_eagerly(net)
    compiled(X)
    assert _scopes(net, compiled) == _scopes(net, net)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(X)


class _Decoder(nn.Module):
    """Attends from one token to all tokens so far, whose keys and values it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        cache = tuple(torch.cat([old, new], 1) for old, new in zip(cache, (k, v), strict=True))
        return self.head(functional.scaled_dot_product_attention(q, *cache)), cache


def test_a_cache_of_keys_and_values_may_grow() -> None:
    """Generation token by token, whose cache is longer at each call, is that of eager mode."""

    def generated(compile_: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model, tool = compile_(_Decoder().eval()), Counter()
        x, cache = torch.ones(2, 3, 4), (torch.zeros(2, 0, 4),) * 2
        results: list[Any] = []
        with torch.no_grad(), applied(tool):
            for _ in range(6):
                y, cache = model(x, cache)
                x = y[:, -1:]
                results.append(fingerprint([y, *cache]))
        return results, tool.ids

    assert generated(compiled_eagerly) == generated(lambda model: model)


class _Shift(amanda.Tool):
    """Adds one to the result of each operator."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_after_op(lambda y: y + 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("changes", [False, True])
def test_operators_of_a_graph_may_share_an_id(backend: str, changes: bool) -> None:
    """Each of the operators that one call of a graph leads to is counted, and has its routines,
    where they share an id, as those of a name do after very many in an iteration."""

    def pooled(x: torch.Tensor) -> torch.Tensor:
        # It calls mul() and pow() twice each.
        return functional.lp_pool2d(x, 3.0, 2)

    def run(function: Callable[..., Any]) -> Any:
        counting, found = Counting(), []
        with torch.no_grad(), applied(counting, *[_Shift()] * changes) as scope:
            for _ in range(3):
                for _ in range(MANY):
                    X * 2
                found.append(function(X.reshape(1, 1, 3, 4)))
                amanda.new_iteration()
        counts = [counter.count for counter in counting.counters.values()]
        return (fingerprint(found), sum(counts)), [*scope.statistics.compiled.values()]

    eager, _ = run(pooled)
    compiled, ways = run(torch.compile(pooled, backend=backend))
    assert compiled == eager
    is_compiled = backend == "aot_eager" and not changes
    assert ways == ["by aot_eager" if is_compiled else "operator by operator"]
