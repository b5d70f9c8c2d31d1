"""Figures of the steps of training loops as people write them, beside counts by hand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import amanda
from amanda_tools.flops import FlopsTool
from tests.running import applied

FEATURES, HIDDEN, CLASSES = 8, 16, 3
SAMPLE = 2 * (FEATURES * HIDDEN + HIDDEN * CLASSES)
"""Operations of one sample, forward."""

BACKWARD = 2 * (FEATURES * HIDDEN + 2 * HIDDEN * CLASSES)
"""Operations of one sample, backward: the data needs no gradient."""

Step = tuple[int, int]
"""Samples that a step sees forward and backward."""

EPOCH: list[Step] = [(4, 4), (4, 4), (2, 2)]
"""Batches of four of ten samples: the last one is smaller."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def batches(samples: int = 10, size: int = 4) -> Iterator[Any]:
    data = TensorDataset(torch.rand(samples, FEATURES), torch.arange(samples) % CLASSES)
    return iter(DataLoader(data, size, shuffle=True))


def evaluate(net: nn.Module) -> None:
    net.eval()
    with torch.no_grad():
        for x, y in batches(9, 3):
            net(x).argmax(1).eq(y).sum().item()
    net.train()


def epochs() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()


def evaluations() -> None:
    """Before training, after each epoch, and at the end."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    evaluate(net)
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        evaluate(net)
    evaluate(net)


def accumulation() -> None:
    """Four passes for each step, with an evaluation between steps."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        for number, (x, y) in enumerate(batches(31)):
            (functional.cross_entropy(net(x), y) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        evaluate(net)


def scaled() -> None:
    """Mixed precision; the gradients of the second step overflow, and the scaler skips it."""
    net, scaler = model(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(net(x), y) * (float("inf") if number == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def loss_of(net: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> Any:
    """What an optimizer calls: the loss of a batch, with its gradients."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    return loss


def closures() -> None:
    """The optimizer calls the model, as Lightning lets it, after an evaluation at first."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    evaluate(net)
    for _ in range(2):
        for x, y in batches():
            optimizer.step(functools.partial(loss_of, net, optimizer, x, y))
        evaluate(net)


def pairs() -> None:
    """Two passes of the model for one backward pass."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, _ in batches():
        optimizer.zero_grad()
        (net(x) - net(x + 0.1)).square().sum().backward()
        optimizer.step()


def two_optimizers() -> None:
    """Both step after each backward pass."""
    net = model()
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.1), torch.optim.Adam(net[2].parameters())]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def quasi_newton() -> None:
    """The optimizer multiplies, too, and calls the model three times for each step."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for x, y in batches():
        optimizer.step(functools.partial(loss_of, net, optimizer, x, y))


def by_hand() -> None:
    """Without an optimizer, and evaluated after each epoch."""
    net = model()
    for _ in range(2):
        for x, y in batches():
            net.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
        evaluate(net)


def inference() -> None:
    """After one call in training mode, to see the shape of the result."""
    net = model()
    net(torch.rand(1, FEATURES))
    evaluate(net)


def fail(*_: Any) -> None:
    raise MemoryError("on purpose")


def failing(register: str, trains: bool = True) -> None:
    """Passes of every second batch raise in a hook of the last layer, and are left out."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for number, (x, y) in enumerate(batches(14)):
        hook = getattr(net[2], register)(fail) if number % 2 else contextlib.nullcontext()
        with hook, contextlib.suppress(MemoryError), torch.set_grad_enabled(trains):
            loss = functional.cross_entropy(net(x), y)
            if trains:
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()


LOOPS: list[tuple[Callable[[], None], Sequence[Step]]] = [
    (epochs, 2 * EPOCH),
    (evaluations, 2 * EPOCH),
    (accumulation, 2 * [(16, 16), (15, 15)]),
    (scaled, EPOCH),
    (closures, 2 * EPOCH),
    (pairs, [(2 * n, 2 * n) for n, _ in EPOCH]),
    (two_optimizers, EPOCH),
    (quasi_newton, [(3 * n, 3 * n) for n, _ in EPOCH]),
    (by_hand, 2 * EPOCH),
    (functools.partial(failing, "register_forward_hook"), 2 * [(4, 4)]),
    (functools.partial(failing, "register_full_backward_hook"), 2 * [(4, 4)]),
    (functools.partial(failing, "register_forward_hook", trains=False), 2 * [(4, 0)]),
    (inference, [(1, 0), (3, 0), (3, 0), (3, 0)]),
]


@pytest.mark.parametrize(("loop", "steps"), LOOPS, ids=lambda value: getattr(value, "__name__", ""))
def test_steps_of_a_loop_are_those_that_it_takes(
    loop: Callable[[], None], steps: Sequence[Step]
) -> None:
    """Each with the samples that it trains on, and with nothing of an evaluation; operations of one
    sample are the same in all loops."""
    tool = FlopsTool()
    with amanda.apply(tool) as scope:
        loop()
    series = tool.figures_of_steps()
    assert scope.statistics.steps == tool.steps == len(steps)
    assert list(series) == list(range(len(steps)))
    found = [(figures["flops"], figures["flops_backward"]) for figures in series.values()]
    assert found == [(forward * SAMPLE, backward * BACKWARD) for forward, backward in steps]
    assert [figures["samples"] for figures in series.values()] == [n for n, _ in steps]
    summary = tool.result()["summary"]
    last, share = summary["per_step"], summary["per_sample"]
    assert last["flops"] == found[-1][0]
    assert share == {"flops": SAMPLE, "flops_backward": BACKWARD if steps[-1][1] else 0}
    assert f"forward, one of {steps[-1][0]} samples" in dict(next(iter(tool.tables())).rows)
    if "min" in last:
        assert last["min"]["flops"] == min(found)[0]
        assert last["max"]["flops"] == max(found)[0]


def generators_and_discriminators() -> None:
    """Of a GAN: each batch trains the one and then the other."""
    generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_discriminator = torch.optim.Adam(discriminator.parameters())
    loss = nn.BCEWithLogitsLoss()
    for x, _ in batches(8):
        of_discriminator.zero_grad()
        loss(discriminator(x), torch.ones(len(x), 1)).backward()
        made = generator(torch.rand(len(x), 4))
        loss(discriminator(made.detach()), torch.zeros(len(x), 1)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss(discriminator(made), torch.ones(len(x), 1)).backward()
        of_generator.step()


def test_each_optimizer_of_several_models_takes_steps_of_its_own() -> None:
    """A step has what ran since the last step of any of them."""
    tool = applied(FlopsTool(), generators_and_discriminators)
    found = [figures["flops"] for figures in tool.figures_of_steps().values()]
    generated, judged = 2 * 4 * (4 * 8), 2 * 4 * (8 * 1)
    assert found == 2 * [generated + 2 * judged, judged]


@pytest.mark.parametrize("kind", ["by hand", "optimizer"])
def test_a_step_of_functional_code_has_its_forward_pass(kind: str) -> None:
    """Without any module, what has run since the last step is the forward pass of the next one."""
    torch.manual_seed(0)
    weights = [torch.rand(FEATURES, HIDDEN), torch.rand(HIDDEN, CLASSES)]
    optimizer = torch.optim.SGD([weight.requires_grad_() for weight in weights], 0.1)
    tool = FlopsTool()
    with amanda.apply(tool):
        for x, y in batches():
            hidden = (x @ weights[0]).relu()
            functional.cross_entropy(hidden @ weights[1], y).backward()
            if kind == "optimizer":
                optimizer.step()
                optimizer.zero_grad()
                continue
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad  # type: ignore[operator]
                    weight.grad = None
    steps = list(tool.figures_of_steps().values())
    assert [step["flops"] for step in steps] == [n * SAMPLE for n, _ in EPOCH]
    assert [step["flops_backward"] for step in steps] == [n * BACKWARD for _, n in EPOCH]
    # No module tells what it is given.
    assert not any("samples" in step for step in steps)
