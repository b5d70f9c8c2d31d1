"""Phases of operators, iterations, and the points of modules and passes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amanda
from amanda.interface.points import Point, PointContext


class Phases(amanda.Tool):
    """The phase of each operator by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.add_inst_for_op(self.note)
        self.add_inst_for_op(self.note, backward=True)

    def note(self, context: amanda.OpContext) -> None:
        self.found[context.get_backward_op_id() or context.get_op_id()] = context.get_phase()

    def of(self, name: str) -> set[str]:
        return {
            phase
            for op_id, phase in self.found.items()
            if op_id.rpartition("/")[2].partition(":")[0] == name
        }


class Points(amanda.Tool):
    """The derived points that were passed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[PointContext] = []
        for end in (False, True):
            self.add_inst_for_module(self.note, exit=end)
            self.add_inst_for_iteration(self.note, end=end)
            for backward in (False, True):
                self.add_inst_for_pass(self.note, backward=backward, end=end)

    def note(self, point: PointContext) -> None:
        self.seen.append(point)

    def count(self, point: Point) -> int:
        return sum(context.point is point for context in self.seen)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Identity(), nn.Dropout(0.0))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    functional.mse_loss(net(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_the_phases_of_training_are_found(foreach: bool) -> None:
    """Building, losses, gradients, clipping, optimizers and metrics are told apart."""
    with amanda.apply(tool := Phases()):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=foreach)
        for _ in range(2):
            step(net, optimizer)
            with torch.no_grad():
                (net(torch.ones(2, 4)).argmax(1) == 0).float().mean()
    assert tool.of("uniform_") == {"setup"}
    assert tool.of("linear") == tool.of("mse_loss") == {"forward"}
    assert tool.of("AddmmBackward0") == {"backward"}
    assert tool.of("argmax") == tool.of("mean") == {"other"}
    changed = tool.of("_foreach_add_") if foreach else tool.of("add_")
    assert changed == {"optimizer"}
    norms = [phase for op_id, phase in tool.found.items() if "norm" in op_id]
    assert set(norms) == {"optimizer"}


def test_functional_code_is_forward() -> None:
    """A program without modules computes in the forward phase, also without gradients."""
    w = torch.ones(3, requires_grad=True)
    with amanda.apply(tool := Phases()):
        (w * 2).exp().sum().backward()
        torch.sigmoid(torch.ones(3).abs())
    assert tool.of("exp") == tool.of("sum") == tool.of("sigmoid") == {"forward"}


def test_what_follows_a_model_in_inference_is_forward() -> None:
    """Functional code whose inputs come from the model is a part of it; a prediction is not."""
    net, tool = model().eval(), Phases()
    with amanda.apply(tool, Points()), torch.no_grad():
        torch.softmax(net(torch.ones(2, 4)), 1)
        net(torch.ones(2, 4)).argmax(1)
    assert (tool.of("softmax"), tool.of("argmax")) == ({"forward"}, {"other"})


def accumulated(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def evaluated(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(net, optimizer)
    with torch.no_grad():
        net(torch.ones(2, 4))
        net(torch.ones(2, 4))


@pytest.mark.parametrize("iterate", [step, accumulated, evaluated])
def test_a_step_ends_with_the_optimizers(iterate: Callable[..., None]) -> None:
    """Accumulated passes belong to one step, and evaluations to none."""
    net, points = model(), Points()
    optimizer = torch.optim.AdamW(net.parameters())
    with amanda.apply(points) as scope:
        for _ in range(3):
            iterate(net, optimizer)
    assert scope.statistics.steps == 3
    ends = [context for context in points.seen if context.point is Point.ITERATION_END]
    assert ends[-1].iteration == 2
    begin, end = ends[-1].begin, ends[-1].end
    assert begin is not None
    assert end is not None
    assert begin < end


@pytest.mark.parametrize(
    ("is_optimized", "expected"), [(True, [0, 0, 1, 1]), (False, [0, 1, 2, 3])]
)
def test_accumulation_is_one_iteration_from_the_first_step_on(
    is_optimized: bool, expected: list[int]
) -> None:
    """Passes before the first step belong to one iteration if an optimizer has the weights."""
    net, points = model(), Points()
    optimizer = torch.optim.SGD((net if is_optimized else model()).parameters(), 0.1)
    with amanda.apply(points):
        for _ in range(2):
            for _ in range(2):
                net(torch.ones(2, 4)).sum().backward()
            if is_optimized:
                optimizer.step()
    passes = [p.iteration for p in points.seen if p.point is Point.BACKWARD_BEGIN]
    assert passes == expected


def test_every_module_is_entered_and_left() -> None:
    """Modules without operators included, with what they are given and give, also in pairs around
    an exception, and once in a scope within."""
    net, points = model(), Points()
    with amanda.apply(points):
        net(torch.ones(2, 4))
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 5))
    entries = [(c.id, c.module) for c in points.seen if c.point is Point.MODULE_ENTRY]
    first = [("Sequential", ""), *((f"Sequential.{i}", str(i)) for i in range(3))]
    assert entries == [*first, *first[:2]]
    assert points.count(Point.MODULE_EXIT) == len(entries)
    exits = [c for c in points.seen if c.point is Point.MODULE_EXIT]
    assert exits[1].target is net[1]
    assert [list(t.shape) for t in exits[0].outputs or ()] == [[2, 3]]
    assert exits[-1].outputs is None


def test_a_routine_at_a_point_is_vanilla() -> None:
    """What a routine at a point computes is seen by no tool."""

    def compute(point: PointContext) -> Any:
        torch.ones(2).cos()

    phases, tool = Phases(), amanda.Tool()
    tool.add_inst_for_pass(compute, backward=True)
    tool.add_inst_for_module(compute)
    with amanda.apply(phases, tool):
        model()(torch.ones(2, 4)).sum().backward()
    assert phases.of("cos") == set()


def test_a_routine_that_raises_at_the_exit_of_a_module_leaves_iterations_counted() -> None:
    """The forward pass has ended, and further calls are iterations of their own."""
    called, ended, tool = list[str](), list[int](), amanda.Tool()

    def fail_once(point: PointContext) -> None:
        called.append(point.id)
        if len(called) == 1:
            raise ValueError("on purpose")

    tool.add_inst_for_module(fail_once, exit=True)
    tool.add_inst_for_iteration(lambda point: ended.append(point.iteration), end=True)
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    with amanda.apply(tool), torch.no_grad():
        with pytest.raises(ValueError, match="on purpose"):
            net(x)
        for _ in range(3):
            net(x)
    assert ended == [0, 1, 2, 3]


class Counts(amanda.Tool):
    """Executions by id, and the phases of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        self.phases[op_id] = context.get_phase()
        context.insert_before_op(lambda *_: self.counts.update([op_id]), inputs=[])

    def of(self, name: str) -> dict[str, int]:
        return {op_id: n for op_id, n in self.counts.items() if f"/{name}:" in op_id}


