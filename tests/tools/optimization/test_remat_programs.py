"""``remat`` with what programs do: random numbers, changes in place, hooks and functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.errors import AmandaError, ReplacementConflictError
from amanda_tools.remat import RematTool
from tests.running import in_threads
from tests.tools.optimization.remat_support import (
    Transformer,
    held,
    mlp,
    normalized,
    rematerialized,
    same,
    step,
)


def test_random_numbers_stay_as_they_were() -> None:
    """Dropout draws the same numbers again, and the program's numbers are those of a run
    without the tool."""
    torch.manual_seed(0)
    model, x = Transformer(dropout=0.2), torch.randint(50, (4, 24))
    torch.manual_seed(1)
    vanilla = [step(model, x) for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    tool = RematTool(budget="1KiB", ops="dropout")
    with amanda.apply(tool):
        found = [step(model, x) for _ in range(3)]
    assert all(map(same, found, vanilla))
    assert torch.equal(torch.get_rng_state(), state)
    assert "dropout" in {row["type"] for row in tool.op_rows() if row["recompute"]}


MODEL, LAYER = mlp(4), nn.Linear(4, 4)
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


def drawing_from_generators() -> Any:
    """What draws from a generator of the program's is not run a second time, not even once."""
    generator = torch.Generator().manual_seed(7)
    hidden = MODEL[:6](torch.randn(32, 32))
    noise = torch.bernoulli(torch.full_like(hidden, 0.5), generator=generator)
    torch.bernoulli(hidden.sigmoid(), generator=generator)
    MODEL[6:](hidden * noise).sum().backward()
    return [generator.get_state()]


def drawing_in_place() -> Any:
    """An operator in place that draws from a generator of the program's runs once."""
    generator, x = torch.Generator().manual_seed(7), torch.randn(32, 32, requires_grad=True)
    y = x.sin() * 2
    z = y.masked_fill(y > 0, 0.5)
    z.uniform_(-1, 1, generator=generator)
    (z * x).sum().backward()
    return [generator.get_state()]


def transformed() -> Any:
    """Operators run where hooks on saved tensors are refused, as under ``torch.func``."""
    x = torch.randn(4, 4, requires_grad=True) * 1
    for _ in range(2):
        y = torch.tanh(x)
        ENCODER(y, x)
        gradient = torch.func.grad(lambda value, y=y: (value.sin() * y).sum())(y)
    return [gradient.detach()]


def checkpointed_beside_a_thread() -> Any:
    """What a checkpoint runs again saves as many tensors as at first, also where an operator
    outside of it had the same id and is recomputed."""
    x = torch.randn(32, 32, requires_grad=True)
    results = []
    in_threads(lambda: results.append((x * 2).tanh()))
    y = checkpoint(lambda v: torch.tanh(v * v), x.exp(), use_reentrant=False)
    (y.square() + results[0]).sum().backward()
    return [x.grad]


def changing_views() -> Any:
    """A view may have one element and any stride, as in sampling from a Wishart distribution."""
    LAYER.zero_grad()
    output = LAYER(torch.randn(2, 4)).sin()
    output[:1, ::2][:, 0].add_(1)
    output[:, 1].mul_(2)
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in LAYER.parameters())]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (drawing_from_generators, {"budget": 0.5}),
        (drawing_in_place, {"budget": "1KiB"}),
        (transformed, {}),
        (checkpointed_beside_a_thread, {"budget": "1KiB"}),
        (changing_views, {"budget": "1KiB"}),
    ],
)
def test_programs_compute_as_without_it(program: Callable[[], Any], options: Any) -> None:
    """In the iteration that is measured and in those that recompute."""

    def run() -> Any:
        torch.manual_seed(0)
        return program()

    vanilla = run()
    with amanda.apply(RematTool(**options)):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(), vanilla, strict=True))


