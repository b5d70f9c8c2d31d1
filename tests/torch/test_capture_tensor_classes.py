"""The interceptor ``capture`` where tensors are of a subclass, or a module enters a mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amanda_torch import _internals
from amanda_torch.plugin import TorchEagerDriver
from tests.torch.support import Counter, applied, interceptors

VARIABLE = TorchEagerDriver.interceptor_variable
CALLS = 5


class Told(torch.Tensor):
    """Tells which functions PyTorch asks it to run, reads of attributes among them."""

    told: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Told.told.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Silent(torch.Tensor):
    """Overrides nothing."""


class ToldMode(TorchFunctionMode):
    """Tells the same as a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Told.told.append(func.__name__)
        return func(*args, **(kwargs or {}))


ONES = torch.ones(4).as_subclass(Told)


class Runs(nn.Module):
    """Runs a function on a linear layer and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kept = [ONES]
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Weighted(nn.Module):
    """A linear layer whose weight is of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc.weight = nn.Parameter(self.fc.weight.detach().as_subclass(Told))

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x)


def _in_mode(module: Any, x: torch.Tensor) -> Any:
    with ToldMode():
        return module.fc(x).relu()


def _plain() -> Any:
    return torch.rand(2, 4)


def _told() -> Any:
    return _plain().as_subclass(Told).requires_grad_()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "input": (lambda: Runs(lambda m, x: m.fc(x).tanh()), _told),
    "input that overrides nothing": (
        lambda: Runs(lambda m, x: m.fc(x).tanh()),
        lambda: _plain().as_subclass(Silent),
    ),
    "in a dict in a list": (lambda: Runs(lambda m, x: m.fc(x[0]["x"])), lambda: [{"x": _told()}]),
    "weight": (Weighted, _plain),
    "global": (lambda: Runs(lambda m, x: m.fc(x) + ONES), _plain),
    "attribute": (lambda: Runs(lambda m, x: m.fc(x) * m.kept[0]), _plain),
    "made": (lambda: Runs(lambda m, x: m.fc(x.as_subclass(Told))), _plain),
    "made, overrides nothing": (lambda: Runs(lambda m, x: m.fc(x.as_subclass(Silent))), _plain),
    "mode": (lambda: Runs(_in_mode), _plain),
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def nodes_of(outputs: torch.Tensor) -> list[str]:
    """The names of the backward operators of a result, in one order."""
    names, waiting = [], [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.append(type(node).__name__)
            waiting += [following for following, _ in node.next_functions]
    return names


def steps_of(model: Callable[..., Any], make: Callable[[], Any]) -> list[Any]:
    """What each of a few steps gives, and all that a class of tensors is told in it."""
    torch.manual_seed(1)
    steps: list[Any] = []
    for _ in range(CALLS):
        given = make()
        Told.told.clear()
        outputs = model(given)
        nodes = nodes_of(outputs)
        outputs.sum().backward()
        log = Told.told.copy()
        with _internals.no_overrides():
            steps.append((log, outputs.detach().tolist(), type(outputs), nodes))
    return steps


@pytest.mark.parametrize("interceptor", interceptors("mode", "gate", "capture"))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_class_of_tensors_is_told_of_what_the_program_does_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch, program: str, interceptor: str
) -> None:
    """Neither we nor Dynamo read a tensor of a subclass: modules that use one run as they are."""
    make, given = PROGRAMS[program]
    torch.manual_seed(0)
    wanted = steps_of(make(), given)
    monkeypatch.setenv(VARIABLE, interceptor)
    torch.manual_seed(0)
    model, tool = make(), Counter()
    with applied(tool) as scope:
        found = steps_of(model, given)
    assert found == wanted
    assert len(tool.ids) % CALLS == 0
    ways = list(scope.statistics.modules.values())
    if interceptor == "capture":
        assert len(ways) == 1
        assert "of a subclass of Tensor" in ways[0]
    else:
        assert not ways


def test_a_call_with_plain_tensors_is_captured_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that are refused for their inputs do not count as attempts that have failed."""
    monkeypatch.setenv(VARIABLE, "capture")
    model = Runs(lambda m, x: m.fc(x).tanh())
    with applied(Counter()) as scope:
        for _ in range(8):
            model(_told())
        for _ in range(3):
            model(_plain())
    assert list(scope.statistics.modules.values()) == ["captured"]


class Asked(nn.Module):
    """Counts how often attributes of it are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.asked = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "training":
            object.__setattr__(self, "asked", object.__getattribute__(self, "asked") + 1)
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x)


def test_modules_whose_attributes_are_not_those_of_others_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen TorchScript modules lack some that others have, and a class may have a look-up of its
    own, which is not told of what we read."""
    monkeypatch.setenv(VARIABLE, "capture")
    traced = torch.jit.trace(nn.Linear(4, 4).eval(), torch.rand(2, 4))
    frozen, asked = torch.jit.freeze(traced), Asked()
    wanted = frozen(given := _plain())
    with applied(Counter()):
        for _ in range(CALLS):
            assert torch.equal(frozen(given), wanted)
        for _ in range(2):
            asked(given)
    assert asked.asked == 0


@pytest.mark.parametrize("interceptor", interceptors("mode", "gate"))
def test_compiled_code_that_enters_a_mode_leaves_it_and_is_seen(
    monkeypatch: pytest.MonkeyPatch, interceptor: str
) -> None:
    """Captured code sets the modes of its thread, by what Dynamo knows of them, as without us."""
    torch.manual_seed(0)
    model = Runs(_in_mode)
    wanted = steps_of(torch.compile(model, backend="eager", fullgraph=True), _plain)
    torch.compiler.reset()
    monkeypatch.setenv(VARIABLE, interceptor)
    tool = Counter()
    with applied(tool):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = steps_of(compiled, _plain)
        seen = len(tool.ids)
        compiled(_plain())
        assert len(tool.ids) - seen == 3  # rand() beside the two in it
    assert [step[:2] for step in found] == [step[:2] for step in wanted]
    assert not _internals.modes()
