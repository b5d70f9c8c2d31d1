"""Tools that let a compiler have its graphs as they are, and runs of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import amanda
from amanda import inline
from tests.torch.support import applied, fingerprint

SHIFT = 0.125


def _shifted(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.relu.default:
            with graph.graph.inserting_after(node):
                moved = graph.graph.call_function(torch.ops.aten.add.Tensor, (node, SHIFT))
            node.replace_all_uses_with(
                moved, delete_user_cb=lambda user, new=moved: user is not new
            )
    graph.recompile()
    return make_boxed_func(graph.forward)


shifting = aot_autograd(fw_compiler=_shifted, bw_compiler=lambda g, _: make_boxed_func(g.forward))
"""A compiler whose code gives other results than eager mode: what ``relu`` gives is moved."""


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def compiled_eagerly(function: Any) -> Any:
    """A function whose compiler runs what is captured as it is."""
    return torch.compile(function, backend="eager")


class Counting(amanda.Tool):
    """Counts every operator, forward and backward, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str, inline.Counter] = {}
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        counter = self.counters.setdefault(context.get_op_id(), inline.Counter())
        context.insert_before_op(counter, inputs=[])

    def backward(self, context: amanda.OpContext) -> None:
        op_id = context.get_backward_op_id()
        assert op_id is not None
        counter = self.counters.setdefault(op_id, inline.Counter())
        context.insert_before_backward_op(counter, grad_outputs=[])

    def counts(self) -> dict[str, int]:
        return {op_id: counter.count for op_id, counter in self.counters.items()}


class Shapes(amanda.Tool):
    """Notes the shapes of each execution, in routines that may be called later."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, op_id=context.get_op_id())

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.note, op_id=context.get_backward_op_id())

    @amanda.deferrable
    def note(self, *tensors: Any, op_id: str) -> None:
        self.seen.append((op_id, [None if t is None else (t.shape, t.dtype) for t in tensors]))


class Calls(amanda.Tool):
    """A routine at each forward operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, outputs=[], op_id=context.get_op_id())

    def note(self, op_id: str) -> None:
        self.calls.append(op_id)


class Passes(Counting):
    """Counts, and is told of forward and backward passes and of iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        for backward in (False, True):
            for end in (False, True):
                self.add_inst_for_pass(
                    lambda point, told=(backward, end): self.told.append(told),
                    backward=backward,
                    end=end,
                )
        self.add_inst_for_iteration(lambda point: self.told.append("iteration"))


class Elements(amanda.Tool):
    """Adds up the elements of the inputs and outputs of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, inline.ShapeSum] = {}
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        new = inline.ShapeSum(lambda shapes: sum(s.numel() for side in shapes for s in side if s))
        one = self.sums.setdefault(context.get_op_id(), new)
        context.insert_before_op(one.before)
        context.insert_after_op(one.after)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


Program = Callable[[Any], Any]


def train(backend: Any) -> list[Any]:
    """The losses, gradients, parameters and buffers of some steps, and the generator's state."""
    model = Net()
    compiled = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(X).square().mean()
        loss.backward()
        optimizer.step()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
    return [*found, *(t.detach().clone() for t in model.state_dict().values())]


def vanilla(program: Program, backend: Any) -> Any:
    """What a program gives without a tool, and the state of the generator afterwards."""
    torch.compiler.reset()
    torch.manual_seed(3)
    return fingerprint([program(backend), torch.get_rng_state()])


def watched(program: Program, backend: Any, *tools: amanda.Tool) -> tuple[Any, list[str]]:
    """The same with tools, and how its graphs ran."""
    torch.compiler.reset()
    torch.manual_seed(3)
    with applied(*tools) as scope:
        found = program(backend)
    assert not scope.statistics.not_seen
    return fingerprint([found, torch.get_rng_state()]), [*scope.statistics.compiled.values()]
