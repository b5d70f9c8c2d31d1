"""``remat``: less memory for the backward pass, the same gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import amanda
from amanda.errors import AmandaError
from amanda_tools.remat import RematTool

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class Block(nn.Module):
    """A residual block, with an activation in place as everybody has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.other_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        found = self.relu(self.norm(self.first(x)))
        return F.relu(self.other_norm(self.second(found)) + x)


def mlp(depth: int = 12) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[Block(8) for _ in range(4)])


def normalized() -> nn.Module:
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *[module for part in parts for module in part])


class Transformer(nn.Module):
    """Attention written out, with views, tied weights and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout, "gelu", batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(dropout: float = 0.0) -> nn.Module:
    return Transformer(dropout)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.randn(64, 32)),
    "resnet": (resnet, lambda: torch.randn(4, 3, 12, 12)),
    "transformer": (transformer, lambda: torch.randint(50, (4, 24))),
}


class Alive(TorchDispatchMode):
    """The memory of what was computed, independently of hooks: every storage, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(item, torch.Tensor):
                self._storages.append(weakref.ref(item.untyped_storage()))
        return result

    def bytes(self, but: Any) -> int:
        """What is alive of it, parameters aside."""
        known = {id(tensor.untyped_storage()) for tensor in but}
        found = {id(s): s for ref in self._storages if (s := ref()) is not None}
        return sum(s.nbytes() for key, s in found.items() if key not in known)


def step(model: Any, x: Any) -> tuple[Any, list[Any]]:
    """Output and gradients of a training step, without its update."""
    model.zero_grad()
    output = model(x)
    output.float().square().mean().backward()
    return output.detach(), [p.grad.clone() for p in model.parameters()]


def held(model: Any, x: Any) -> int:
    """Bytes that are alive after the forward pass for the backward pass, the loss aside."""
    with Alive() as alive:
        loss = model(x).float().square().mean()
    found = alive.bytes([*model.parameters(), *model.buffers(), loss, x])
    loss.backward()
    return found


def same(a: tuple[Any, list[Any]], b: tuple[Any, list[Any]]) -> bool:
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


