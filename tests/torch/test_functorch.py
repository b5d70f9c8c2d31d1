"""functorch transforms, and what only they are strict about."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import amanda
from amanda.errors import CoverageWarning
from amanda_torch import _internals
from tests.torch.support import (
    TRANSPARENT,
    Counter,
    ForwardCounter,
    On,
    after,
    applied,
    before,
    fingerprint,
)

# The first forward-mode transform of a process scripts some of PyTorch's decompositions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:actions on the gradients of operators do nothing"),
]

X = torch.tensor([[0.5, 1.0, -2.0], [3.0, -1.0, 0.25]])


def _f(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * x).sum(-1)


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return _f(x).sum()


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap": torch.vmap(_f),
    "grad": torch.func.grad(_scalar),
    "vmap of grad": torch.vmap(torch.func.grad(_scalar)),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(_scalar)(x).sum()),
    "jvp": lambda x: torch.func.jvp(_f, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: torch.func.vjp(_f, x)[1](torch.ones(2)),
    "jacrev": torch.func.jacrev(_f),
    "jacfwd": torch.func.jacfwd(_f),
    "jacrev of jacrev": torch.func.jacrev(torch.func.jacrev(_scalar)),
    "hessian": torch.func.hessian(_scalar),
    "functionalize": torch.func.functionalize(lambda x: x.clone().mul_(2)),
    "forward AD": lambda x: torch.autograd.functional.jvp(_f, x, torch.ones_like(x)),
}
EVERY = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@EVERY
@pytest.mark.parametrize("make", TRANSPARENT)
def test_transforms_stay_bit_identical(
    make: Callable[[], amanda.Tool], transform: Callable[[torch.Tensor], Any]
) -> None:
    """Tools that change nothing leave a transformed function's results as they are."""
    vanilla = fingerprint(transform(X))
    with applied(make()):
        assert fingerprint(transform(X)) == vanilla


@EVERY
def test_operators_under_transforms_are_seen(transform: Callable[[torch.Tensor], Any]) -> None:
    """The operators inside a transformed function are seen, routines included."""
    counter = ForwardCounter()
    with applied(counter):
        transform(X)
    assert {"sin", "mul"} <= set(counter.ops) or "mul_" in counter.ops


def test_substituted_values_under_vmap() -> None:
    """Under vmap a routine sees the batched tensor and may return another one."""
    with applied(On(sin=before(lambda x: x * 2))):
        result = torch.vmap(_f)(X)
    assert torch.allclose(result, (torch.sin(X * 2) * X).sum(-1))


@pytest.mark.parametrize("name", ["grad", "vmap of grad", "jacrev", "jvp", "jacfwd"])
def test_substituted_values_are_straight_through(name: str) -> None:
    """Under a transform the gradient, or tangent, goes straight through a substitute."""
    with applied(On(sin=before(lambda x: x * 2))):
        result = TRANSFORMS[name](X)
    wanted = torch.cos(X * 2) * X + torch.sin(X * 2)
    if name == "jvp":
        result, wanted = result[1], wanted.sum(-1)
    elif name in ("jacrev", "jacfwd"):
        result = torch.stack([result[0, 0], result[1, 1]])
    assert torch.allclose(result, wanted)


