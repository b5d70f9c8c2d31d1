"""Other people's modes, subclasses and special tensors work under a scope as ever."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import amanda
from tests.torch.support import (
    TRANSPARENT,
    Counter,
    Dispatches,
    ForwardCounter,
    On,
    WholeIdentity,
    after,
    applied,
    before,
    fingerprint,
)


class Functions(TorchFunctionMode):
    """A user's mode that notes what it sees and doubles the results of ``sin``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if not name.startswith("__"):
            self.seen.append(name)
        result = func(*args, **(kwargs or {}))
        return result * 2 if name == "sin" else result


class Tagged(torch.Tensor):
    """A user's subclass with behaviour of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "sin":
            return super().__torch_function__(torch.cos, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


X = torch.linspace(0, 1, 4)


@pytest.mark.parametrize("inside", [True, False])
def test_user_function_mode(inside: bool) -> None:
    """A user's function mode inside or around a scope sees and does what it does without."""
    counter, mode = ForwardCounter(), Functions()
    first, second = (applied(counter), mode) if inside else (mode, applied(counter))
    with first:
        with second:
            result = torch.sin(X)
        later = torch.sin(X)
    assert torch.equal(result, torch.sin(X) * 2)
    assert torch.equal(later, torch.sin(X) if inside else result)
    assert mode.seen == ["sin"] * (1 if inside else 2)
    assert counter.ops["sin"] == (2 if inside else 1)


def test_user_function_mode_sees_nothing_of_routines_at_derived_points() -> None:
    """A user's function mode inside a scope sees no call of ours around modules and iterations."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def step() -> list[str]:
        with Functions() as mode:
            model(X).sum().backward()
        return mode.seen

    told = []
    tool = amanda.Tool()
    tool.add_inst_for_module(told.append)
    tool.add_inst_for_pass(told.append)
    tool.add_inst_for_iteration(told.append)
    tool.add_inst_for_pass(told.append, end=True)
    expected = step()
    with amanda.apply(tool):
        assert step() == expected
    assert told


def test_user_mode_across_the_end_of_a_scope() -> None:
    """A mode entered in a scope and left after it stays what it was."""
    mode = Functions()
    scope = applied(ForwardCounter())
    scope.__enter__()
    mode.__enter__()
    scope.__exit__(None, None, None)
    result = torch.sin(X)
    mode.__exit__(None, None, None)
    assert torch.equal(result, torch.sin(X) * 2)
    assert torch.equal(torch.sin(X) * 2, result)


@pytest.mark.parametrize("x", [X, X.expand(1, 2, 4)], ids=["one dimension", "three"])
def test_user_dispatch_mode(x: torch.Tensor) -> None:
    """A dispatch mode sees the same aten operators inside a scope as outside."""
    layer, q = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.rand(1, 2, 3)
    q.requires_grad_()

    def run() -> None:
        layer.zero_grad()
        q.grad = None
        layer(x).sum().backward()
        torch.einsum("bij,bkj->bik", q, q.exp()).sum().backward()

    with Dispatches() as vanilla:
        run()
    for make in TRANSPARENT:
        with applied(make()), Dispatches() as inside:
            run()
        with Dispatches() as outside, applied(make()):
            run()
        for mode in (inside, outside):
            seen, wanted = mode.seen, vanilla.seen
            if make is WholeIdentity:
                # Where the gradients of an operator's inputs meet, its inputs are detached, and
                # views that have several dimensions come in another order.
                order = sorted if x.ndim == 3 else list
                seen = order(name for name in seen if name != "aten.detach.default")
                wanted = order(name for name in wanted if name != "aten.detach.default")
            assert seen == wanted


class Computing(amanda.Tool):
    """Its analyses and routines run operators, as a check for NaN does, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        torch.zeros(2).add_(1)
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)
        context.insert_after_op(self.look, outputs=[])

    def backward(self, context: amanda.OpContext) -> None:
        torch.zeros(2).add_(1)
        context.insert_before_backward_op(self.look)
        context.insert_after_backward_op(self.look)
        context.insert_after_backward_op(self.look, grad_inputs=[])

    def look(self, *tensors: Any) -> None:
        found = [t.sum() for t in tensors if isinstance(t, torch.Tensor)]
        self.sums.append(float(torch.stack(found).sum()) if found else float(torch.zeros(1)))


def test_a_dispatch_mode_does_not_see_the_operators_of_tools() -> None:
    """What analyses and routines compute is not an operator of the program: its dispatch modes do
    not see it, in the forward and the backward pass, and they are on again afterwards."""

    def run() -> list[str]:
        mode, x = Dispatches(), torch.ones(3, 2, requires_grad=True)
        with mode, Dispatches():
            for _ in range(3):
                (x.sin() @ x.mT).exp().sum().backward()
            _ = x.cos()
        return mode.seen

    expected, tool = run(), Computing()
    with applied(tool):
        seen = run()
    assert seen == expected
    assert tool.sums


