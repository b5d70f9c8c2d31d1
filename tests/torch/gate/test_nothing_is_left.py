"""The gate is switched on and off for one scope or many, and leaves nothing."""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

import amanda
from amanda_torch import _internals, accel
from amanda_torch.eager.execution import KnownOp
from amanda_torch.operators.names import VIEW_PROPERTIES, Kind, kind_of
from tests.torch.gate.programs import BOTH, VARIABLE, intercepted, needs_gate
from tests.torch.gate.tools import Ids
from tests.torch.support import Counter, Watcher, applied

pytestmark = needs_gate


def test_interceptors_can_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may use the one after the other, and nest scopes in either order."""
    x, counts = torch.ones(2, 2), []
    for name in ("gate", "mode", "gate", "mode"):
        tool = Counter()
        with intercepted(name, tool):
            x.exp()
            inner = Counter()
            monkeypatch.setenv(VARIABLE, "mode" if name == "gate" else "gate")
            with applied(inner):
                x.exp()
            x.exp()
        counts.append((tool.ops["exp"], inner.ops["exp"]))
    assert counts == [(3, 1)] * 4


def test_interceptors_can_be_switched_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that open and nest scopes while the interceptor is switched each see their own
    operators."""
    wrong: list[Any] = []
    begun = threading.Barrier(3)

    def work() -> None:
        x = torch.ones(2, requires_grad=True)
        begun.wait()
        for _ in range(12):
            outer, inner = Counter(), Counter()
            with applied(outer):
                x.exp().sum().backward()
                with applied(inner):
                    x.exp()
                x.exp()
            if (outer.ops["exp"], outer.ops["sum"], inner.ops["exp"]) != (3, 1, 1):
                wrong.append((outer.ops, inner.ops))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    while any(thread.is_alive() for thread in threads):
        for name in BOTH:
            monkeypatch.setenv(VARIABLE, name)
    assert not wrong
    assert not accel.load().is_installed()


@pytest.mark.usefixtures("gated")
def test_functions_that_report_nothing_stay() -> None:
    """A function of a tensor in Python that tells no mode of its calls is called as without a
    scope: ``zero_grad`` asks each parameter twice for its hash. What stands in the place of another
    one looks like it."""
    hashed, shown = vars(torch.Tensor)["__hash__"], vars(torch.Tensor)["__repr__"]
    with applied(Watcher()):
        assert vars(torch.Tensor)["__hash__"] is hashed
        call: Any = vars(torch.Tensor)["__repr__"]
        assert call is not shown
        assert (call.__name__, call.__doc__, call.__wrapped__) == ("__repr__", shown.__doc__, shown)


def test_every_builtin_operator_is_noticed() -> None:
    """Each builtin that PyTorch lets be overridden, and that is an operator, is noticed."""
    owned = {id(builtin) for builtin, _, _ in accel.load().places()}
    missing = set()
    for functions in get_overridable_functions().values():
        for func in functions:
            kinds = (types.BuiltinFunctionType, types.MethodDescriptorType)
            if isinstance(func, kinds) and kind_of(func) is Kind.LEAF and id(func) not in owned:
                missing.add(func.__name__)
    # They ask whether something is overridden.
    assert missing <= set(_internals.OVERRIDE_CHECKS) | {
        "_" + c for c in _internals.OVERRIDE_CHECKS
    }
    for name in VIEW_PROPERTIES:
        assert id(vars(_internals.TENSOR_BASE)[name]) in owned