def test_forward_mode_is_left_alone() -> None:
    """Tensors with tangents, batches of tangents too, run as without the tool: also where the
    operators were measured, and are recomputed, in another differentiation."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32)
    jacobian = functools.partial(
        torch.autograd.functional.jacobian, model, x, strategy="forward-mode", vectorize=True
    )
    vanilla = jacobian()
    for runs in ((jacobian, jacobian), (lambda: step(model, x), jacobian)):
        with amanda.apply(RematTool(budget="1KiB")):
            *_, found = [run() for run in runs]
        assert torch.equal(found, vanilla)


def test_statistics_are_updated_once() -> None:
    """A batch norm that runs again does not count its batch again."""
    torch.manual_seed(0)
    models, x = [normalized(), normalized()], torch.randn(4, 3, 12, 12)
    models[1].load_state_dict(models[0].state_dict())
    for _ in range(3):
        step(models[0], x)
    tool = RematTool(budget=0.8, ops="batch_norm")
    with amanda.apply(tool):
        for _ in range(3):
            step(models[1], x)
    assert [row["type"] for row in tool.op_rows() if row["recompute"]].count("batch_norm") >= 4
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_operators_that_observe_what_they_quantize_are_not_repeated() -> None:
    """A quantizer that notes the range of what it has seen sees it once: no version counts what it
    writes into its buffers, and a second run would give other numbers."""

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        on = torch.ones(1, dtype=torch.int64)
        low, high, scale = torch.full((1,), math.inf), torch.full((1,), -math.inf), torch.ones(1)
        zero = torch.zeros(1, dtype=torch.int32)
        for factor in range(1, 5):
            x = (weight * factor).exp()
            found = torch.fused_moving_avg_obs_fake_quant(
                x, on, on, low, high, scale, zero, 0.1, 0, 255, 0
            )
            (found * found).sin().sum().backward()
        assert weight.grad is not None
        return [weight.grad, low, high, scale, zero]

    vanilla = train()
    tool = RematTool()
    with amanda.apply(tool):
        assert all(map(torch.equal, vanilla, train()))
    rows = {row["name"]: row for row in tool.result()["ops"]}
    assert rows["fused_moving_avg_obs_fake_quant"]["reason"] == "it changes a tensor in place"
    assert any(row["recompute"] for row in rows.values())


def test_changes_in_place_follow() -> None:
    """What is changed in place is made again with its changes: an activation, a sum."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Any) -> Any:
            inner = F.relu(self.norm(self.first(x)), inplace=True)
            found = self.second(inner)
            found += x
            found[:, 0].mul_(0.5)
            return found.relu_()

    torch.manual_seed(0)
    model, x = nn.Sequential(*[Adding() for _ in range(6)]), torch.randn(4, 8, 10, 10)
    vanilla, before = step(model, x), held(model, x)
    with rematerialized(model, x, budget="1KiB") as tool:
        assert same(step(model, x), vanilla)
        assert held(model, x) < 0.5 * before
        assert same(step(model, x), vanilla)
    changed = [row for row in tool.op_rows() if row["recompute"] and "norm" in row["id"]]
    assert changed
    seconds = [row for row in tool.op_rows() if row["recompute"] and "second" in row["id"]]
    assert seconds


def test_a_tensor_that_was_saved_before_its_change_is_an_error_as_ever() -> None:
    """In an iteration that changes a saved tensor in place, unlike the measured one."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)
    layers = list(model)

    def run(*, again: bool) -> Any:
        hidden = nn.Sequential(*layers[:7])(x).relu_()
        kept = hidden.square()
        if again:
            hidden.relu_()
        return (nn.Sequential(*layers[7:])(hidden).sum() + kept.sum()).backward()

    run(again=False)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        run(again=True)
    with amanda.apply(RematTool(budget="1KiB")):
        run(again=False)
        run(again=False)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            run(again=True)


def test_other_shapes_and_attributes_in_later_iterations() -> None:
    """A batch of another size is run again as it is, not as the measured one."""

    class Reshaping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            x = self.a(x).tanh().reshape(2 * len(x), 4)
            return F.pad(self.b(x.contiguous()), (0, len(x))).exp().sigmoid()

    torch.manual_seed(0)
    model = Reshaping()
    batches = [torch.randn(rows, 8) for rows in (6, 6, 4, 9)]
    vanilla = [step(model, x) for x in batches]
    tool = RematTool(budget=0.3)
    with amanda.apply(tool):
        found = [step(model, x) for x in batches]
    assert tool.summary()["recomputed"] > 0
    assert all(map(same, found, vanilla))


def test_checkpointed_regions_are_left_alone() -> None:
    """What a checkpoint of the program's keeps and recomputes is its own affair."""
    torch.manual_seed(0)
    model, x = mlp(6), torch.randn(32, 32)

    def run(inputs: Any) -> Any:
        inputs = model[:9](inputs)
        inputs = checkpoint(model[9:15], inputs, use_reentrant=False)
        return model[15:](inputs)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any) -> Any:
            return run(inputs)

    whole = Checkpointed()
    vanilla, before = step(whole, x), held(whole, x)
    with rematerialized(whole, x, budget=0.5) as tool:
        assert same(step(whole, x), vanilla)
        assert held(whole, x) < 0.7 * before
    reasons = {row["reason"] for row in tool.op_rows()}
    assert "a hook of the program keeps what it saves" in reasons