@contextmanager
def rematerialized(model: Any, x: Any, **options: Any) -> Iterator[RematTool]:
    """After the iteration that is measured."""
    tool = amanda.tools.load("remat")(**options)
    with amanda.apply(tool):
        step(model, x)
        yield tool


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_memory_is_less(name: str) -> None:
    """Half of the bytes: what is alive after the forward pass is within the budget."""
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = make(), data()
    vanilla, before = step(model, x), held(model, x)
    with rematerialized(model, x, budget=0.5) as tool:
        assert same(step(model, x), vanilla)
        after = held(model, x)
        assert same(step(model, x), vanilla)
        found = tool.result()["summary"]
    assert found["is_met"]
    assert found["is_applied"]
    given = x.untyped_storage().nbytes()
    assert after <= found["held_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
    assert found["saved_bytes"] - given <= before
    assert after <= 0.5 * (before + given)
    assert held(model, x) == before


def test_the_backward_pass_keeps_to_the_peak() -> None:
    """What is alive at any time of the backward pass is less than without the tool."""

    def peak(model: Any, x: Any) -> int:
        highest = 0
        with Alive() as alive:

            def look(*_: Any) -> None:
                nonlocal highest
                highest = max(highest, alive.bytes([*model.parameters()]))

            handles = [m.register_full_backward_hook(look) for m in model]
            model(x).square().mean().backward()
        for handle in handles:
            handle.remove()
        return highest

    torch.manual_seed(0)
    model, x = mlp(24), torch.randn(64, 32, requires_grad=True)
    vanilla = peak(model, x)
    with rematerialized(model, x, budget=0.4) as tool:
        peak(model, x)
        found = peak(model, x)
    assert tool.result()["summary"]["is_met"]
    # The gradients of the activations come on top, with and without it.
    assert found < 0.6 * vanilla


def test_a_budget_that_cannot_be_met() -> None:
    """The plan is the best there is, and the summary says so."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(64, 32)
    vanilla = step(model, x)
    with rematerialized(model, x, budget="1KiB") as tool:
        assert same(step(model, x), vanilla)
    found = tool.result()["summary"]
    assert found["budget_bytes"] == 1024
    assert not found["is_met"]
    assert found["peak_bytes"] == found["minimum_bytes"] < 0.5 * found["saved_bytes"]
    assert "cannot be met" in next(iter(tool.tables())).title


def test_planning_only() -> None:
    """apply=False measures and plans, and changes nothing."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(64, 32)
    before = held(model, x)
    with rematerialized(model, x, budget=0.5, apply=False) as tool:
        assert held(model, x) == before
    found = tool.result()
    assert not found["summary"]["is_applied"]
    assert found["summary"]["recomputed"] == sum(row["recompute"] for row in found["ops"]) > 0
    assert all(row["cost_us"] > 0 for row in found["ops"] if row["recompute"])


def test_random_numbers_stay_as_they_were() -> None:
    """Dropout draws the same numbers again, and the program's numbers are those of a run
    without the tool."""
    torch.manual_seed(0)
    model, x = transformer(dropout=0.2), torch.randint(50, (4, 24))
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


def test_generators_of_the_program_are_left_alone() -> None:
    """What draws from a generator of its own is not run a second time, not even once."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)

    def run() -> Any:
        generator = torch.Generator().manual_seed(7)
        hidden = model[:6](x)
        noise = torch.bernoulli(torch.full_like(hidden, 0.5), generator=generator)
        torch.bernoulli(hidden.sigmoid(), generator=generator)
        model[6:](hidden * noise).sum().backward()
        return generator.get_state()

    vanilla = run()
    tool = RematTool(budget=0.5)
    with amanda.apply(tool):
        assert all(torch.equal(run(), vanilla) for _ in range(2))


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


def test_a_graph_that_is_kept() -> None:
    """The backward pass may run twice, in parts, and be differentiated itself."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(16, 32)
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]

    def differentiate() -> list[Any]:
        loss = model(x).square().mean()
        first = torch.autograd.grad(loss, weights[-2:], retain_graph=True)
        loss.backward(retain_graph=True)
        second = torch.autograd.grad(loss, weights, create_graph=True)
        norm = sum(g.square().sum() for g in second)
        return [*first, *second, *torch.autograd.grad(norm, weights)]

    vanilla = differentiate()
    with rematerialized(model, x, budget=0.4) as tool:
        found = differentiate()
    assert tool.summary()["recomputed"] > 0
    assert all(map(torch.equal, found, vanilla))


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


def test_evaluation_before_training() -> None:
    """What ran without gradients first is measured when it runs with them."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)
    vanilla, before = step(model, x), held(model, x)
    tool = RematTool(budget=0.5)
    with amanda.apply(tool):
        with torch.no_grad():
            model(x)
        for _ in range(3):
            assert same(step(model, x), vanilla)
        assert held(model, x) < 0.6 * before
        with torch.no_grad():
            assert torch.equal(model(x), vanilla[0])


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


def test_nothing_stays_alive() -> None:
    """A forward pass without a backward pass, and the end of the scope, leave nothing behind."""
    torch.manual_seed(0)
    model, x = mlp(6), torch.randn(32, 32)
    with rematerialized(model, x, budget=0.3):
        gc.disable()
        try:
            with Alive() as alive:
                model(x)
                output = model(x).detach()
            parameters = [*model.parameters(), output, x]
            model(x).sum().backward()
            left = alive.bytes(parameters)
        finally:
            gc.enable()
    assert left == 0
    assert step(model, x)[0].shape == output.shape


def test_bad_options() -> None:
    """A budget is a size or a share."""
    for budget in ("many", "5 apples", "0", "-3"):
        with pytest.raises(ValueError, match="neither a size such as 512MiB nor a share"):
            RematTool(budget=budget)
    sizes = {"512MiB": 512 << 20, "2GB": 2 * 10**9, "1000": 1000, "0.25": 250}
    assert {b: RematTool(budget=b).options.bytes_of(1000) for b in sizes} == sizes
