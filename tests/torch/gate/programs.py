"""Programs that call operators in many ways, and runs of them with one interceptor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_torch import _internals
from amanda_torch.eager import gate
from amanda_torch.plugin import TorchEagerDriver
from tests.torch.support import Cube, applied

VARIABLE = TorchEagerDriver.interceptor_variable
BOTH = ("mode", "gate")

needs_gate = pytest.mark.skipif(
    bool(gate.reason_unusable()), reason=f"the gate is not used here: {gate.reason_unusable()}"
)


@contextlib.contextmanager
def intercepted(name: str, *tools: amanda.Tool) -> Iterator[None]:
    """A scope with an interceptor of this name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, name)
        with applied(*tools):
            yield


class Meta(TorchFunctionMode):
    """A mode of the program's, which replaces an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.add:
            func = torch.Tensor.mul
        return func(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """A subclass with operators of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.add else result


early_add, early_relu, early_mul = torch.add, nn.functional.relu, torch.ones(2, 2).mul


def _operators(x: torch.Tensor) -> Any:
    y = (x + 1.0) * 2 - x / 3
    y = 1.0 - y @ y.T
    y += 1
    y = -(abs(y) ** 2) // 1 % 3
    return (y == x, y < 1, ~(y > 0), y[0], y[:, None], y.mT.real, early_add(y, x), early_relu(y))


def _ignored(x: torch.Tensor) -> Any:
    text = f"{x} {x.sum():.3f} {x!r} {len(x)} {x.shape} {float(x.sum())} {x.tolist()} {x.numpy()}"
    return text, bool(x.sum() > 0), int(x.argmax()), x.is_contiguous(), x.storage_offset()


def _refused(x: torch.Tensor) -> Any:
    values: list[Any] = [x == "text", x != None, x.add(1)]  # noqa: E711
    bad_calls = [lambda: x + "text", lambda: x.add("text"), lambda: torch.add(x)]
    # The function that it calls raises TypeError, not PyTorch, which has taken the arguments.
    bad_calls += [lambda: x.clone().map_(x, len), lambda: x.clone().map_(x, max)]
    for bad in bad_calls:
        try:
            values.append(bad())
        except TypeError as error:
            values.append(str(error).partition("\n")[0])
    return (*values, x + 1)


def _changing() -> Callable[[torch.Tensor], Any]:
    """Calls one operator in another form in each iteration; PyTorch refuses one of them."""
    forms: Iterator[Callable[[torch.Tensor], Any]] = itertools.cycle(
        [lambda y: y.add(2), lambda y: y.add("text"), lambda y: y.add(other=y)]
    )

    def program(x: torch.Tensor) -> Any:
        y = x.clone().requires_grad_()
        try:
            z = next(forms)(y)
        except TypeError as error:
            z = y * len(str(error))
        z = z.add(1.0) + y.T
        values = [y == "text", y == x, z.mT, z[0]]
        z.mT.sum().backward()
        return (*values, y.grad)

    return program


def _modes(x: torch.Tensor) -> Any:
    values = []
    with Meta():
        values += [x.add(2.0), x + 2.0, x.exp()]
        with torch.device("meta"):
            values.append(torch.ones(2).shape)
    with DisableTorchFunctionSubclass():
        values.append(x + 1)
    with DisableTorchFunction():
        values.append(x + 1)
    return (*values, x + 1)


def _subclasses(x: torch.Tensor) -> Any:
    y = x.as_subclass(Doubled)
    made = type("Made", (torch.Tensor,), {})
    z = x.as_subclass(made)
    return (y + 1, y.add(1), nn.functional.relu(y), y[0], z + 1, z[0], nn.Parameter(x) + 1)


def _gradients(x: torch.Tensor) -> Any:
    y = x.clone().requires_grad_()
    z = (Cube.apply(y) * checkpoint(lambda v: v.exp().sin(), y, use_reentrant=False)).sum()
    z.backward()
    (first,) = torch.autograd.grad((y * y).sum(), y)
    return (y.grad, first)


