"""What Dynamo captures, counts and calls around the operators of compiled functions."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import fx, nn

import amanda
from amanda_torch.compiled.captured import CapturedGraph
from amanda_torch.eager.interceptors import LOCAL
from tests.torch.compiled.support import X, compiled_eagerly
from tests.torch.support import TRANSPARENT, Counter, Standing, applied

pytestmark = pytest.mark.filterwarnings(
    "ignore::amanda.errors.CoverageWarning", "ignore:The .grad attribute:UserWarning"
)

DYNAMO_SAYS = "ignore:.*Dynamo d.*:UserWarning"
"""What Dynamo says of functions of core that it meets before the driver does."""


@pytest.mark.filterwarnings(DYNAMO_SAYS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_scope_may_be_opened_within_a_compiled_function(compiler: str) -> None:
    """What a compiled function runs within a scope that it opens is seen, and runs as it is."""
    tool = Counter()

    @torch.compile(backend=compiler)
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with applied(tool):
            z = torch.relu(y) + 1
        return z - 1

    x = torch.tensor([1.0, -2.0], requires_grad=True)
    for number in range(1, 4):
        result = function(x)
        assert torch.equal(result, torch.tensor([2.0, 0.0]))
        assert dict(tool.ops) == {"relu": number, "add": number}
    assert LOCAL.interceptor is None


@pytest.mark.filterwarnings(DYNAMO_SAYS)
def test_after_a_scope_within_a_compiled_function_functions_are_compiled_as_ever() -> None:
    """The scope takes no callback of Dynamo's along, also if it outlives the compiled function."""
    graphs: list[fx.GraphModule] = []

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=compiler)
    def closes(x: torch.Tensor) -> torch.Tensor:
        with applied(Counter()):
            x = x + 1
        return x.sin()

    @torch.compile(backend=compiler)
    def opens(x: torch.Tensor) -> Any:
        scope = applied(Counter())
        scope.__enter__()
        return scope

    def called(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    x = torch.rand(2)
    assert torch.equal(closes(x), (x + 1).sin())
    opens(x).__exit__(None, None, None)
    count = len(graphs)
    called(x)
    assert len(graphs) == count
    torch.compile(called, backend=compiler)(x)
    assert len(graphs) == count + 1


# -- what Dynamo counts, and what it captures once --------------------------------


def _counters() -> dict[str, dict[str, int]]:
    counters = torch._dynamo.utils.counters  # noqa: SLF001
    return {name: dict(found) for name, found in counters.items() if found}


@pytest.mark.parametrize("is_isolated", [False, True])
@pytest.mark.parametrize(
    "wish", [{"recompile_limit": 1}, {"error_on_recompile": True}], ids=["limit", "error"]
)
def test_captures_do_not_count_towards_the_limits_of_the_program(
    wish: dict[str, Any], is_isolated: bool
) -> None:
    """A function that Dynamo may capture once can be called before, in and after scopes."""
    options = {"isolate_recompiles": True} if is_isolated else {}
    if is_isolated and "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("new in PyTorch 2.13")
    function = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True, **options)
    counter = Counter()
    with torch._dynamo.config.patch(wish):  # noqa: SLF001
        for _ in range(2):
            vanilla = function(X)
            with applied(counter) as scope:
                instrumented = function(X)
            assert list(scope.statistics.compiled.values()) == ["operator by operator"]
            assert torch.equal(vanilla, instrumented)
        with applied(counter):
            torch.compiler.reset()
            assert torch.equal(function(X), vanilla)
        assert torch.equal(function(X), vanilla)
    assert counter.ops["sin"] == 3


def test_captures_are_in_no_counter_of_the_program() -> None:
    """Dynamo's counters say what the program has compiled."""
    function = compiled_eagerly(lambda x: x.sin() + 1)
    torch._dynamo.utils.counters.clear()  # noqa: SLF001
    function(X)
    vanilla = _counters()
    with applied(Counter()):
        function(X)
        compiled_eagerly(lambda x: x.cos().sum().item())(X)
    assert vanilla
    assert _counters() == vanilla