def test_replaced_outputs_under_vmap_of_grad() -> None:
    """A replaced output counts as the operator's own for the gradient."""
    with applied(On(sin=after(lambda y: y + 1))):
        result = torch.vmap(torch.func.grad(_scalar))(X)
    assert torch.allclose(result, torch.cos(X) * X + torch.sin(X) + 1)


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "vjp", "jacrev"])
def test_backward_operators_under_a_transform(transform: str) -> None:
    """They are seen with the ids that they have outside of it; routines change their gradients."""
    counter = Counter()
    run = TRANSFORMS[transform]
    expected = run(X)
    with applied(counter) as scope:
        run(X)
    assert set(counter.backward_ids) >= {"/sin:0/grad/SinBackward0:0", "/mul:0/grad/MulBackward0:0"}
    assert not scope.statistics.not_seen
    halving = amanda.Tool()

    def halve(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "SumBackward1":
            context.insert_after_backward_op(lambda *gradients: [g / 2 for g in gradients])

    halving.add_inst_for_op(halve, backward=True)
    with applied(halving):
        found = run(X)
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        assert torch.equal(one, 2 * other)


@pytest.mark.parametrize("transform", ["grad of grad", "jacrev of jacrev", "hessian"])
def test_derivatives_of_gradients_under_transforms_are_counted_as_not_seen(transform: str) -> None:
    """Backward operators are seen; what differentiates them is counted."""
    with applied(Counter()) as scope:
        TRANSFORMS[transform](X)
    assert any("gradients under a transform" in reason for reason in scope.statistics.not_seen)


def test_forward_mode_duals_outside_of_functorch() -> None:
    """A tangent goes straight through a substitute in plain forward-mode AD as well."""
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        with applied(On(sin=before(lambda x: x * 2))):
            y = torch.sin(x)
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    assert torch.allclose(tangent, torch.cos(X * 2))


@pytest.mark.parametrize("method", ["insert_before_backward_op", "insert_after_backward_op"])
def test_forward_mode_is_bit_identical_under_routines_on_gradients(method: str) -> None:
    """Values and tangents are as without the routines, which do nothing there and are counted."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 1))

    def dual() -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(net(forward_ad.make_dual(torch.ones(3), torch.ones(3))))

    def jacobian() -> Any:
        find = torch.autograd.functional.jacobian
        return find(net, torch.ones(3), strategy="forward-mode", vectorize=True)

    for run in (dual, jacobian):
        expected = fingerprint(run())
        with applied(On(linear=lambda c: getattr(c, method)(lambda *_: None))) as scope:
            assert fingerprint(run()) == expected
        assert scope.statistics.not_seen["actions on gradients in forward-mode differentiation"]


@pytest.mark.parametrize("kind", ["before_backward", "after_backward", "replace_backward"])
@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap of grad", "vmap"])
def test_actions_on_gradients_are_counted_where_they_do_nothing(kind: str, transform: str) -> None:
    """Gradient actions of a forward analysis that a transform passes over are counted, with a
    warning; without a transform there is neither."""
    method = kind + "_op" if kind.startswith("replace") else f"insert_{kind}_op"
    tool = On(sin=lambda context: getattr(context, method)(lambda *_: [X * 0]))

    def scalar(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    x = X.clone().requires_grad_(transform == "vmap")
    runs = {
        "grad": lambda: torch.func.grad(scalar)(x),
        "vjp": lambda: torch.func.vjp(scalar, x)[1](torch.tensor(1.0)),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(scalar))(x),
        "vmap": lambda: torch.autograd.grad(torch.vmap(scalar)(x).sum(), x),
    }
    with applied(tool) as scope, pytest.warns(CoverageWarning, match="torch.func"):
        runs[transform]()
    assert scope.statistics.not_seen["actions on gradients under a functorch transform"] == 1
    with applied(tool) as scope:
        torch.autograd.grad(scalar(x.requires_grad_()), x)
    assert not scope.statistics.not_seen


def test_the_warning_names_an_operator_and_the_way_out() -> None:
    """Where gradient actions do nothing, one warning names the first of the operators, and how to
    compute the gradient so that they do."""

    def record(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *_: None)

    with warnings.catch_warnings(record=True) as caught, applied(On(sin=record, mul=record)):
        warnings.simplefilter("always")
        torch.func.grad(_scalar)(X)
    (message,) = {str(warning.message) for warning in caught}
    assert "first at op /sin:0" in message
    assert "torch.autograd.grad()" in message


class Doubled(torch.autograd.Function):
    """A function with rules for transforms, which note what is said within them."""

    said: ClassVar[list[tuple[bool, bool]]] = []

    @classmethod
    def note(cls) -> None:
        stack = torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001 - what is compared with
        cls.said.append((_internals.in_functorch(), stack is not None))

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        Doubled.note()
        return x * 2.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Doubled.note()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Doubled.note()
        return gradient * 2.0

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        Doubled.note()
        return x * 2.0, dims[0]


def test_transforms_are_noticed_without_their_stack() -> None:
    """Whether a transform is on is found in what dispatch keys say, in all transforms, and in the
    rules of functions within them, as functorch's stack has it: reading that makes one in the
    thread, which autograd copies with each node."""

    def total(x: torch.Tensor) -> torch.Tensor:
        Doubled.note()
        return (Doubled.apply(x) * x).sum()

    x, rows = torch.ones(3), torch.ones(2, 3)
    Doubled.said.clear()
    Doubled.note()
    torch.func.grad(total)(x)
    torch.func.vmap(total)(rows)
    torch.func.vmap(torch.func.grad(total))(rows)
    torch.func.functionalize(lambda x: (Doubled.note(), x * x)[1])(x)
    torch.func.jvp(lambda x: (Doubled.note(), x * x)[1], (x,), (x,))
    torch.func.hessian(lambda x: (Doubled.note(), (x**3).sum())[1])(x)
    Doubled.note()
    assert [mine for mine, _ in Doubled.said] == [theirs for _, theirs in Doubled.said]
    assert {mine for mine, _ in Doubled.said} == {True, False}


def test_control_flow_under_a_transform() -> None:
    """``torch.cond`` under ``vmap`` gives what it gives without a tool: it is captured."""

    def absolute(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))
        return found

    expected = fingerprint(torch.vmap(absolute)(X))
    for make in (amanda.Tool, ForwardCounter):
        with applied(make()):
            assert fingerprint(torch.vmap(absolute)(X)) == expected


@pytest.mark.usefixtures("interceptor")
def test_a_value_with_a_tangent_replaces_an_output_in_forward_mode() -> None:
    """The tangent passes straight through, whatever tangent the routine's value has."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 5.0)
    with applied(On(linear=after(lambda x: x * 3.0))):
        for _ in range(3):
            with forward_ad.dual_level():
                x = forward_ad.make_dual(torch.full((1, 2), 2.0), torch.ones(1, 2))
                value, tangent = forward_ad.unpack_dual(layer(x))
                tangent.sum().backward()
            assert (value.tolist(), tangent.tolist()) == ([[60.0]], [[10.0]])
