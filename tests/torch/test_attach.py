"""Attaching to PyTorch and letting go of it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amanda.errors import CapabilityError
from amanda.python.patching import PatchSet
from amanda.state import ATTACHED, LIVE_SCOPES
from amanda_torch import _internals, plugin
from amanda_torch._internals import symbols
from tests.running import run_python
from tests.torch.support import Counter, applied, framework_state


def test_missing_private_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch without a private symbol gives one clear error, and is left as it is."""
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    state = framework_state()
    with pytest.raises(CapabilityError, match=r"torch\.autograd\._engine_run_backward") as caught:
        applied(Counter()).__enter__()
    assert torch.__version__ in str(caught.value)
    assert framework_state() == state
    assert not ATTACHED
    assert not LIVE_SCOPES


@pytest.mark.parametrize("count", range(3))
def test_failing_patch_leaves_nothing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """If some patch cannot be made, those before it are undone."""
    vanilla, done = PatchSet.wrap, []

    def failing(self: PatchSet, target: Any, name: str, wrapper: Any) -> Any:
        if len(done) == count:
            raise AttributeError(f"cannot patch {name}")
        done.append(name)
        return vanilla(self, target, name, wrapper)

    state = framework_state()
    with monkeypatch.context() as patch:
        patch.setattr(PatchSet, "wrap", failing)
        with pytest.raises(AttributeError, match="cannot patch"):
            applied(Counter()).__enter__()
    assert framework_state() == state
    assert not ATTACHED


def test_the_module_call_is_the_users_own_again() -> None:
    """Subclasses with a ``__call__`` of their own keep it."""

    class Called(nn.Module):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    model, counter, x = Called(), Counter(), torch.ones(2)
    own = vars(Called)["__call__"]
    with applied(counter):
        result = model(x)
    assert result.tolist() == [2, 2]
    assert counter.ops == {"relu": 1, "add": 1}
    assert vars(Called)["__call__"] is own


def test_lazily_imported_dynamo_is_handled() -> None:
    """A process in which Dynamo is imported inside the scope runs compiled functions eagerly."""
    code = """
import sys, warnings, torch
from tests.torch.support import ForwardCounter, applied
assert "torch._dynamo.eval_frame" not in sys.modules
counter = ForwardCounter()
with applied(counter), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    compiled = torch.compile(lambda x: x.relu() + 1, backend="eager")
    compiled(torch.ones(2))
assert counter.ops == {"ones": 1, "relu": 1, "add": 1}, counter.ops
from torch._dynamo import eval_frame
homes = {name: str(getattr(v, "__module__", "")) for name, v in vars(eval_frame).items()}
assert not [name for name, home in homes.items() if home.startswith("amanda")], homes
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["1.13.1", "2.12.0"])
def test_old_versions_are_unusable(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """An older PyTorch is refused with what is needed and what is there."""
    monkeypatch.setattr(plugin.metadata, "version", lambda _: version)
    assert version in plugin.TorchEagerDriver.reason_unusable()
    assert "2.13" in plugin.TorchEagerDriver.reason_unusable()


def _private_names(tree: ast.Module) -> Iterator[str]:
    """The private attributes that a module reads, by a dot or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) != "self":
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "attrgetter")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def test_every_private_symbol_is_checked() -> None:
    """Each private symbol that ``_internals`` uses is among those it looks for."""
    files = Path(_internals.__file__).parent.glob("*.py")
    parts = [ast.parse(file.read_text()) for file in files]
    tree = ast.Module([statement for part in parts for statement in part.body], [])
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    paths = [text.split(".") for text in strings if str(text).startswith("torch.")]
    used = {
        name
        for name in _private_names(tree)
        if str(name).startswith("_") and not str(name).endswith("__")
    }
    # Python's own; and those that no class of PyTorch has, only
    # Dynamo's graphs and their nodes, and functions that it is kept off.
    others = {
        "_getframe",
        "_current_frames",
        "_jit",
        "_param_name_to_source",
        "_dynamo_source",
        "_torchdynamo_disable",
        "_torchdynamo_orig_callable",
        # Of DTensor, which is read only where the program has imported its module.
        "_local_tensor",
    }
    assert len(used) > 10
    assert used - {name for path in paths for name in path} == others


def test_every_private_symbol_exists() -> None:
    """The PyTorch that the tests run with has all private symbols that are used."""
    assert _internals.missing() == []
    assert _internals.missing(compiler=True) == []
    for driver in (plugin.TorchEagerDriver, plugin.TorchGraphDriver):
        assert driver.check_internals() == []
    assert importlib.import_module("amanda_torch.eager.driver").InterceptingDriver


def test_looking_for_private_symbols_changes_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbol may be annotated in a class only; a class without annotations is given none."""

    class Bare:
        """Has no annotations."""

    class Annotated:
        """Has an attribute in instances."""

        attribute: int

    before = [dict(vars(cls)) for cls in (Bare, Annotated)]
    monkeypatch.setattr(torch, "Bare", Bare, raising=False)
    monkeypatch.setattr(torch, "Annotated", Annotated, raising=False)
    paths = ["torch.Bare.attribute", "torch.Annotated.attribute"]
    monkeypatch.setattr(symbols, "EAGER_SYMBOLS", paths)
    assert _internals.missing() == paths[:1]
    assert [dict(vars(cls)) for cls in (Bare, Annotated)] == before


def test_a_private_symbol_that_is_missing_is_named() -> None:
    """Also one that is read where our modules are imported, which would fail in its own words."""
    code = (
        "import torch.fx\n"
        "from amanda_torch.plugin import TorchEagerDriver\n"
        "del torch._C.TensorBase, torch.fx.Tracer.trace\n"
        "print(*TorchEagerDriver.check_internals(), sep='\\n')\n"
        "import amanda\n"
        "with amanda.apply(amanda.Tool()): pass\n"
    )
    done = run_python("-c", code)
    names = "fx._symbolic_trace.Tracer.trace", "_C.TensorBase"
    said = {f"PyTorch has no torch.{name}" for name in names}
    assert set(done.stdout.splitlines()) == said, done.stderr
    assert "could not be attached: CapabilityError: PyTorch" in done.stderr
