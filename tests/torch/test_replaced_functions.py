"""Programs that put functions of their own in the places of PyTorch's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_torch import _internals
from amanda_torch.operators.replaced_functions import original_of
from tests.torch.support import applied

_NN = next(o for o in _internals.BUILTIN_FUNCTIONS if o.__name__.endswith("._nn"))


class _Patch:
    """A program's function, which counts its calls and doubles what PyTorch's returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls = 0
        vanilla = getattr(owner, name)

        def doubled(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            result = vanilla(*args, **kwargs)
            return 2 * result if isinstance(result, torch.Tensor) else result

        monkeypatch.setattr(owner, name, doubled)


class _Looking(amanda.Tool):
    """Has a routine at every operator, and notes their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ids.append(context.get_op_id())
        context.insert_before_op(lambda *inputs: None)


def _same(patch: _Patch, run: Callable[[torch.Tensor], Any]) -> list[str]:
    """The ids of the operators of a program, which computes and calls the same under a tool."""
    x = torch.arange(1.0, 5.0, requires_grad=True)
    vanilla, calls = run(x), patch.calls
    x, patch.calls, tool = torch.arange(1.0, 5.0, requires_grad=True), 0, _Looking()
    with applied(tool):
        # The second time its plan is known.
        found = [(run(x), x.__setattr__("grad", None)) for _ in range(2)]
    assert patch.calls == 2 * calls
    for result, _ in found:
        assert torch.equal(result, vanilla) if torch.is_tensor(vanilla) else result == vanilla
    return tool.ids


@pytest.mark.parametrize("name", ["exp", "sum", "detach", "reshape", "add_", "norm", "unflatten"])
def test_a_method_that_the_program_has_replaced_runs_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of tensors that the program wraps is run once, and the operator in it is seen."""
    args = {"reshape": (2, 2), "add_": (1.0,), "unflatten": (0, (2, 2))}.get(name, ())
    patch = _Patch(monkeypatch, torch.Tensor, name)
    ids = _same(patch, lambda x: getattr(x.clone(), name)(*args))
    kind = {"norm": "linalg_vector_norm"}.get(name, name)
    assert ids[:3] == ["/clone:0", f"/{kind}:0", "/mul:0"]


@pytest.mark.parametrize(
    ("owner", "name", "run"),
    [
        (torch.Tensor, "item", lambda x: x[0].item()),
        (torch.Tensor, "size", lambda x: list(x.size())),
        (torch.Tensor, "__len__", len),
        (torch.Tensor, "backward", lambda x: [(x * x).sum().backward(), x.grad.tolist()]),
        (torch.autograd, "grad", lambda x: torch.autograd.grad((x * x).sum(), x)[0].tolist()),
        (_NN, "gelu", lambda x: _NN.gelu(x)),
        (nn.functional, "gelu", lambda x: nn.functional.gelu(x)),
    ],
    ids=["item", "size", "len", "backward", "grad", "_nn.gelu", "gelu"],
)
def test_a_function_that_the_program_has_replaced_runs_once(
    owner: Any, name: str, run: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where the function is not an operator, is written in Python, or is of a module."""
    _same(_Patch(monkeypatch, owner, name), run)


def test_properties_and_objects_that_the_program_has_put_there_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A property, an object that can be called and a wrapper with the name of what it wraps."""
    base, calls = _internals.TENSOR_BASE, []

    class Doubled:
        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            calls.append(tensor)
            return 2 * base.exp(tensor)

        def __get__(self, tensor: Any, owner: Any = None) -> Any:
            return self if tensor is None else functools.partial(self, tensor)

    @functools.wraps(torch.Tensor.sin)
    def sin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return 2 * base.sin(tensor)

    turned = property(lambda tensor: 2 * base.T.__get__(tensor))
    monkeypatch.setattr(torch.Tensor, "exp", Doubled())
    monkeypatch.setattr(torch.Tensor, "sin", sin)
    monkeypatch.setattr(torch.Tensor, "T", turned, raising=False)
    x = torch.tensor([[1.0, 2.0]])
    vanilla, tool = x.exp().sin().T, _Looking()
    with applied(tool):
        found = x.exp().sin().T
    assert torch.equal(found, vanilla)
    assert len(calls) == 4
    assert tool.ids == ["/exp:0", "/mul:0", "/sin:0", "/mul:1", "/T:0", "/mul:2"]


class _Exp:
    """An object of a program, which can be called and is no function."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * _internals.TENSOR_BASE.exp(tensor)

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else functools.partial(self, tensor)


def test_what_the_program_has_put_there_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that stood for one of PyTorch's functions goes when the program drops it."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "exp", _Exp())
        gone = weakref.ref(vars(torch.Tensor)["exp"])
        assert original_of(gone()) is _internals.TENSOR_BASE.exp
    assert gone() is None