def test_autocast_is_set_again() -> None:
    """An operator that ran in bfloat16 runs in bfloat16 again, whatever holds by then."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)

    def run() -> tuple[Any, list[Any]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().square().mean().backward()
        return output.detach(), [p.grad.clone() for p in model.parameters()]

    vanilla = run()
    tool = RematTool(budget=0.4)
    with amanda.apply(tool):
        assert all(same(run(), vanilla) for _ in range(3))
    assert tool.summary()["recomputed"] > 0


def test_own_functions_are_run_again_only_if_they_are_named() -> None:
    """Nobody knows what else an autograd.Function does: ops names those that may."""
    calls: list[int] = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            calls.append(1)
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return 3 * ctx.saved_tensors[0] ** 2 * gradient

    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)

    def run() -> Any:
        x = weight
        for _ in range(4):
            x = Cube.apply(x).sin()
        return torch.autograd.grad(x.sum(), weight)[0]

    vanilla = run()
    tool, named = RematTool(budget=0.1), RematTool(budget=0.75, ops="Cube")
    calls.clear()
    with amanda.apply(tool):
        assert all(torch.equal(run(), vanilla) for _ in range(3))
    assert len(calls) == 12
    with amanda.apply(named):
        assert all(torch.equal(run(), vanilla) for _ in range(3))
    assert any(row["recompute"] for row in named.op_rows())
    assert {row["type"] for row in named.op_rows() if row["recompute"]} == {"Cube"}


def test_what_is_changed_later_is_an_error_as_ever() -> None:
    """A tensor that autograd needs and the program changes in place: an error, with the op."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(16, 32)
    with rematerialized(model, x, budget=0.5):
        loss = model(x).sum()
        with torch.no_grad():
            model[-1].weight.add_(1.0)
        with pytest.raises(AmandaError, match=r"Sequential\.12/linear:0 needs has been modified"):
            loss.backward()


@pytest.mark.parametrize("is_first", [False, True])
def test_beside_another_tool(is_first: bool) -> None:
    """Operators that another tool feeds other values have the gradients that they have with it."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)

    def run(*others: amanda.Tool) -> list[Any]:
        rounding = amanda.tools.load("quantize")(weight_bits=4, activation_bits=0)
        tools = (*others, rounding) if is_first else (rounding, *others)
        with amanda.apply(*tools):
            return [step(model, x) for _ in range(3)]

    tool = RematTool(budget=0.6)
    assert all(map(same, run(tool), run()))
    assert tool.summary()["recomputed"] > 0


def test_two_tools_in_one_place() -> None:
    """Another tool that stands in for the same operator: an error that names both."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)
    other = amanda.Tool()
    other.add_inst_for_op(
        lambda c: c.replace_op(c.get_function()) if c.get_op().__name__ == "gelu" else None
    )
    with amanda.apply(RematTool(budget="1KiB"), other):
        step(model, x)
        with pytest.raises(
            ReplacementConflictError, match=r"gelu:0 is replaced twice, by Tool\.function and"
        ):
            step(model, x)


def test_changes_that_no_version_counts_leave_their_tensor_alone() -> None:
    """A result that the program changes through .data is kept: another iteration may change it in
    an operator of another id, and nothing would tell."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)

    def run(*, is_first: bool) -> list[Any]:
        hidden = x
        for _ in range(6):
            hidden = torch.sin(hidden @ weight)
            if is_first:
                hidden.data.mul_(0.5)
            else:  # the same change
                hidden.data.div_(2.0)
            hidden = torch.tanh(hidden * weight)
        return list(torch.autograd.grad(hidden.sum(), (weight, x)))

    vanilla = run(is_first=True)
    tool = RematTool(budget=0.6)
    with amanda.apply(tool):
        found = [run(is_first=is_first) for is_first in (True, False, True)]
    assert all(all(map(torch.equal, each, vanilla)) for each in found)
    changed = [row for row in tool.op_rows() if "changes its tensors in place" in row["reason"]]
    assert "sin" in {row["type"] for row in changed}
    assert tool.summary()["recomputed"] > 0


def test_classes_of_tensors_are_not_asked() -> None:
    """The tool asks no ``__torch_function__`` of the program's about anything of its own."""
    torch.manual_seed(0)
    asked: list[str] = []

    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    model, x = mlp(4), torch.randn(32, 32)

    def run(cls: type[torch.Tensor]) -> list[str]:
        asked.clear()
        model(x.as_subclass(cls)).sum().backward()
        return list(asked)

    vanilla = run(Told)
    tool = RematTool(budget=0.5)
    with amanda.apply(tool):
        run(torch.Tensor)  # the plan has operators that get tensors of the class later
        assert [run(Told) for _ in range(3)] == [vanilla] * 3
    assert tool.summary()["recomputed"] > 0
