"""In-place operators, views and ``out=``: what autograd is strict about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import InPlaceWarning
from tests.torch.reference import nodes_before
from tests.torch.support import (
    TRANSPARENT,
    Counter,
    On,
    WholeIdentity,
    after,
    applied,
    before,
    fingerprint,
    same,
)


def _doubled(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor * 2


def _aliased(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _cloned(*tensors: Any) -> Any:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:]


# -- substituted values ---------------------------------------------------


def test_substituted_second_input_of_an_in_place_operator() -> None:
    """The other inputs of an in-place operator can be substituted as those of any operator."""
    w = torch.full((3,), 2.0, requires_grad=True)
    y = torch.ones(3) * 1
    with applied(On(mul_=before(_doubled, [1]))):
        y.mul_(w)
    y.sum().backward()
    assert y.tolist() == [4, 4, 4]
    assert w.grad.tolist() == [1, 1, 1]


def test_augmented_assignment() -> None:
    """``x += 1`` is the in-place operator, and the name keeps its object."""
    x = y = torch.ones(2)
    counter = Counter()
    with applied(counter, On(add_=after(_doubled), __iadd__=after(_doubled))):
        x += 1
    assert x is y
    assert x.tolist() == [4, 4]
    assert sum(counter.ops.values()) == 1


def test_item_assignment() -> None:
    """``x[i] = v`` is an operator on `x` and `v`."""
    x, v = torch.zeros(3), torch.ones(())
    tool = On(__setitem__=before(lambda v: v + 4, [1]))
    with applied(tool):
        x[1] = v
    assert x.tolist() == [0, 5, 0]
    assert v.item() == 1
    assert tool.met == ["/__setitem__:0"]


def test_out_operators() -> None:
    """An ``out=`` tensor gets the value that a routine puts in the place of the result, and the
    result of the inputs that one has put in the place of the operator's."""
    for routine, expected in ((after(_doubled), [4, 4]), (before(_doubled, [0]), [3, 3])):
        out = torch.empty(2)
        with applied(On(add=routine)):
            result = torch.add(torch.ones(2), torch.ones(2), out=out)
        assert result is out
        assert out.tolist() == expected


def test_in_place_operator_on_a_substituted_output() -> None:
    """A later in-place operator is legal on what a routine has put in place of an output."""
    layer = nn.Linear(2, 2)
    with applied(On(linear=after(lambda y: y.clone()))):
        y = layer(torch.rand(3, 2))
        nn.functional.relu(y, inplace=True)
        y.sum().backward()
    assert layer.weight.grad is not None


# -- aliases --------------------------------------------------------------


@pytest.mark.parametrize("alias", [_aliased, _sliced, torch.Tensor.detach])
def test_alias_of_an_output_followed_by_an_in_place_operator(
    alias: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """An in-place operator on a returned alias does not spoil what the operator has saved."""
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    with applied(On(exp=after(alias))):
        y = x.exp()
        y.mul_(2)
    y.sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach().exp())