def test_what_a_dispatch_mode_runs_in_a_backward_operator_is_a_part_of_it() -> None:
    """It is no operator of its own, whose work would count twice."""
    found = []
    for mode in (nullcontext(), Dispatches()):
        counter, x = ForwardCounter(), torch.ones(3, 2, requires_grad=True)
        with applied(counter), mode:
            (x.sin() @ x.mT).sum().backward()
        found.append(counter.ids)
    assert found[0] == found[1]


def test_selective_checkpoints_keep_no_operators_of_tools() -> None:
    """Selective checkpoints, which are dispatch modes, number the operators of a pass: those
    that a tool runs in one of the two passes only would give others' results to the model."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def run() -> Any:
        torch.manual_seed(0)
        x = torch.rand(3, 4, requires_grad=True)

        def model(x: torch.Tensor) -> torch.Tensor:
            return (x * x.sum()).tanh() * (x + x.sum(0)).sum()

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
        return x.grad

    expected = run()
    for tool in (Computing(), amanda.tools.load("nan")()):
        with applied(tool):
            assert torch.equal(run(), expected)


def test_subclass_keeps_its_behaviour() -> None:
    """A tensor subclass overrides operators as ever, and its results are of its class."""
    x = X.as_subclass(Tagged)
    counter = ForwardCounter()
    with applied(counter, On(sin=after(lambda y: y + 1))):
        result = torch.sin(x)
    assert type(result) is Tagged
    assert torch.equal(result.as_subclass(torch.Tensor), torch.cos(X) + 1)
    assert counter.ops["sin"] == 1


@pytest.mark.parametrize("make", TRANSPARENT)
def test_subclass_stays_bit_identical(make: Callable[[], amanda.Tool]) -> None:
    """Subclasses compute the same bits, forward and backward."""

    def run() -> Any:
        x = X.clone().as_subclass(Tagged).requires_grad_()
        y = torch.nn.functional.silu(torch.sin(x) * 2)
        y.sum().backward()
        # Each of these has a node of its own.
        return fingerprint([y, x.grad, *x, *x.chunk(2)])

    vanilla = run()
    with applied(make()):
        assert run() == vanilla


@pytest.mark.parametrize("inside", [True, False])
def test_device_mode(inside: bool) -> None:
    """``with torch.device(...)`` works inside and around a scope."""
    counter = ForwardCounter()
    scope, device = applied(counter), torch.device("meta")
    with scope if inside else device, device if inside else scope:
        model, x = nn.Linear(3, 2), torch.ones(1, 3)
        y = model(x)
    assert y.device.type == model.weight.device.type == "meta"
    assert counter.ops["linear"] == 1
    assert torch.ones(1).device.type == "cpu"


def test_default_device() -> None:
    """``torch.set_default_device`` inside a scope lasts beyond it."""
    try:
        with applied(ForwardCounter()):
            torch.set_default_device("meta")
            assert torch.ones(1).device.type == "meta"
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize("make", TRANSPARENT)
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(make: Callable[[], amanda.Tool], inside: bool) -> None:
    """Mixed precision gives the same bits, and operators are seen before their casts."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        return fingerprint([y, *(p.grad for p in model.parameters())])

    vanilla = run()
    model.zero_grad()
    if inside:
        with applied(make()):
            assert run() == vanilla
    else:
        with torch.autocast("cpu", torch.bfloat16), applied(make()):
            assert run() == vanilla


