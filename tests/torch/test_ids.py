"""Operator ids: their form, and that they stay the same."""

from __future__ import annotations

import collections
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import amanda
from amanda.engine.op_ids import MANY
from amanda.errors import CoverageWarning
from tests import models
from tests.counting import no_collection
from tests.torch.support import Counter, ForwardCounter, applied

X = torch.linspace(-1, 1, 3)


def _ids(*runs: object) -> list[str]:
    counter = ForwardCounter()
    with applied(counter):
        for run in runs:
            run()  # type: ignore[operator]
    return counter.ids


def test_form_within_modules() -> None:
    """``<class>.<path>/<op>:<k>``, numbered per op name within a module call."""
    model, inputs = models.build("resnet18")
    counter = Counter()
    with applied(counter):
        models.loss(model(**inputs)).backward()
    ids = set(counter.ids)
    assert {"ResNet.layer1.0.conv1/conv2d:0", "ResNet/flatten:0", "ResNet.fc/linear:0"} <= ids
    backward = set(counter.backward_ids)
    assert "ResNet.layer1.0.conv1/conv2d:0/grad/ConvolutionBackward0:0" in backward
    assert "ResNet.layer1.0.conv1/conv2d:0/grad/AccumulateGrad:0" in backward
    assert "ResNet.fc/linear:0/grad/AddmmBackward0:0" in backward


def test_form_outside_of_modules() -> None:
    """Code outside of modules has an empty path, and counts per op name."""
    assert _ids(lambda: X + X, lambda: X * X, lambda: X + X) == ["/add:0", "/mul:0", "/add:1"]


def test_module_under_two_names() -> None:
    """A module registered twice has its first name, and a number at its second call."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert _ids(lambda: model(X)) == [
        "Sequential.0/linear:0",
        "Sequential.1/relu:0",
        "Sequential.0#1/linear:0",
    ]


def test_recursion() -> None:
    """A module that calls itself has a path for each level."""

    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return torch.relu(self(x, depth - 1) if depth else x)

    model, counter, steps = Recursive(), ForwardCounter(), []
    with applied(counter):
        for _ in range(2):
            counter.ids.clear()
            model(X)
            steps.append(list(counter.ids))
    assert steps[0] == steps[1]
    assert len(set(steps[0])) == 3
    assert steps[0][-1] == "Recursive/relu:0"


class Values(ForwardCounter):
    """Asks which inputs are constants."""

    def forward(self, context: amanda.OpContext) -> None:
        super().forward(context)
        assert context.get_value(0) is None


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own limit; libraries raise it for their process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
def test_modules_may_be_nested_as_deeply_as_without_a_tool() -> None:
    """What a tool asks for in the innermost module takes no further frame for each module around
    it."""

    def runs(depth: int) -> bool:
        model: nn.Module = nn.ReLU()
        for _ in range(depth):
            model = nn.Sequential(model)
        try:
            model(X)
        except RecursionError:
            return False
        return True

    deepest = next(depth for depth in range(20, 400) if not runs(depth)) - 1
    with applied(Values()):
        # Some frames more are those of one operator.
        assert runs(deepest - 15)


def test_children_in_lists_have_their_path() -> None:
    """A module in a ModuleList or ModuleDict has its whole path, though the list is not called."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(3, 3)})])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0]["fc"](x)

    model = Listed()
    assert _ids(lambda: model(X)) == ["Listed.blocks.0.fc/linear:0"]


def test_module_of_nobody() -> None:
    """A module that its caller does not own is named by its class, below the caller."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(3, 3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x)

    model = Holder()
    (op_id,) = _ids(lambda: model(X))
    assert op_id.startswith("Holder.Linear")
    assert op_id.endswith("/linear:0")


def test_iterations_of_a_training_loop() -> None:
    """Loss and optimizer outside of the model have the same ids in every iteration."""
    model, counter = nn.Linear(3, 2), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    with applied(counter):
        for _ in range(4):
            counter.ids.clear()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), torch.ones(2)) * 2
            loss.backward()
            optimizer.step()
            steps.append(list(counter.ids))
    # Momentum buffers are made in the first step.
    assert steps[1] == steps[2] == steps[3]
    assert "Linear/linear:0" in steps[0]
    assert "/mse_loss:0" in steps[0]


def test_inner_backward_is_no_iteration() -> None:
    """A gradient taken inside a module's forward pass does not restart its counters."""

    class Energy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(torch.sin(x).sum(), x)
            return torch.sin(gradient)

    counter = ForwardCounter()
    with applied(counter):
        Energy()(X)
    assert [i for i in counter.ids if "sin" in i] == ["Energy/sin:0", "Energy/sin:1"]


def test_data_outside_of_modules_have_one_id() -> None:
    """An operator that makes data has the same id in the first iteration as in all others."""
    counter, model = ForwardCounter(), nn.Linear(3, 2)
    with applied(counter):
        torch.rand(2, requires_grad=True)
        for _ in range(3):
            model(torch.rand(2, 3)).sum().backward()
    made = [op_id for op_id in counter.ids if "rand:" in op_id]
    assert made == ["/setup/rand:0", *["/other/rand:0"] * 3]