@pytest.mark.parametrize("alias", [_aliased, _sliced, torch.Tensor.detach])
def test_alias_of_an_input_followed_by_an_in_place_operator(
    alias: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A routine's alias of an input leaves the caller's tensor free to change afterwards."""
    w = torch.tensor([0.5, 1.0], requires_grad=True)
    with applied(On(sin=before(alias))):
        y = w * 1
        z = torch.sin(y)
        y.add_(1)
        z.add_(1)
    z.sum().backward()
    assert torch.equal(w.grad, w.detach().cos())
    assert y.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("alias", [_aliased, _sliced])
def test_alias_as_the_input_of_an_in_place_operator(
    alias: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """An in-place operator on a returned alias changes the caller's tensor once."""
    w = torch.tensor([0.5, 1.0], requires_grad=True)
    y = w * 1
    with applied(On(mul_=before(alias, [0]))):
        y.mul_(3)
    y.sum().backward()
    assert y.tolist() == [1.5, 3.0]
    assert w.grad.tolist() == [3, 3]


# -- views ----------------------------------------------------------------


def _view_then_write(x: torch.Tensor) -> torch.Tensor:
    base = x * 1
    view = base[:2]
    view.mul_(3)
    base.t()[0].add_(1)
    base.view(-1)[::2].sigmoid_()
    return base.exp() + view.sum()


@pytest.mark.parametrize("make", TRANSPARENT)
def test_views_and_in_place_operators_stay_bit_identical(make: Callable[[], amanda.Tool]) -> None:
    """Writing in place through views gives the same bits, forward and backward."""
    x = torch.rand(4, 4, requires_grad=True)
    y = _view_then_write(x)
    vanilla = fingerprint([y, *torch.autograd.grad(y.sum(), x)])
    with applied(make()):
        y = _view_then_write(x)
        instrumented = fingerprint([y, *torch.autograd.grad(y.sum(), x)])
    assert instrumented == vanilla


def test_backward_operators_of_views_and_in_place_operators() -> None:
    """The nodes that writing through a view gives its base (CopySlices) are backward operators of
    the operator that has written."""
    x = torch.rand(4, 4, requires_grad=True)
    wanted = nodes_before(_view_then_write(x).sum())
    counter = Counter()
    with applied(counter):
        _view_then_write(x).sum().backward()
    assert wanted["CopySlices"] == 3
    assert counter.backward_ops == wanted
    assert "/mul_:0/grad/CopySlices:0" in counter.backward_ids


_WRITING = "add_ copy_ index_add_ bernoulli_ _foreach_add_ zero_ fill_".split()


def _write_parts(y: torch.Tensor) -> None:
    """Write into parts of an expanded tensor in which no element is written twice."""
    rows = y[:1].expand(4, 4)
    rows[0] = 2 * y[1]
    rows[:, 1:2][2] += y[2, 1]


_OVERLAPPING: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda y: y.T.add_(y),
    "copied": lambda y: y[:2].copy_(y[1:3]),
    "by index": lambda y: y[:2].index_add_(0, torch.tensor([0, 1]), y[1:3]),
    "beside": lambda y: y[:2].add_(y[2:]),
    "itself": lambda y: y[:2].add_(y[:2]),
    "random": lambda y: y.view(-1)[:8].bernoulli_(y.detach().sigmoid().view(-1)[:8]),
    "random in part": lambda y: y[:1].bernoulli_(torch.full((4,), 0.5)),
    "detached": lambda y: y.detach()[:2].copy_(y[2:]),
    "lists": lambda y: torch._foreach_add_([y[0], y[1]], [y[2], y[3]]),
    "expanded": lambda y: y[:1].expand(3, 4).add_(1),
    "expanded and zeroed": lambda y: y[:1].expand(3, 4).zero_(),
    "expanded and filled": lambda y: y[:1].expand(3, 4).fill_(2),
    "parts of an expanded one": _write_parts,
}


@pytest.mark.parametrize(
    "make", [WholeIdentity, lambda: On(**dict.fromkeys(_WRITING, before(_cloned)))]
)
@pytest.mark.parametrize("case", _OVERLAPPING)
def test_overlapping_writes_are_refused_as_without_tools(
    make: Callable[[], amanda.Tool], case: str
) -> None:
    """What PyTorch refuses, to write over another input or twice into one element, it refuses
    where an operator runs on substitutes, too; what it allows draws the same random numbers."""
    x = torch.rand(4, 4, requires_grad=True)

    def run() -> Any:
        torch.manual_seed(0)
        y = x * 2
        raised = gradients = None
        try:
            _OVERLAPPING[case](y)
            gradients = torch.autograd.grad(y.sum(), x)
        except RuntimeError as error:
            raised = str(error)
        return raised, fingerprint((torch.rand(1), y, gradients))

    vanilla = run()
    with applied(make()):
        assert run() == vanilla


def test_replaced_operator_on_a_view_with_routines_on_its_gradients() -> None:
    """A replacement of an operator that writes into a view takes its place, also with routines on
    the gradients of the whole operator."""
    x = torch.ones(2, 2, requires_grad=True)
    seen = []

    def analyse(context: amanda.OpContext) -> None:
        context.replace_op(lambda tensor: tensor.mul_(10))
        context.insert_after_backward_op(lambda *gradients: seen.append(gradients[0].tolist()))

    with applied(On(mul_=analyse)):
        y = x * 1
        y[0].mul_(2)
        y.sum().backward()
    assert y.tolist() == [[10, 10], [1, 1]]
    assert seen == [[10, 10]]
    assert x.grad is not None
    assert x.grad.tolist() == [[10, 10], [1, 1]]


_VIEWS: dict[str, Callable[[Any], Any]] = {
    "reshape_as": lambda y: y.reshape_as(torch.ones(2, 8)),
    "einsum of a diagonal": lambda y: torch.einsum("ii->i", y),
    "einsum that transposes": lambda y: torch.einsum("ij->ji", y),
    "linalg.diagonal": torch.linalg.diagonal,
    "meshgrid": lambda y: torch.meshgrid(y[0], torch.ones(2), indexing="ij")[0][:, 0],
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, torch.ones(1, 4, 4))[0],
    "expand_as": lambda y: y[0].expand_as(torch.ones(1, 4)),
    "unflatten": lambda y: y.unflatten(0, (2, 2)),
}