@pytest.mark.usefixtures("gated")
def test_nothing_is_left() -> None:
    """After a scope all that was replaced is as it was, also after an exception, and no function
    has another identity or hash within it."""
    functions = [torch.add, torch.nn.functional.linear, *_internals.MODE_BUILTINS]
    functions += [builtin for builtin, _, _ in accel.load().places() if callable(builtin)]
    table, hashes = dict.fromkeys(functions), list(map(hash, functions))
    before = accel.load().places()
    attributes = {name: vars(torch.Tensor)[name] for name in vars(torch.Tensor)}
    counts = [sys.getrefcount(f) for f in (torch.add, torch.Tensor.add, nn.Module.__call__)]
    add = torch.add
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), applied(Watcher()):
            assert torch.add is add
            assert table.keys() >= set(functions)
            assert list(map(hash, functions)) == hashes
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
            made = type("Made", (torch.Tensor,), {})
            if fails:
                raise ZeroDivisionError
        assert accel.load().places() == before
        assert {name: vars(torch.Tensor)[name] for name in vars(torch.Tensor)} == attributes
        assert torch.ones(2).as_subclass(made)[0] == 1.0
        gc.collect()
    now = [sys.getrefcount(f) for f in (torch.add, torch.Tensor.add, nn.Module.__call__)]
    # What PyTorch reports for a builtin is kept from the first report on.
    assert all(b - a <= 1 for a, b in zip(counts, now, strict=True))


@pytest.mark.usefixtures("gated")
def test_classes_can_be_made_within() -> None:
    """Classes can be defined within a scope: nothing that all classes share is touched."""
    with applied(Watcher()):
        made = collections.namedtuple("made", "a b")

        class Special(torch.Tensor):
            def __getitem__(self, index: Any) -> Any:
                return "own"

        class Meta(type(nn.Parameter)):  # type: ignore[misc]
            pass

        class Other(torch.Tensor, metaclass=Meta):
            pass

        x = torch.ones(2)
        assert x.as_subclass(Special)[0] == "own"
        assert made(1, 2).a == 1
        assert x.as_subclass(Other)[0] == 1
        assert issubclass(Special, torch.Tensor)


@pytest.mark.usefixtures("gated")
def test_threads_that_compute_meanwhile() -> None:
    """Threads that no scope covers compute as ever while scopes begin and end elsewhere."""
    x, stop, wrong = torch.arange(4.0), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            if (x + 1).add(2)[1:].sum().item() != 15.0:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(30):
        tool = Ids(acts=True)
        with applied(tool):
            x.exp().sum()
        seen.append(tool.ids)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen == [["/exp:0", "/sum:0"]] * 30


def test_the_stack_looks_as_if_the_mode_lay_there() -> None:
    """Every question about the stack of modes is answered with the mode, among others, too; a
    device that is set with a with-statement lies above it, and is taken off alone."""

    class Other(TorchFunctionMode):
        pass

    with intercepted("gate", Watcher()):
        (ours,) = _internals.modes()
        with Other() as other:
            assert [_internals.mode_at(i) for i in range(2)] == [ours, other]
            assert _internals.mode_depth() == 2
        with torch.device("meta"):
            assert torch.ones(2).is_meta
        assert not torch.ones(2).is_meta
        assert _internals.pop_mode() is ours
        assert _internals.mode_depth() == 0
        _internals.push_mode(ours)
        assert [*_internals.modes()] == [ours]
        with pytest.raises(TypeError):
            _internals.mode_at("0")  # type: ignore[arg-type]


@pytest.mark.usefixtures("gated")
def test_a_routine_that_leads_to_its_operator_is_collected() -> None:
    """The garbage collector visits what the extension holds of an operator's routines."""

    class Holding(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.held: list[Any] = []
            self.add_inst_for_op(lambda context: context.insert_before_op(self.look))

        def look(self, *tensors: torch.Tensor) -> None:
            pass

    tool = Holding()
    with applied(tool):
        for _ in range(3):
            torch.ones(2).exp()
            amanda.new_iteration()
        known = [one for one in gc.get_objects() if type(one) is KnownOp]
        # Some are of tests before.
        tool.held += [
            one for one in known if any(each.func == tool.look for each in one.plan.before)
        ]
    assert tool.held
    gone = weakref.ref(tool)
    del tool, known
    gc.collect()
    assert gone() is None