def _transforms(x: torch.Tensor) -> Any:
    return (
        torch.func.vmap(lambda v: v.cos().sum())(x),
        torch.func.grad(lambda v: (v.sin() * v).sum())(x),
    )


def _random(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return (
        nn.functional.dropout(x, 0.5),
        torch.rand(2),
        (x / 8).bernoulli(),
        nn.init.normal_(x.clone()),
    )


class Net(nn.Module):
    """Modules that are shared, called twice, and not registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        self.loose = [nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))[None]
        y = self.attention(y, y, y)[0] + self.recurrent(y)[0]
        for layer in self.layers:
            y = layer(y) + self.norm(y)
        return self.loose[0](y).mean()


def _model(training: bool) -> Callable[[torch.Tensor], Any]:
    net = Net().train(training)
    optimizer = torch.optim.AdamW(net.parameters())

    def run(x: torch.Tensor) -> Any:
        if not training:
            with torch.no_grad():
                return net(x)
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        return (loss, *(p.detach().clone() for p in net.parameters()))

    return run


def _products() -> Callable[[torch.Tensor], Any]:
    module = Products()

    def program(x: torch.Tensor) -> Any:
        with torch.no_grad():
            for rows in (2, 2, 2, 5, 2, 5):
                module(torch.ones(rows, 3), torch.ones(3, 4))

    return program


def _broken(x: torch.Tensor) -> Any:
    """Operators with infinities and NaN, in place, with several outputs, forward and backward."""
    y = x.clone().requires_grad_()
    z = torch.sqrt(y - y) * 2.0
    z.sum().backward()
    w = torch.log(x - x)
    w.add_(1.0).clamp_(min=-1.0)
    values, _ = torch.log(x - x).max(0)
    parts = torch.cat([w, values[None]]).split(1)
    return y.grad, w, nn.functional.dropout(values, 0.0), parts, (x * 1j) / 0, torch.empty(0).sum()


def _of_many_shapes() -> Callable[[torch.Tensor], Any]:
    """Modules and operators whose tensors have other shapes each time, and lists of tensors."""
    net = Net()

    def program(x: torch.Tensor) -> Any:
        results = []
        for rows in (2, 3, 9, 2, 3, 1, 9):
            y = x.repeat(5, 1)[:rows].clone().requires_grad_()
            z = torch.cat([net.first(y), torch.ones(rows, 4)], dim=0).split(rows)[0]
            z.mul(other=y.sum()).sum().backward()
            results.append(y.grad)
            with torch.no_grad():
                checkpoint(net.layers[0], z.detach(), use_reentrant=False)
        return results

    return program


class Products(nn.Module):
    """Operators with tensors that have their sizes near, or elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.high, self.sparse = torch.ones(1, 1, 1, 1, 2, 3), torch.ones(2, 3).to_sparse()
        self.conjugated = torch.ones(2, 3, dtype=torch.complex64).conj()
        with torch.inference_mode():
            self.inferred = torch.ones(2, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> None:
        _ = a @ b, torch.matmul(a, other=self.weight), torch.matmul(input=a, other=b)
        _ = torch.matmul(self.inferred, b), torch.mv(b.T, a[0, :3]), a[..., None, 1:]
        _ = torch.cat([a, a], dim=1), torch.cat((a, a, a), 1), torch.ops.aten.mm.default(a, mat2=b)

        _ = torch.matmul(self.high, b), torch.sparse.mm(self.sparse, b), self.conjugated.abs()


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a function": lambda x: early_add(x, x),
    "with names": lambda x: torch.add(input=x, other=x, alpha=2),
    "with a tuple and a dict": lambda x: torch.add(*(x, x), alpha=2),
    "of other arguments": lambda x: [torch.stack([x, x]), torch.split(x, 1), torch.zeros(2)],
    "of several tensors": lambda x: [torch.cat([x, x], 1), torch.where(x > 0, x, -x)],
    "with several results": lambda x: [x.split(1), x.sum(0).max(), x.max(0)],
    "a method": lambda x: x.add(x),
    "a method with names": lambda x: x.add(other=x, alpha=2),
    "a method without arguments": lambda x: x.relu(),
    "a method of one argument": lambda x: x.dot if x.dim() == 1 else x.matmul(x),
    "bound before": lambda x: [early_mul(2.0), early_mul(x)],
    "unbound": lambda x: torch.Tensor.add(x, x),
    "of the base": lambda x: _internals.TENSOR_BASE.add(x, x),
    "operators": lambda x: [x + 1, 1 + x, x - x, 2 / x, -x, ~(x > 0), x == x, abs(x), x @ x, x**2],
    "functions of operators": lambda x: [operator.add(x, x), operator.neg(x), operator.eq(x, 1)],
    "in place": lambda x: [operator.iadd(x, 1), x.mul_(2), x.__imul__(2)],
    "items": lambda x: [x[0], x[:, None], operator.getitem(x, 1), x.__getitem__(0)],
    "assigned items": lambda x: [operator.setitem(x, 0, 1.0), x.__setitem__(0, x[1])],
    "properties": lambda x: [x.T, x.mT, x.real, x.shape, x.dtype, x.is_cuda],
    "mapped": lambda x: list(map(torch.neg, [x, x, x])),
    "partial": lambda x: functools.partial(torch.add, x)(1.0),
    "sorted by a function": lambda x: sorted([x, x], key=torch.sum),
    "torch.ops": lambda x: [torch.ops.aten.relu.default(x), torch.ops.aten.relu(x)],
    "torch.ops with names": lambda x: torch.ops.aten.add.Tensor(x, x, alpha=2),
    "functions in Python": lambda x: [nn.functional.softsign(x), torch.einsum("ij,jk", x, x)],
    "functions of namespaces": lambda x: [torch.fft.fft(x), torch.linalg.inv(x + torch.eye(2))],
    "a subclass": lambda x: x.as_subclass(nn.Parameter) + 1,
    "reads": lambda x: [len(x), float(x.sum()), str(x), x.tolist(), x.numpy(), x.size()],
    "nothing that fits": lambda x: x.add(x, x, x, x),
    "nothing that fits by a sign": lambda x: x + object(),
    "a name that is not there": lambda x: torch.add(x, x, nothing=1),
    "sizes that do not fit": lambda x: x + torch.ones(3),
}


def _forms_of_calls(x: torch.Tensor) -> Any:
    """Each form so often that CPython specialises its instructions."""
    values: list[Any] = []
    for form in FORMS.values():
        for _ in range(12):
            with contextlib.suppress(TypeError, RuntimeError):
                values.append(form(x.clone()))
    return values


PROGRAMS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "operators": lambda: _operators,
    "forms of calls": lambda: _forms_of_calls,
    "ignored": lambda: _ignored,
    "refused": lambda: _refused,
    "modes": lambda: _modes,
    "subclasses": lambda: _subclasses,
    "gradients": lambda: _gradients,
    "transforms": lambda: _transforms,
    "changing": _changing,
    "random": lambda: _random,
    "model, eval": lambda: _model(False),
    "model, training": lambda: _model(True),
    "infinities": lambda: _broken,
    "many shapes": _of_many_shapes,
    "sizes near and elsewhere": _products,
}


def plain(value: Any) -> Any:
    """Results in a form that can be compared for bit-identity."""
    if isinstance(value, torch.Tensor):
        return (
            type(value).__name__,
            value.dtype,
            value.detach().as_subclass(torch.Tensor).tolist(),
        )
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def steps(program: Callable[[torch.Tensor], Any]) -> list[Any]:
    torch.manual_seed(1)
    values = []
    for _ in range(3):
        values.append(plain(program(torch.arange(1.0, 5.0).reshape(2, 2))))
        amanda.new_iteration()
    return [values, torch.get_rng_state().tolist()]