@pytest.mark.parametrize("case", _VIEWS)
def test_views_stay_views_with_routines_on_whole_operators(case: str) -> None:
    """What is written into a view is written into its base, whose gradient has it, too; and views
    of leaves refuse it as ever."""
    x = torch.rand(4, 4, requires_grad=True)

    def run() -> Any:
        y = x * 1
        _VIEWS[case](y).mul_(3)
        return y, *torch.autograd.grad((y * y).sum(), x)

    vanilla = fingerprint(run())
    with applied(WholeIdentity()):
        assert fingerprint(run()) == vanilla
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            _VIEWS[case](x).mul_(3)


class Everywhere(WholeIdentity):
    """Routines on whole operators and on each of their backward operators."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.backward, backward=True)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(same)
        context.insert_after_backward_op(same)


_SEVERAL_VIEWS: dict[str, Callable[[Any], Any]] = {
    "tensor_split": lambda y: torch.tensor_split(y, 2),
    "tensor_split at places": lambda y: y.tensor_split([1, 3], dim=1),
    "tensor_split by a tensor": lambda y: y.tensor_split(torch.tensor([1, 3])),
    "hsplit": lambda y: torch.hsplit(y, 2),
    "vsplit": lambda y: y.vsplit(2),
    "dsplit": lambda y: torch.dsplit(y.view(2, 2, 4), 2),
}


@pytest.mark.parametrize("tool", [WholeIdentity, Everywhere], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("write", ["mul_", "zero_", "none"])
@pytest.mark.parametrize("case", _SEVERAL_VIEWS)
def test_several_views_stay_views_with_routines_on_whole_operators(
    case: str, write: str, tool: Callable[[], amanda.Tool]
) -> None:
    """What is written into one of several views reaches the gradients of its base and of the
    others; each of the views of a leaf refuses it as ever."""
    x = torch.rand(4, 4, requires_grad=True)

    def run() -> Any:
        y = x * 1
        views = _SEVERAL_VIEWS[case](y)
        early = views[0].exp().sum() + views[-1].sin().sum()
        if write == "mul_":
            views[0].mul_(3)
        elif write == "zero_":
            views[-1].zero_()
        late = (y * y).sum() + (views[0] * views[0]).sum() + views[-1].sum()
        first = torch.autograd.grad(early if write == "none" else late, x, retain_graph=True)
        return y, views, first, torch.autograd.grad(late, x)

    vanilla = fingerprint(run())
    with applied(tool()):
        assert fingerprint(run()) == vanilla
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            _SEVERAL_VIEWS[case](x)[0].mul_(3)


_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "random numbers into a strided view": lambda y, _: y[:, ::2].normal_(),
    "a list": lambda y, z: torch._foreach_mul_([y, z], [z * 2, y * 3]),
    "a list of views": lambda y, _: torch._foreach_mul_([y[:1], y[2:]], 3),
    "a list of views that overlap": lambda y, _: torch._foreach_mul_([y[:2], y[1:]], 3),
    "detach_ of a view": lambda y, _: y[0].detach_(),
}


@pytest.mark.parametrize("case", _WRITES)
def test_writes_are_as_ever_with_routines_on_whole_operators(case: str) -> None:
    """What an operator writes into parts of tensors, and its errors."""
    x = torch.rand(4, 4, requires_grad=True)

    def run() -> Any:
        y, z = x * 1, x * 2
        torch.manual_seed(1)
        try:
            _WRITES[case](y, z)
        except RuntimeError as error:
            return str(error)
        return y, z, *torch.autograd.grad((y * y).sum() + (y * z).sum(), x)

    vanilla = run()
    assert isinstance(vanilla, str) == (case == "detach_ of a view")
    for tool in (WholeIdentity, Everywhere):
        with applied(tool()):
            result = run()
        if isinstance(vanilla, str):
            assert result == vanilla
        else:
            assert fingerprint(result) == fingerprint(vanilla)


def test_elements_that_overlap_are_written_as_often_as_ever() -> None:
    """An operator in place on windows that overlap writes some elements several times; PyTorch
    defines no gradient of that."""
    x = torch.ones(6, requires_grad=True)

    def run() -> Any:
        y = x * 1
        y.unfold(0, 4, 2).mul_(3)
        return y.tolist()

    vanilla = run()
    with applied(WholeIdentity()):
        assert run() == vanilla


def test_gradients_of_lists_that_overlap_are_counted_as_not_seen() -> None:
    """Each is written into as the one before it has left it: there is no copy to compute with."""
    x = torch.rand(4, requires_grad=True)
    with applied(WholeIdentity()) as scope:
        y = x * 1
        torch._foreach_mul_([y[:3], y[1:]], 2.0)
    assert scope.statistics.not_seen["gradients of lists of tensors that overlap"] == 1


@pytest.mark.parametrize("kind", ["before", "after"])
def test_views_of_several_tensors_refuse_what_would_miss_their_gradients(kind: str) -> None:
    """Views of several tensors, whose gradients meet at no node, cannot be written into with
    routines on these gradients; read they are as ever."""
    x, z = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)

    def run(write: bool) -> Any:
        y = x * 1
        views = torch.atleast_3d(y, z * 2)
        if write:
            views[0].mul_(3)
        return y, torch.autograd.grad((views[0] * views[1]).sum() + y.sum(), [x, z])

    def analyse(context: amanda.OpContext) -> None:
        getattr(context, f"insert_{kind}_backward_op")(lambda *gradients: gradients)

    vanilla = fingerprint(run(False))
    with applied(On(atleast_3d=analyse)):
        assert fingerprint(run(False)) == vanilla
        with pytest.raises(RuntimeError, match="a view and is being modified inplace"):
            run(True)
    run(True)


def test_views_refuse_what_would_miss_routines_that_were_recorded_late() -> None:
    """Routines on several views that an analysis after the operator has recorded."""

    def late(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "tensor_split":
            context.insert_before_backward_op(same)

    tool = amanda.Tool()
    tool.add_inst_for_op(late, require_outputs=True)
    x = torch.rand(4, requires_grad=True)
    with applied(tool):
        first, _ = (x * 1).tensor_split(2)
        (gradient,) = torch.autograd.grad(first.sum(), x)
        assert gradient.tolist() == [1, 1, 0, 0]
        with pytest.raises(RuntimeError, match="a view and is being modified inplace"):
            first.mul_(3)


def test_substituted_output_of_a_view_stays_writable() -> None:
    """What a routine returns for a view can be written in place."""
    x = torch.rand(4, requires_grad=True)
    with applied(On(__getitem__=after(lambda t: t * 2))):
        base = x * 1
        view = base[:2]
        view.add_(1)
        view.sum().backward()
    assert torch.equal(view, x.detach()[:2] * 2 + 1)
    assert x.grad.tolist() == [1, 1, 0, 0]


# -- routines that write in place -----------------------------------------


def test_routine_that_changes_a_parameter_in_place_is_reported() -> None:
    """Changing a parameter in place is warned of, with the operator's id."""
    layer = nn.Linear(2, 2)

    def double(w: torch.Tensor) -> None:
        w.mul_(2)

    tool = On(linear=before(double, [1]))
    with applied(tool), pytest.warns(InPlaceWarning, match="Linear/linear:0"):
        layer(torch.rand(1, 2))