def test_autocast_presents_the_tensors_of_the_caller() -> None:
    """Under autocast a routine sees the operator's arguments as they were passed."""
    seen = []
    tool = On(linear=before(lambda *ts: seen.extend(t.dtype for t in ts)))
    with applied(tool), torch.autocast("cpu", torch.bfloat16):
        y = nn.Linear(4, 8)(torch.rand(3, 4))
    assert seen == [torch.float32] * 3
    assert y.dtype is torch.bfloat16


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Callable[[], Any], inside: bool) -> None:
    """Inference tensors and no_grad work with routines that act and that do not."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 2), torch.rand(3, 4)
    tools = (Counter(), On(linear=after(lambda y: y + 1)))
    first, second = (applied(*tools), guard()) if inside else (guard(), applied(*tools))
    with first, second:
        y = layer(x)
        y.add_(1)
    assert not y.requires_grad
    assert y.is_inference() == (guard is torch.inference_mode)
    assert torch.allclose(y, layer(x) + 2)


def test_grad_mode_is_the_users() -> None:
    """A routine's isolation leaves the grad mode of the user's code alone."""
    modes = []
    tool = On(relu=before(lambda x: modes.append(torch.is_grad_enabled()) or None))
    with applied(tool):
        torch.relu(X)
        modes.append(torch.is_grad_enabled())
        with torch.no_grad():
            torch.relu(X)
            modes.append(torch.is_grad_enabled())
    assert modes == [False, True, False, False]


def test_meta_and_fake_tensors() -> None:
    """Meta and fake tensors run under routines that act, and fake ones stay fake."""
    for mode, device in ((nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode, applied(Counter(), On(linear=before(lambda w: w * 2, [1]))):
            y = nn.Linear(3, 2, device=device)(torch.empty(1, 3, device=device))
            y.sum().backward()
        assert y.shape == (1, 2)
        assert isinstance(y, FakeTensor) == isinstance(mode, FakeTensorMode)


def test_complex_and_views_by_property() -> None:
    """``T``, ``mT``, ``H``, ``mH``, ``real`` and ``imag`` are operators; ``shape`` is none."""
    counter = ForwardCounter()
    z = torch.ones(2, 2, dtype=torch.complex64)
    with applied(counter):
        _ = z.T, z.mT, z.H, z.mH, z.real, z.imag
        _ = z.shape, z.dtype, z.device, z.requires_grad, z.size(), z.dim(), z.numel(), len(z)
    assert counter.ops == dict.fromkeys(("T", "mT", "H", "mH", "real", "imag"), 1)


def test_printing_and_leaving_for_python() -> None:
    """Printing, ``item`` and ``tolist`` are not operators of the model."""
    counter = ForwardCounter()
    with applied(counter):
        str(X), X.tolist(), X[0].item(), X.numpy(), bool(X[0] == 0)
    assert set(counter.ops) == {"__getitem__", "__eq__"}


def test_reads_of_the_driver_reach_no_class_of_the_program() -> None:
    """What the driver reads of tensors calls no ``__torch_function__`` of their class: it meets the
    program's calls alone, and per-sample gradients, whose class takes few functions, work."""
    calls: list[Any] = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, *args: Any) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, *args)

    def run() -> list[Any]:
        calls.clear()
        x = torch.ones(2, 3).as_subclass(Noting)
        weight = torch.ones(4, 3, requires_grad=True).as_subclass(Noting)
        torch.max(torch.nn.functional.linear(x, weight).relu_(), 0)[0].sum().backward()
        return list(calls)

    wanted = run()
    for tool in (amanda.Tool, *TRANSPARENT):
        with applied(tool()):
            assert run() == wanted


@pytest.mark.parametrize("differentiable", [False, True])
def test_weights_that_compute_on_their_own_keep_their_values(differentiable: bool) -> None:
    """What a routine returns for an ``ExpandedWeight`` is counted and not used, and what it
    computes to get there raises nothing, at any execution."""

    class Triple(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op().__name__ == "linear":
                context.insert_before_op(lambda w: w * 3 + w.sum(), inputs=["weight"])
                context.insert_after_backward_op(lambda *grads: None)

    Triple.differentiable = differentiable
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    def run() -> Any:
        for parameter in model.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        call_for_per_sample_grads(model)(X[None]).sum().backward()
        return fingerprint([parameter.grad_sample for parameter in model.parameters()])  # type: ignore[attr-defined]

    vanilla = run()
    with applied(Triple()) as scope:
        assert [run() for _ in range(3)] == [vanilla] * 3
    seen = scope.statistics.not_seen
    assert seen["values that routines returned for an ExpandedWeight"] == 6
    assert seen["gradients of the samples of an ExpandedWeight"] == 6


def _look_at_gradients(context: amanda.OpContext) -> None:
    context.insert_after_backward_op(lambda *_: None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("act", [before(lambda x: x * 2, inputs=[0]), _look_at_gradients])
def test_nested_tensors_with_gradients_keep_their_values(act: Any) -> None:
    """The program runs on, where PyTorch lets nothing stand before a nested tensor in the graph of
    gradients; a value that could not be used is counted."""
    leaves = [torch.rand(2, 3, requires_grad=True), torch.rand(1, 3, requires_grad=True)]

    def run() -> Any:
        x = torch.nested.as_nested_tensor(leaves)
        result = nn.functional.linear(x, torch.ones(2, 3, requires_grad=True))
        grads = torch.autograd.grad(result.unbind()[0].sum(), leaves)
        return fingerprint([*result.unbind(), *grads])

    vanilla = run()
    with applied(On(linear=act)) as scope:
        assert [run() for _ in range(2)] == [vanilla] * 2
    reason = "values that routines returned for nested tensors with gradients"
    assert scope.statistics.not_seen[reason] == (0 if act is _look_at_gradients else 2)


@pytest.mark.usefixtures("interceptor")
def test_switches_of_autograd_are_no_operators() -> None:
    """They compute nothing, and have ids under no interceptor."""
    tool = Counter()
    with applied(tool):
        for switch in (
            torch.autograd.set_multithreading_enabled(False),
            _force_original_view_tracking(True),
            torch.no_grad(),
            torch.inference_mode(),
        ):
            with switch:
                pass
    assert not tool.ids


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize("point", ["module", "op"])
def test_a_default_device_that_a_tool_sets_stays_set(point: str) -> None:
    """A mode that a tool's code switches on is on when the code has ended, and can be removed."""
    called, tool = list[Any](), amanda.Tool()

    def set_once(context: Any) -> None:
        called.append(context)
        if len(called) == 1:
            torch.set_default_device("meta")

    getattr(tool, f"add_inst_for_{point}")(set_once)
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    try:
        with applied(tool):
            net(x)
            assert torch.ones(1).device.type == "meta"
            torch.set_default_device(None)
            assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
