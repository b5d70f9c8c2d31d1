"""Backward operators and gradients in what the program's own compiler makes of a function."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CoverageWarning
from amanda_torch.compiled import captured
from amanda_torch.compiled.compilers import OWN_COMPILER
from amanda_torch.plugin import COMPILER_VARIABLE, TorchGraphDriver
from tests import models
from tests.torch.compiled.support import Counting, X
from tests.torch.support import applied, fingerprint

COMPILERS = pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)

Analysis = Callable[[amanda.OpContext], Any]
RUNS = 5


@pytest.fixture(autouse=True)
def _own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_VARIABLE, OWN_COMPILER)
    # Each message is said once in a process.
    monkeypatch.setattr(captured, "_SAID", set())


def net() -> nn.Module:
    torch.manual_seed(0)
    # Dropout returns its input in eval mode, where compilers copy it.
    layers = [nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 2), nn.Dropout(0.5)]
    return nn.Sequential(*layers).eval()


def train(run: Callable[..., Any], model: nn.Module) -> list[Any]:
    """The losses and gradients of some steps."""
    found = []
    for _ in range(RUNS):
        model.zero_grad()
        torch.manual_seed(1)
        loss = run(X).square().mean()
        loss.backward()
        found.append(
            [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        )
    return found


def close(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        torch.allclose(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)
    )


def tool_of(analysis: Analysis, backward: bool = False) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(analysis, backward=backward)
    return tool


def both(make: Callable[[], amanda.Tool], compiler: str) -> tuple[Any, Any, list[str]]:
    """What eager and compiled training give under a tool, and how the compiled function ran."""
    model = net()
    with applied(make()):
        eager = train(model, model)
    run = torch.compile(model, backend=compiler)
    with amanda.apply(make(), drivers=[TorchGraphDriver]) as scope:
        compiled = train(run, model)
    assert not scope.statistics.not_seen
    return eager, compiled, [*scope.statistics.compiled.values()]


@amanda.traceable
def masked(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gradient * mask


@amanda.traceable
def tripled(*gradients: Any) -> Any:
    return [None if gradient is None else gradient * 3 for gradient in gradients]


@amanda.traceable
def swapped(gradient: torch.Tensor) -> Any:
    return gradient.cos()


def _mask_weights(context: amanda.OpContext) -> None:
    if context.get_op().__name__ == "linear":
        mask = (context.get_value(1) > 0).float()
        context.insert_after_backward_op(masked, grad_inputs=[1], mask=mask)


def _triple(context: amanda.OpContext) -> None:
    if context.get_op().__name__ == "linear":
        context.insert_before_backward_op(tripled)


def _swap(context: amanda.OpContext) -> None:
    if context.get_op().__name__ == "relu":
        context.replace_backward_op(swapped)


def _triple_at_node(context: amanda.OpContext) -> None:
    if context.get_backward_op().__name__ == "AddmmBackward0":
        context.insert_before_backward_op(tripled)
    if context.get_backward_op().__name__ == "ReluBackward0":
        mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0])
        context.insert_after_backward_op(masked, grad_inputs=[0], mask=mask)


@COMPILERS
@pytest.mark.parametrize(
    "make",
    [
        lambda: tool_of(_mask_weights),
        lambda: tool_of(_triple),
        lambda: tool_of(_swap),
        lambda: tool_of(_triple_at_node, backward=True),
    ],
    ids=["input gradients", "output gradients", "replaced", "at backward operators"],
)
def test_traceable_routines_on_gradients_are_compiled(
    make: Callable[[], amanda.Tool], compiler: str
) -> None:
    """Traceable routines on gradients become a part of the compiled backward pass, and have the
    gradients of eager mode."""
    model = net()
    vanilla = train(model, model)
    eager, compiled, ways = both(make, compiler)
    assert ways == [f"by {compiler}"]
    assert close(compiled, eager)
    assert not close(compiled, vanilla)


@COMPILERS
def test_code_with_routines_on_gradients_stays_in_its_scope(compiler: str) -> None:
    """Two scopes with other values have their own code, and none of it is used outside of them."""
    model = net()
    run = torch.compile(model, backend=compiler)
    vanilla = train(run, model)
    for factor in (2.0, 4.0):

        def scale(context: amanda.OpContext, factor: float = factor) -> None:
            if context.get_op_id() == "Sequential.3/linear:0":
                context.insert_after_backward_op(masked, grad_inputs=[1], mask=torch.tensor(factor))

        with amanda.apply(tool_of(scale), drivers=[TorchGraphDriver]) as scope:
            found = train(run, model)
        assert [*scope.statistics.compiled.values()] == [f"by {compiler}"]
        for one, other in zip(found, vanilla, strict=True):
            assert torch.allclose(one[-2], other[-2] * factor)
            assert torch.allclose(one[1], other[1])
    assert close(train(run, model), vanilla)


@COMPILERS
def test_counters_at_backward_operators_leave_a_function_compiled(compiler: str) -> None:
    """Backward operators of compiled code are counted with the ids of eager mode, accumulations
    of gradients among them, and results are those of the compiler."""
    model, eager, tool = net(), Counting(), Counting()
    with applied(eager):
        train(model, model)
    run = torch.compile(model, backend=compiler)
    wanted = train(run, model)
    with amanda.apply(tool, drivers=[TorchGraphDriver]) as scope:
        found = train(run, model)
    assert [*scope.statistics.compiled.values()] == [f"by {compiler}"]
    assert tool.counts() == eager.counts()
    assert any("AccumulateGrad" in op_id for op_id in tool.counts())
    # The runs before it is compiled are those of eager mode.
    assert fingerprint(found[-1]) == fingerprint(wanted[-1])
    before = tool.counts()
    run(X).sum().backward()
    assert tool.counts() == before


@COMPILERS
def test_routines_on_gradients_beside_counters_at_backward_operators(compiler: str) -> None:
    """Both are compiled: the gradients and the counts are those of eager mode."""
    counts: list[Counting] = []

    def make() -> amanda.Tool:
        counts.append(Counting())
        tool = tool_of(_mask_weights)
        tool.depends_on(counts[-1])
        return tool

    eager, compiled, ways = both(make, compiler)
    assert ways == [f"by {compiler}"]
    assert close(compiled, eager)
    assert counts[0].counts() == counts[1].counts()


@pytest.mark.parametrize("name", ["gpt2", "resnet18"])
def test_each_backward_operator_of_a_model_has_its_owner(name: str) -> None:
    """In the compiled GPT-2 and ResNet-18 the backward operators are counted, at their forward
    operators, as often as in eager mode: none is left out."""
    torch.manual_seed(0)
    model, inputs = models.gpt2(layers=1) if name == "gpt2" else models.resnet18()
    state = copy.deepcopy(model.state_dict())

    def counted(run: Callable[..., Any], **options: Any) -> tuple[dict[str, int], Any, Any]:
        model.load_state_dict(state)
        with amanda.apply(tool := Counting(), **options) as scope:
            for _ in range(4):
                model.zero_grad()
                torch.manual_seed(1)
                loss = models.loss(run(**inputs))
                loss.backward()
        gradients = [p.grad for p in model.parameters()]
        return tool.counts(), fingerprint([loss, *gradients]), scope.statistics

    eager, wanted, _ = counted(model)
    compiled = torch.compile(model, backend="aot_eager")
    counts, found, statistics = counted(compiled, drivers=[TorchGraphDriver])
    assert [*statistics.compiled.values()] == ["by aot_eager"]
    assert counts == eager
    assert found == wanted


@COMPILERS
def test_routines_on_gradients_that_are_not_traceable_run_operator_by_operator(
    compiler: str,
) -> None:
    """Where a routine on gradients is not traceable, the function runs operator by operator, and
    the message names the routine."""

    def make() -> amanda.Tool:
        return tool_of(
            lambda c: (
                c.insert_before_backward_op(lambda *g: [x * 2 for x in g])
                if c.get_backward_op().__name__ == "ReluBackward0"
                else None
            ),
            backward=True,
        )

    with pytest.warns(CoverageWarning, match=rf"not with {compiler}: .*lambda.* not traceable"):
        eager, compiled, ways = both(make, compiler)
    assert ways == ["operator by operator"]
    assert [fingerprint(one) for one in compiled] == [fingerprint(one) for one in eager]


@pytest.mark.parametrize("ends", [True, False], ids=["scope ends", "disabled"])
def test_a_compiled_backward_pass_after_the_scope(ends: bool) -> None:
    """Routines in a compiled backward pass act after the end of the scope of the forward pass,
    and under ``disabled()``; counters count nothing then."""
    model, counts = net(), Counting()
    tool = tool_of(_mask_weights)
    tool.depends_on(counts)
    run = torch.compile(model, backend="aot_eager")
    with amanda.apply(tool, drivers=[TorchGraphDriver]) as scope:
        wanted = train(run, model)[-1]
        model.zero_grad()
        loss, before = run(X).square().mean(), counts.counts()
        if not ends:
            with amanda.disabled():
                loss.backward()
    assert [*scope.statistics.compiled.values()] == ["by aot_eager"]
    if ends:
        loss.backward()
    assert close([wanted[1:]], [[p.grad for p in model.parameters()]])
    assert counts.counts() == before


def test_other_backward_operators_than_those_of_eager_mode() -> None:
    """A compiler makes another backward operator of dropout: with a routine at that one, the
    function runs operator by operator, and the message names both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def triple(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "dropout":
            context.insert_before_backward_op(tripled)

    with applied(tool_of(triple, backward=True)):
        eager = train(model, model)
    run = torch.compile(model, backend="aot_eager")
    with (
        amanda.apply(tool_of(triple, backward=True), drivers=[TorchGraphDriver]) as scope,
        pytest.warns(CoverageWarning, match="NativeDropoutBackward0, and in eager mode Mul"),
    ):
        found = train(run, model)
    assert [*scope.statistics.compiled.values()] == ["operator by operator"]
    assert [fingerprint(one) for one in found] == [fingerprint(one) for one in eager]


def test_a_graph_that_no_backward_pass_comes_to() -> None:
    """Without a backward pass a graph runs operator by operator, and that is said in the end."""
    model = net()
    run = torch.compile(model, backend="aot_eager")
    with (
        amanda.apply(Counting(), drivers=[TorchGraphDriver]) as scope,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(12):
            run(X)
    texts = [str(one.message) for one in said if one.category is CoverageWarning]
    assert [text for text in texts if "no backward pass has come to" in text]
    assert [*scope.statistics.compiled.values()] == ["operator by operator"]