@pytest.mark.usefixtures("interceptor")
def test_very_many_operators_of_a_line_share_an_id() -> None:
    """Without an end of an iteration, ids outside of modules are bounded, and a warning says so;
    routines run at each execution, and the next iteration begins with ids of their own."""
    counter = ForwardCounter()

    def run() -> None:
        for _ in range(2):
            for _ in range(2 * MANY):
                torch.exp(X)
            torch.exp(X)
            amanda.new_iteration()

    with applied(counter), pytest.warns(CoverageWarning, match="share an id"):
        run()
    ids = collections.Counter(counter.ids)
    shared = {op_id: n for op_id, n in ids.items() if __name__ in op_id}
    assert sorted(shared.values()) == [2, 2 * MANY]
    assert (len(ids), {n for op_id, n in ids.items() if op_id not in shared}) == (MANY + 2, {2})


def test_scopes_start_anew() -> None:
    """Every scope counts from zero."""
    assert _ids(lambda: X + X) == _ids(lambda: X + X) == ["/add:0"]


def test_data_parallel_wrapper_is_transparent() -> None:
    """A wrapper of PyTorch's leaves no trace in ids."""
    model = nn.Sequential(nn.Linear(3, 3))
    plain = _ids(lambda: model(X))
    assert _ids(lambda: nn.DataParallel(model)(X)) == plain == ["Sequential.0/linear:0"]


def test_named_operators() -> None:
    """``a + b`` is ``add``; ``torch.ops`` have their overload's name; properties their own."""
    names = [
        op_id.strip("/").partition(":")[0]
        for op_id in _ids(
            lambda: X + X,
            lambda: torch.ops.aten.sin(X),
            lambda: torch.ops.aten.sin.default(X),
            lambda: X[None].T,
            lambda: X @ X,
        )
    ]
    assert names == ["add", "sin", "sin.default", "__getitem__", "T", "matmul"]


def test_a_function_of_the_program_with_the_name_of_an_operator() -> None:
    """It is another operator: its module is in its id."""

    class gelu(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())

    ids = _ids(lambda: gelu.apply(X), lambda: nn.functional.gelu(X))  # type: ignore[no-untyped-call]
    assert ids == ["/test_ids::gelu:0", "/gelu:0"]


def test_names_of_modules_may_hold_dots() -> None:
    """A module whose name holds a dot, which ``setattr`` allows, has its name in ids as it is."""
    model, counter = nn.Module(), ForwardCounter()
    setattr(model, "norm.1", nn.Sequential(nn.ReLU()))
    model.norm = nn.Tanh()

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("inner", model)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model.norm(getattr(model, "norm.1")(x))

    with applied(counter):
        Caller()(torch.ones(2))
    assert counter.ids[1:] == ["Caller.inner.norm.1.0/relu:0", "Caller.inner.norm/tanh:0"]


def test_a_module_that_is_gone_begins_no_iteration() -> None:
    """Outermost modules that live one after the other are not taken for one and the same."""

    def step() -> None:
        for _ in range(20):
            nn.ReLU()(X).neg()

    ids = _ids(step)
    assert [op_id for op_id in ids if "neg" in op_id] == [f"/neg:{k}" for k in range(20)]


def nested(depth: int) -> nn.Module:
    """Modules of which each calls the next one, and then one of its own."""
    module: nn.Module = nn.ReLU()
    for _ in range(depth):
        module = nn.Sequential(module, nn.ReLU())
    return module


@pytest.mark.parametrize("model", [nested(30), nn.Sequential(*(nn.ReLU() for _ in range(60)))])
def test_naming_the_modules_of_a_model_takes_one_walk(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep or wide a model is, each of its modules is asked for its children once."""
    asked = []
    named_children = nn.Module.named_children

    def counted(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        asked.append(module)
        return named_children(module)

    monkeypatch.setattr(nn.Module, "named_children", counted)
    with applied(Counter()):
        model(torch.ones(1))
        model(torch.ones(1))
    assert len(asked) == len(list(model.modules()))


class Tied(nn.Module):
    """Calls modules that are registered at two places, late, and nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
        self.again = self.inner[1]
        self.first: nn.Module = self.inner[0]
        self.stray = [nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(self.inner(x)))
        if not hasattr(self, "late"):
            self.late = nn.ModuleList([nn.ReLU()])
        return self.stray[0](self.late[0](x))


def test_a_module_has_the_first_path_that_its_caller_lists() -> None:
    """A module's path is the first under which ``named_modules()`` of the outermost one has it."""
    model = Tied()
    expected = [
        *("Tied.inner.0/relu:0", "Tied.inner.1.0/tanh:0"),
        *("Tied.inner.0/relu:0", "Tied.inner.1.0/tanh:0"),
        *("Tied.late.0/relu:0", "Tied.ReLU@0/relu:0"),
    ]
    assert _ids(lambda: model(X)) == expected
    assert _ids(lambda: model(X)) == expected


class Innermost(nn.Module):
    """Calls a function with its input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_tracebacks_have_the_frames_of_pytorch() -> None:
    """An exception out of nested modules has the traceback that it has without a tool, but for
    frames of ours, and keeps no tensor alive once it is gone."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        tensors.append(weakref.ref(x))
        raise ValueError("no such luck")

    model = nn.Sequential(nn.Sequential(Innermost(fail)))

    def frames() -> list[tuple[str, int, str]]:
        try:
            model(torch.ones(2))
        except ValueError as error:
            return [
                (entry.f_code.co_filename, number, entry.f_code.co_name)
                for entry, number in traceback.walk_tb(error.__traceback__)
                if not entry.f_globals["__name__"].startswith("amanda")
            ]
        return []

    vanilla = frames()
    with no_collection(), applied(Counter()):
        assert frames() == vanilla
        assert [tensor() for tensor in tensors] == [None, None]
