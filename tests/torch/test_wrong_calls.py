"""What takes the place of functions of PyTorch fails as they do, where it is called wrongly."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.python.patching import PatchSet
from amanda_torch.eager import gate
from tests.torch.support import Identity, applied

_LEFT_OUT = {
    # A function of ours is in its place where Dynamo asks for a compiler: it gives another one.
    "_callback_from_stance",
    # It puts on the stack of modes whatever it is given.
    "set_torch_function_mode_stack",
    # PyTorch gives modes whatever function it is given.
    "handle_torch_function",
    # Not functions, or none of PyTorch's.
    "is_on", "native", "start", "weakref",
}  # fmt: skip
_REPORTED = {"HigherOrderOperator"}
"""PyTorch reports the first argument to a mode before it looks at it."""

_OF_DYNAMO = "torch._dynamo.variables"
"""What Dynamo calls on itself as it captures."""


@contextlib.contextmanager
def _noted_patches(found: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Note where the patches of a driver are, while it is attached."""

    def noting(vanilla: Any) -> Any:
        @functools.wraps(vanilla)
        def noted(patches: PatchSet, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            where = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
            found[where, name] = owner
            return vanilla(patches, owner, name, *args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("wrap", "set"):
            patch.setattr(PatchSet, name, noting(vars(PatchSet)[name]))
        yield


def _patched() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    with _noted_patches(found), applied(amanda.Tool()):
        pass
    return {
        (where, name): owner
        for (where, name), owner in found.items()
        if name not in _LEFT_OUT
        and _OF_DYNAMO not in str(getattr(owner, "__module__", owner.__name__))
        and _OF_DYNAMO not in where
    }


def _wrong_arguments(where: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    tensor, module = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    made = type("Made", (torch.autograd.Function,), {})
    yield (), {}
    yield (), {"nonsense": 1}
    for first in (5, None, "a", [], object(), made, tensor, module):
        yield (first,), {}
        if where not in _REPORTED:
            yield (first,), {"nonsense": 1}
            yield (first, 5), {}
            yield (first, tensor, 6, 7), {}


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What a call raises, or the type of what it returns; and its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            outcome: tuple[Any, ...] = ("returned", type(function(*args, **kwargs)))
        except Exception as error:
            message = re.sub("0x[0-9a-f]+", "", str(error))
            outcome = (type(error), message, type(error.__context__), type(error.__cause__))
    return outcome, [(w.category, str(w.message), w.filename, w.lineno) for w in warned]


class _Counting(Identity):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self._see, inputs=[]))

    def _see(self) -> None:
        self.count += 1


@pytest.mark.usefixtures("interceptor")
def test_patched_functions_raise_the_errors_of_pytorch() -> None:
    """Wrong calls of a patched function raise its own errors, in context, after its warnings."""
    patched = _patched()
    calls = [
        (owner, attribute, *arguments)
        for (where, attribute), owner in patched.items()
        for arguments in _wrong_arguments(where)
    ]
    tool, blind = _Counting(), []

    def tried(owner: Any, name: str, *given: Any) -> tuple[Any, ...]:
        outcome = _outcome(getattr(owner, name), *given)
        before, _ = tool.count, torch.add(1, torch.ones(2))
        if tool.count == before:
            blind.append((owner, name, *given))
        return outcome

    outcomes = []
    for scope in (contextlib.nullcontext, contextlib.nullcontext, lambda: applied(tool)):
        blind.clear()
        with scope():
            # From one line, which warnings name.
            outcomes += [[tried(*call) for call in calls]]
    assert blind == []
    assert len(patched) > 20
    # Some things are told once only.
    assert [one for one in zip(calls, *outcomes, strict=True) if one[1] == one[2] != one[3]] == []


@pytest.mark.usefixtures("interceptor")
def test_operators_raise_the_errors_of_pytorch() -> None:
    """A builtin of PyTorch that is called with wrong arguments raises what it raises of itself."""
    tensor = torch.ones(2, requires_grad=True)
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((object(),), {}),
        ((tensor,), {"nonsense": 1}),
        ((tensor, object()), {}),
        ((tensor,), {"out": 5}),
    ]
    # Some of those with a leading underscore look at nothing, and end the process.
    found = [f for f in gate.operators() if not f.__name__.startswith("_")][::5]
    vanilla = {(f, i): _outcome(f, *form) for f in found for i, form in enumerate(forms)}
    raised = {key: outcome for key, outcome in vanilla.items() if outcome[0][0] != "returned"}
    assert len(raised) > 500
    with applied(Identity()):
        differing = [
            (function, i, outcome)
            for (function, i), outcome in raised.items()
            if _outcome(function, *forms[i]) != outcome
        ]
    assert differing == []


class _Taking(nn.Module):
    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return x + sum(named.values())


class _TakingFused(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + sum(named.values())


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize("keyword", ["module", "interceptor", "vanilla", "args", "kwargs", "call"])
@pytest.mark.parametrize("make", [_Taking, lambda: _TakingFused(4, 2).eval()])
@pytest.mark.parametrize("tool", [amanda.Tool, Identity, amanda.tools.load("summary")])
def test_modules_take_keywords_of_any_name(
    keyword: str, make: Callable[[], nn.Module], tool: Callable[[], amanda.Tool]
) -> None:
    """A model takes keyword arguments of any name, those of ours included."""
    x, model = torch.ones(2), make()
    with applied(tool()):
        for _ in range(4):
            assert model(x, **{keyword: x}).tolist() == [2.0, 2.0]


class _Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.narrow(x, dim=0, start=0, length=2) + torch.arange(start=0, end=2, step=1)
            x = nn.functional.mse_loss(x, target=torch.zeros(2)) + x
        return x


@pytest.mark.parametrize("tool", [amanda.Tool, Identity, amanda.tools.load("trace")])
def test_operators_of_compiled_modules_take_keywords_of_any_name(
    tool: Callable[[], amanda.Tool],
) -> None:
    """An operator of a compiled module takes keyword arguments of any name."""
    x, model = torch.ones(2, requires_grad=True), torch.compile(_Slices(), backend="eager")
    expected = model(x)
    with applied(tool()):
        for _ in range(6):
            found = model(x)
            found.sum().backward()
            assert torch.equal(found, expected)