class Scaled(nn.Module):
    """Weights that are made by the operators of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_loss_is_not_taken_for_what_made_the_weights() -> None:
    """Its operators have ids of their own, equal in all steps, apart from initialisation, metrics,
    clipping and the optimizer's steps, whichever of them runs an operator first."""
    with amanda.apply(tool := Counts()):
        net = Scaled()
        scale = torch.rand(3, 3) * 0.5
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(scale).mul_(2.0)
            (net(torch.ones(2, 3)).argmax(1) == 0).float().mean()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
        for _ in range(3):
            output = net(torch.rand(2, 3) / 2)
            loss = (output * 2).mean()
            correct = ((output.argmax(1) == 0).float() * 0.5).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        assert correct.item() <= 1
    assert tool.of("mul") == {
        "/setup/mul:0": 1,
        "/setup/mul:1": 1,
        "/other/mul:0": 3,
        "/mul:0": 3,
        "/optimizer/mul:0": 3,
    }
    assert tool.of("mean") == {"/mean:0": 3, "/other/mean:0": 4}
    told = {op_id.split("/")[1] for op_id, p in tool.phases.items() if p not in ("forward",)}
    assert told <= {"setup", "other", "optimizer", "ones_like:0"}


def test_functional_training_has_the_ids_of_its_first_step() -> None:
    """Weights made by functional code, and updates by hand, shift no id of the steps."""
    with amanda.apply(tool := Counts()):
        weight = (torch.rand(3, 3) * 0.1).requires_grad_()
        for _ in range(3):
            ((torch.rand(2, 3) @ weight) * 2).sum().backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight -= weight.grad * 0.1
            weight.grad = None
    assert tool.of("matmul") == {"/matmul:0": 3}
    assert tool.of("mul") == {"/mul:0": 4, "/other/mul:0": 3}
    assert tool.phases["/optimizer/sub_:0"] == "optimizer"


def test_lazy_modules_draw_their_weights_in_the_setup() -> None:
    """Though they do in the first call of the model."""
    net = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with amanda.apply(tool := Counts()):
        for _ in range(2):
            net(torch.ones(2, 4))
    assert {tool.phases[op_id] for op_id in tool.of("uniform_")} == {"setup"}
    assert {tool.phases[op_id] for op_id in (*tool.of("linear"), *tool.of("relu"))} == {"forward"}


def test_a_step_with_a_closure_computes_its_loss_in_the_forward_phase() -> None:
    """The operators of the closure are not the optimizer's."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(torch.ones(1, 2)) * 2).sum()
        loss.backward()
        return loss

    with amanda.apply(tool := Counts()):
        optimizer.step(closure)
    assert tool.phases["/mul:0"] == tool.phases["/sum:0"] == "forward"
    assert any(phase == "optimizer" for phase in tool.phases.values())


def test_a_step_that_raises_leaves_the_optimizer_phase() -> None:
    """What runs after it belongs to what it is."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no such luck")

    net = nn.Linear(2, 1)
    with amanda.apply(tool := Counts()):
        (net(torch.ones(1, 2)) * 2).sum().backward()
        with pytest.raises(ValueError, match="no such luck"):
            Failing(net.parameters(), 0.1).step()
        (net(torch.ones(1, 2)) * 2).sum().backward()
    assert tool.of("mul") == {"/mul:0": 2}
    assert tool.of("linear") == {"Linear/linear:0": 2}