def test_routine_that_changes_a_saved_activation_in_place_is_reported() -> None:
    """Changing what autograd has saved is warned of, before autograd raises its own error."""

    def double(y: torch.Tensor) -> None:
        y.mul_(2)

    x = torch.rand(2, requires_grad=True)
    with applied(On(exp=after(double))):
        with pytest.warns(InPlaceWarning, match="/exp:0"):
            y = x.exp()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_routine_that_changes_nothing_is_not_reported() -> None:
    """No warning where the routine's operator itself writes in place."""
    x = torch.ones(2)
    with applied(On(add_=before(lambda *_: None)), On(add_=after(lambda *_: None))):
        x.add_(1)
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize(
    "reshape",
    [
        lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: torch.ops.aten.squeeze_.default(x),
    ],
)
def test_operators_in_place_that_change_the_shape(reshape: Callable[[Any], Any]) -> None:
    """An operator that gives a view another shape in place gives it the caller's tensor, under
    routines that change nothing, on gradients too, and under those that return other values."""

    def run() -> Any:
        leaf = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
        x = (leaf * 2).narrow(0, 0, 1)
        result = reshape(x)
        (x * x).sum().backward()
        return result is x, fingerprint([x, leaf.grad])

    expected = run()
    for tool in TRANSPARENT:
        with applied(tool()):
            assert run() == expected
    with applied(On(squeeze_=before(_doubled), t_=before(_doubled))):
        x = torch.ones(1, 2)
        assert x.t_().shape == (2, 1)
        assert x.squeeze_().tolist() == [4, 4]