def _attention(heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(4, heads, batch_first=True)


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def _attend(model: nn.Module) -> Callable[[], Any]:
    attention = compiled_eagerly(model)
    inputs = (X[None],) * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    return lambda: attention(*inputs)


def _attend_flexibly() -> Any:
    x = torch.linspace(-1, 1, 2 * 16 * 8).reshape(1, 2, 16, 8)
    return torch.nn.attention.flex_attention.flex_attention(x, x, x)


def _compile_anew() -> Any:
    return compiled_eagerly(_plus_one)(X)


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


ATTENTION: dict[str, Callable[[], Callable[[], Any]]] = {
    "attention": lambda: _attend(_attention().eval()),
    "attention in training": lambda: _attend(_attention()),
    "encoder": lambda: _attend(_encoder().eval()),
    "flex_attention": lambda: compiled_eagerly(_attend_flexibly),
    "compiled at each call": lambda: _compile_anew,
}


@pytest.mark.parametrize("make", ATTENTION.values(), ids=list(ATTENTION))
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_function_is_captured_once(
    make: Callable[[], Callable[[], Any]], gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls in one form share what Dynamo has captured, and what it has not; tools see each."""
    captured = []
    init = CapturedGraph.__init__

    def noting(self: CapturedGraph, *args: Any) -> None:
        captured.append(self)
        init(self, *args)

    monkeypatch.setattr(CapturedGraph, "__init__", noting)
    run, counter = make(), Counter()
    with torch.set_grad_enabled(gradients), applied(counter):
        run()
        once, first = counter.ops.copy(), len(captured)
        for _ in range(3):
            run()
    assert first
    assert len(captured) == first
    assert counter.ops == {name: 4 * count for name, count in once.items()}


def test_code_of_dynamo_may_have_no_hash() -> None:
    """Operators that code of Dynamo calls have a phase, also where constants of it are mutable."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    constants = (*run.__code__.co_consts, {"a": 1})
    unhashable = types.FunctionType(run.__code__.replace(co_consts=constants), globals(), "run")
    with pytest.raises(TypeError):
        hash(unhashable.__code__)
    counter = Counter()
    with applied(counter):
        unhashable(X)
    assert counter.ops == {"sin": 1}
    with amanda.apply(amanda.tools.load("coverage")()):
        unhashable(X)


CONTROL_FLOW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cond": lambda x: torch.cond(x.sum() > 9, torch.cos, lambda t: t.sin() * 2, (x,)),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(  # noqa: SLF001
        lambda i, _: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), x)
    )[1],
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [amanda.Tool, Counter, *TRANSPARENT])
def test_control_flow_has_the_gradients_that_it_has_without_a_tool(
    name: str, compiled: bool, make: Callable[[], amanda.Tool]
) -> None:
    """``torch.cond`` and its like are operators with gradients, called in a scope as without."""
    function = compiled_eagerly(CONTROL_FLOW[name]) if compiled else CONTROL_FLOW[name]

    def run() -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        y = function(x)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    vanilla, counter = run(), Counter()
    with applied(make(), counter):
        for _ in range(2):
            assert all(map(torch.equal, run(), vanilla))
    assert counter.ops[name] == 2


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Standing(nn.Parameter(torch.ones(4, 2)))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight  # type: ignore[operator]


def test_operators_on_what_stands_for_a_tensor_have_their_eager_ids() -> None:
    """A captured operator that a ``__torch_function__`` of the program calls is in its module."""
    model = nn.Sequential(_Product(), nn.ReLU())
    with applied(eager := Counter()):
        model(X)
    with applied(found := Counter()):
        compiled_eagerly(model)(X)
    assert found.ids == eager.ids
