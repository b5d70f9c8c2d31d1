"""The gate notices what the mode notices, at the same ids, and leaves PyTorch as it was.

The whole of tests/torch runs with the gate by ``nox -s torch-gate``; here is what concerns the two
beside each other. The extension by itself is tested in tests/accel.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amanda
from amanda import inline
from amanda.cli.run import choose_interceptor
from amanda.errors import CoverageWarning, InPlaceWarning, ToolTypeError
from amanda.state import STATE
from amanda_torch import _internals, extension
from amanda_torch.eager import gate
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.operators.names import VIEW_PROPERTIES, Kind, kind_of
from amanda_torch.plugin import TorchEagerDriver
from tests.counting import profiled
from tests.torch.support import Counter, Cube, Identity, LiveTensors, Watcher, applied

VARIABLE = TorchEagerDriver.interceptor_variable
BOTH = ("mode", "gate")

needs_gate = pytest.mark.skipif(
    bool(gate.reason_unusable()), reason=f"the gate is not used here: {gate.reason_unusable()}"
)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "gate")


@contextlib.contextmanager
def intercepted(monkeypatch: pytest.MonkeyPatch, name: str, tool: amanda.Tool) -> Iterator[None]:
    """A scope with an interceptor of this name."""
    monkeypatch.setenv(VARIABLE, name)
    with applied(tool):
        yield


# -- the same operators ---------------------------------------------------------


class Ids(amanda.Tool):
    """The ids of all operators in the order of their executions, by routines or by analyses."""

    def __init__(self, acts: bool) -> None:
        super().__init__()
        self.ids: list[str] = []
        self._acts = acts
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        if self._acts:
            context.insert_before_op(lambda: self.ids.append(op_id), inputs=[])
        else:
            self.ids.append(op_id)


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


early_add, early_relu = torch.add, nn.functional.relu


def _operators(x: torch.Tensor) -> Any:
    y = (x + 1.0) * 2 - x / 3
    y = 1.0 - y @ y.T
    y += 1
    y = -(abs(y) ** 2) // 1 % 3
    return (y == x, y < 1, ~(y > 0), y[0], y[:, None], y.mT.real, early_add(y, x), early_relu(y))


def _forms(x: torch.Tensor) -> Any:
    total, bound = x.clone(), x.mul
    total[0] = 1.0
    values = [torch.add(x, other=x), torch.add(*(x, x), alpha=2), bound(2.0)]
    values += map(x.add, [1.0, 2.0])
    values += [torch.stack([x, x]), torch.split(x, 1), x.split(1), torch.einsum("ij,jk", x, x)]
    values += [torch.cat([x, x], 1), torch.where(x > 0, x, -x), x.sum(0).max(), torch.zeros(2)]
    values += [torch.fft.fft(x).abs(), torch.linalg.inv(x + torch.eye(2)), torch.special.erf(x)]
    return values


def _ignored(x: torch.Tensor) -> Any:
    text = f"{x} {x.sum():.3f} {x!r} {len(x)} {x.shape} {float(x.sum())} {x.tolist()} {x.numpy()}"
    return text, bool(x.sum() > 0), int(x.argmax()), x.is_contiguous(), x.storage_offset()


def _ops(x: torch.Tensor) -> Any:
    return (
        torch.ops.aten.relu.default(x),
        torch.ops.aten.relu(x),
        torch.ops.aten.add.Tensor(x, x, alpha=2),
        torch.ops.aten.sum(x),
    )


def _refused(x: torch.Tensor) -> Any:
    values: list[Any] = [x == "text", x != None, x.add(1)]  # noqa: E711
    for bad in (lambda: x + "text", lambda: x.add("text"), lambda: torch.add(x)):
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


PROGRAMS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "operators": lambda: _operators,
    "forms": lambda: _forms,
    "ignored": lambda: _ignored,
    "torch.ops": lambda: _ops,
    "refused": lambda: _refused,
    "modes": lambda: _modes,
    "subclasses": lambda: _subclasses,
    "gradients": lambda: _gradients,
    "transforms": lambda: _transforms,
    "changing": _changing,
    "random": lambda: _random,
    "model, eval": lambda: _model(False),
    "model, training": lambda: _model(True),
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


@needs_gate
@pytest.mark.parametrize("acts", [True, False], ids=["acting", "watching"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_see_the_same(name: str, acts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate sees the operators that the mode sees, in the same order, at the same ids, in each
    iteration; and neither changes a result."""
    vanilla = steps(PROGRAMS[name]())
    seen = {}
    for interceptor in BOTH:
        tool = Ids(acts)
        program = PROGRAMS[name]()
        with intercepted(monkeypatch, interceptor, tool):
            assert steps(program) == vanilla
        seen[interceptor] = tool.ids
    assert seen["gate"] == seen["mode"]
    assert seen["gate"] or name == "ignored"


@needs_gate
def test_interceptors_can_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may use the one after the other, and nest scopes in either order."""
    x, counts = torch.ones(2, 2), []
    for name in ("gate", "mode", "gate", "mode"):
        tool = Counter()
        with intercepted(monkeypatch, name, tool):
            x.exp()
            inner = Counter()
            monkeypatch.setenv(VARIABLE, "mode" if name == "gate" else "gate")
            with applied(inner):
                x.exp()
            x.exp()
        counts.append((tool.ops["exp"], inner.ops["exp"]))
    assert counts == [(3, 1)] * 4


@needs_gate
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
    assert not extension.load().is_installed()


# -- nothing is asked -------------------------------------------------------------


@needs_gate
@pytest.mark.usefixtures("gated")
def test_what_no_tool_wants_runs_no_python_of_ours() -> None:
    """An operator and a module call that nothing acts on run through no function of ours."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4))), None

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            _, run = profiled(lambda: self.inner(x)[0].real.add(1.0) + torch.exp(x).sum())
            runs.append(run)

    runs: list[Any] = []
    outer, x = Outer(), torch.ones(2, 4)
    watcher = amanda.Tool()
    watcher.add_inst_for_op(lambda context: None)
    with applied(watcher):
        for _ in range(3):
            outer(x)
    assert len(runs[0]) > 20
    assert len(runs[-1]) == 0, f"\n{runs[-1]}"


@needs_gate
@pytest.mark.usefixtures("gated")
def test_functions_that_report_nothing_stay() -> None:
    """A function of a tensor in Python that tells no mode of its calls is called as without a
    scope: ``zero_grad`` asks each parameter twice for its hash."""
    hashed, shown = vars(torch.Tensor)["__hash__"], vars(torch.Tensor)["__repr__"]
    with applied(Watcher()):
        assert vars(torch.Tensor)["__hash__"] is hashed
        assert vars(torch.Tensor)["__repr__"] is not shown


class SumsOfSizes(amanda.Tool):
    """Adds up the sizes of all tensors of an operator, with its own sum for each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, inline.ShapeSum] = {}
        self.weighed: list[Any] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        total = self.sums.setdefault(context.get_op_id(), inline.ShapeSum(self.weigh))
        context.insert_before_op(total.before)
        context.insert_after_op(total.after)

    def weigh(self, shapes: Any) -> int:
        self.weighed.append(shapes)
        return sum(math.prod(shape) for shape in (*shapes[0], *shapes[1]) if shape is not None)


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

    def elsewhere(self, b: torch.Tensor) -> None:
        _ = torch.matmul(self.high, b), torch.sparse.mm(self.sparse, b), self.conjugated.abs()


class Elsewhere(Products):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.elsewhere(b)


@needs_gate
@pytest.mark.parametrize("cls", [Products, Elsewhere])
def test_sums_by_sizes_are_those_of_the_mode(
    cls: type[Products], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum by the gate is that of the mode, whatever layout and number of sizes tensors have."""
    found = []
    for name in BOTH:
        module = cls()
        with intercepted(monkeypatch, name, tool := SumsOfSizes()), torch.no_grad():
            for rows in (2, 2, 2, 5, 2, 5):
                module(torch.ones(rows, 3), torch.ones(3, 4))
        found.append([(s.executions, s.amount, s.last) for s in tool.sums.values()])
    assert found[0] == found[1]
    assert any(executions > 1 for executions, _, _ in found[0])


class TensorsAlive(amanda.inline.Log):
    """Counts the tensors that are objects of Python at the end of each execution of a timer."""

    def __init__(self) -> None:
        super().__init__(due=0)
        self.counts: list[int] = []

    def look(self, now: int) -> None:
        self.counts.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))


@needs_gate
@pytest.mark.usefixtures("gated")
def test_timers_at_backward_operators_make_no_objects_of_gradients() -> None:
    """What a timer or a counter does at a backward operator needs no tensor of Python's."""
    log = TensorsAlive()

    class Timed(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            timer = amanda.inline.Timer(log)
            context.insert_before_backward_op(timer.start, grad_outputs=[])
            context.insert_after_backward_op(timer.stop, grad_inputs=[])

    x = torch.ones(2, requires_grad=True)
    with applied(Timed()):
        for _ in range(4):
            x.grad = None
            y = (x * 2.0).exp().sum()
            log.counts.clear()
            alive = sum(type(one) is torch.Tensor for one in gc.get_objects())
            y.backward()
            # With it goes the accumulation, which has been hooked where nothing was known yet.
            del y
            amanda.new_iteration()
    assert len(log.counts) == 4
    # The gradient with which the pass begins is one of Python's.
    assert max(log.counts) <= alive + 1


@needs_gate
@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_log_raises_reaches_the_program(error: type[BaseException]) -> None:
    """An exception that C++ cannot be given at a backward operator is raised there nevertheless,
    once, and its traceback names the function that raised it."""

    class Raising(amanda.inline.Log):
        def look(self, now: int) -> None:
            self.due = None
            raise error("looked")

    class Timed(amanda.Tool):
        def __init__(self, log: amanda.inline.Log) -> None:
            super().__init__()
            self._log = log
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            timer = amanda.inline.Timer(self._log)
            context.insert_before_backward_op(timer.start, grad_outputs=[])
            context.insert_after_backward_op(timer.stop, grad_inputs=[])

    x, log = torch.ones(2, requires_grad=True), Raising()
    with applied(Timed(log)):
        for _ in range(4):
            log.due = 0
            with pytest.raises(error, match="looked") as caught:
                (x * 2.0).exp().sum().backward()
            assert "look" in [entry.name for entry in caught.traceback]
            (x * 2.0).exp().sum().backward()
            amanda.new_iteration()


class TimesExp(amanda.Tool):
    """A timer around the backward operators of ``exp``, with a log."""

    def __init__(self) -> None:
        super().__init__()
        self.log = amanda.inline.Log()
        self.timer = amanda.inline.Timer(self.log)
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "ExpBackward0":
            context.insert_before_backward_op(self.timer.start, grad_outputs=[])
            context.insert_after_backward_op(self.timer.stop, grad_inputs=[])


@needs_gate
@pytest.mark.parametrize("interceptor", BOTH)
def test_a_timer_around_a_backward_operator(
    interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer at a backward operator notes each execution that ends, once, and none that raises;
    one that runs within another one, and one in another thread, are measured apart."""
    x, tool = torch.ones(2, requires_grad=True), TimesExp()

    def passes(inside: Callable[[], object] = lambda: None) -> int:
        before = tool.timer.executions

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            # Between the two routines.
            inside()
            return tensor

        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack),
        ):
            y = x.exp()
        with torch.enable_grad():
            y.sum().backward()
        assert len(tool.log.numbers) == 4 * tool.timer.executions
        return tool.timer.executions - before

    def in_thread() -> None:
        thread = threading.Thread(target=passes)
        thread.start()
        thread.join()

    def raises() -> None:
        raise ZeroDivisionError

    with intercepted(monkeypatch, interceptor, tool):
        for _ in range(3):
            assert passes() == 1
            with pytest.raises(ZeroDivisionError):
                passes(raises)
            y = x.exp()
            with torch.no_grad():
                y.add_(1.0)
            with pytest.raises(RuntimeError, match="inplace"):
                y.sum().backward()
            assert passes() == 1
            assert passes(passes) == 2
            assert passes(lambda: passes(passes)) == 3
            assert passes() == 1
            in_thread()
            amanda.new_iteration()
    rows = [tool.log.numbers[at : at + 4] for at in range(0, len(tool.log.numbers), 4)]
    assert tool.timer.nanoseconds == sum(end - start for _, start, end, _ in rows)
    assert all(start <= end for _, start, end, _ in rows)


@needs_gate
@pytest.mark.usefixtures("gated")
def test_a_routine_runs_without_a_mode() -> None:
    """An operator that a tool acts on runs by the way that is known, and no mode is asked."""
    x, tool, runs = torch.ones(2, 2), Counter(), []
    with applied(tool):
        for _ in range(3):
            runs.append(profiled(lambda: torch.exp(x + 1.0).add(x))[1])
            amanda.new_iteration()
    assert runs[0].count("__torch_function__") == 3
    assert runs[-1].count("__torch_function__") == 0
    assert tool.ops == {"add": 6, "exp": 3}


class Around(amanda.Tool):
    """Routines around every operator, which note what they are given, and in what state."""

    def __init__(self, *, backward: bool = True) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.add_inst_for_op(self.forward)
        if backward:
            self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(self.note, where=op_id)
        context.insert_before_op(self.touch, inputs=[])
        if context.get_inputs():
            context.insert_before_op(self.note, inputs=[-1], where="last")
        context.insert_after_op(self.note, where="after")

    def backward(self, context: amanda.OpContext) -> None:
        pass

    def note(self, *tensors: Any, where: str) -> None:
        shapes = [None if tensor is None else (*tensor.shape,) for tensor in tensors]
        self.seen.append((where, shapes, torch.is_grad_enabled(), STATE.paused))

    def touch(self) -> None:
        # Operators of a tool are none of the program's.
        self.seen.append(float(torch.ones(2).sum()))


@needs_gate
@pytest.mark.parametrize("name", PROGRAMS)
def test_routines_in_python_see_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routines that the gate calls from C are given what those of the mode are, in the same order,
    as code of a tool without gradients; and no result changes."""
    vanilla = steps(PROGRAMS[name]())
    seen = {}
    for interceptor in BOTH:
        tool = Around()
        program = PROGRAMS[name]()
        with intercepted(monkeypatch, interceptor, tool):
            assert steps(program) == vanilla
        seen[interceptor] = tool.seen
    assert seen["gate"] == seen["mode"]
    assert seen["gate"] or name == "ignored"


@needs_gate
@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
def test_routines_in_python_run_no_python_of_ours(training: bool) -> None:
    """Between the gate and a routine there is no function of ours, whatever the routine takes."""
    tool = Around(backward=False)
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    def forward_pass() -> torch.Tensor:
        # One output and several, an absent tensor, a list, a keyword, and a view.
        one, two = nn.functional.linear((x * 2.0).expand(2, 2), w).chunk(2)
        return torch.cat([one, two[:1]]).sum(dim=0) + torch.add(x, one, alpha=2).relu()

    with torch.set_grad_enabled(training), applied(tool):
        for _ in range(5):
            tool.seen.clear()
            z, run = profiled(forward_pass)
            if training:
                z.sum().backward()
            amanda.new_iteration()
    assert len(run) == 0, f"\n{run}"
    assert len(tool.seen) > 4 * 9


class Returning(amanda.Tool):
    """Two routines before and after each operator; what one of them does is to be said."""

    def __init__(self, act: Callable[..., Any], at: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.act, self.at = act, at
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ != "mul":
            return
        for place, insert in (
            ("before", context.insert_before_op),
            ("after", context.insert_after_op),
        ):
            for number in range(2):
                acts = f"{place} {number}" == self.at
                insert(self.run, place=f"{place} {number}", acts=acts)

    def run(self, *tensors: Any, place: str, acts: bool) -> Any:
        self.seen.append(place)
        return self.act(*tensors) if acts else None


def _too_many(*tensors: Any) -> Any:
    return (*tensors, *tensors)


def _fails(*tensors: Any) -> Any:
    raise TypeError("the routine's own")


def _writes(*tensors: Any) -> None:
    tensors[0].detach().add_(0)


ACTS: dict[str, Callable[..., Any]] = {
    "the same": lambda *tensors: tensors,
    "another": lambda *tensors: [tensors[0] * 2, *tensors[1:]],
    "nothing": lambda *tensors: None,
    "an empty list": lambda *tensors: [],
    "too many": _too_many,
    "an error": _fails,
    "a write": _writes,
}


@needs_gate
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("at", ["before 0", "before 1", "after 0", "after 1"])
@pytest.mark.parametrize("name", ACTS)
def test_what_routines_do_means_the_same(
    name: str, at: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a routine returns, raises or writes to has the effect that it has without the gate."""
    found = {}
    for interceptor in BOTH:
        tool = Returning(ACTS[name], at)
        found[interceptor] = [], tool.seen
        w = torch.full((2,), 3.0, requires_grad=training)
        catching = warnings.catch_warnings(record=True)
        with intercepted(monkeypatch, interceptor, tool), catching as told:
            warnings.simplefilter("always")
            for _ in range(4):
                try:
                    z = (torch.full((2,), 2.0) * w).sum()
                    if training:
                        z.backward()
                    outcome: Any = z.item(), w.grad if w.grad is None else w.grad.tolist()
                except Exception as error:
                    outcome = type(error), str(error), getattr(error, "__notes__", ()), STATE.paused
                found[interceptor][0].append((outcome, torch.is_grad_enabled()))
                amanda.new_iteration()
        found[interceptor][0].append([(one.category, str(one.message)) for one in told])
    assert found["gate"] == found["mode"]


@needs_gate
@pytest.mark.usefixtures("gated")
def test_a_warning_of_a_change_names_the_line() -> None:
    """Where a routine changes a tensor in place, the warning names a line of the program."""
    x, files = torch.ones(2), []
    with applied(Returning(_writes, "before 0")):
        for _ in range(4):
            with pytest.warns(InPlaceWarning, match="changed a tensor of op /mul:0") as told:
                _ = x * 2.0
            files.append([one.filename for one in told])
            amanda.new_iteration()
    assert files[-1] == [__file__]


@needs_gate
@pytest.mark.usefixtures("gated")
def test_routines_of_threads_take_turns() -> None:
    """No two threads run routines at once, though the gate calls them."""
    inside, most, tool = [0], [0], Returning(lambda *_: None, "before 0")

    def act(*_: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0005)
        inside[0] -= 1

    tool.act = act

    def compute() -> None:
        x = torch.ones(2)
        with applied(tool):
            for _ in range(20):
                _ = x * 2.0
                amanda.new_iteration()

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert tool.seen.count("after 1") == 60


@needs_gate
@pytest.mark.usefixtures("gated")
def test_routines_in_python_keep_no_tensor() -> None:
    """What a routine was given lives no longer than the program has it."""
    tool = Around()
    with torch.no_grad(), applied(tool):
        for _ in range(5):
            live = LiveTensors()
            torch.stack([torch.ones(2), torch.ones(2)]).chunk(2)
            assert live.made_since() == []
            amanda.new_iteration()


class Inlined(amanda.Tool):
    """A counter, a timer and a change of memory around every forward and backward operator."""

    def __init__(
        self,
        log: amanda.inline.Log | None = None,
        used: Callable[[], int] | None = None,
        reads_memory: bool = True,
    ) -> None:
        super().__init__()
        self.reads_memory = reads_memory
        self.counter, self.timer = amanda.inline.Counter(), amanda.inline.Timer(log)
        self.change = amanda.inline.MemoryChange(amanda.inline.MemoryUse(used))
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        if self.reads_memory:
            context.insert_before_op(self.change.before, inputs=[])
        context.insert_before_op(self.timer.start, inputs=[])
        context.insert_after_op(self.timer.stop, outputs=[])
        if self.reads_memory:
            context.insert_after_op(self.change.after, outputs=[])
        context.insert_after_op(self.counter, outputs=[])

    def backward(self, context: amanda.OpContext) -> None:
        if self.reads_memory:
            context.insert_before_backward_op(self.change.before, grad_outputs=[])
        context.insert_before_backward_op(self.timer.start, grad_outputs=[])
        context.insert_after_backward_op(self.timer.stop, grad_inputs=[])
        if self.reads_memory:
            context.insert_after_backward_op(self.change.after, grad_inputs=[])
        context.insert_after_backward_op(self.counter, grad_inputs=[])


@needs_gate
@pytest.mark.usefixtures("gated")
def test_inlined_routines_run_no_python_of_ours() -> None:
    """Counters and timers run in C++, forward and backward, also of operators that use leaves, that
    have several nodes, and that have several outputs."""
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    tool = Inlined(reads_memory=False)

    def forward_pass() -> torch.Tensor:
        one, two = nn.functional.linear((x * 2.0).expand(2, 2), w, x).chunk(2)
        return (one * x + two.exp()).sum()

    def step() -> list[Any]:
        z, forward = profiled(forward_pass)
        _, backward = profiled(z.backward)
        with torch.no_grad():
            _, without = profiled(lambda: (x.exp() + 1.0).sin())
        return [forward, backward, without]

    with applied(tool):
        for _ in range(5):
            runs = step()
            amanda.new_iteration()
    forward, backward, without = runs
    assert (len(forward), len(without)) == (0, 0), f"\n{forward}\n{without}"
    ours = ("before", "after", "note_reached", "_before", "_after", "count", "start", "stop")
    assert not any(backward.count(name) for name in ours), f"\n{backward}"
    assert tool.timer.executions == tool.counter.count


@needs_gate
@pytest.mark.parametrize("interceptor", BOTH)
def test_accumulations_of_operators_that_are_known(
    interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accumulation of a leaf belongs to the first operator that used the leaf, and runs its
    routines once in each pass that comes through an operator of the scope, and in no other."""
    w, model, tool = torch.ones(3, 3, requires_grad=True), nn.Linear(3, 3), CountsAccumulations()
    counts = []
    with intercepted(monkeypatch, interceptor, tool):
        for _ in range(5):
            before = tool.counter.count
            h = nn.functional.linear(w.mul(2.0), w) + model(w)
            with amanda.disabled():
                other = w.sum() + model(w).sum()
            other.backward()
            between = tool.counter.count
            h.sum().backward(retain_graph=True)
            once = tool.counter.count
            (h * w).sum().backward()
            counts.append((between - before, once - between, tool.counter.count - once))
            amanda.new_iteration()
    # w, and the weight and the bias of the layer.
    assert counts == [(0, 3, 3)] * 5


class CountsAccumulations(amanda.Tool):
    """A counter after every accumulation of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = amanda.inline.Counter()
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_after_backward_op(self.counter, grad_inputs=[])


@needs_gate
@pytest.mark.parametrize("name", ["model, training", "model, eval", "gradients", "subclasses"])
def test_inlined_routines_mean_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters and timers run, and the memory of a device is read, as often by the gate as by the
    mode, also where modules have several operators of many nodes, and results and gradients stay
    the same bits."""
    vanilla = steps(PROGRAMS[name]())
    counts = {}
    for interceptor in BOTH:
        program, log = PROGRAMS[name](), amanda.inline.Log()
        tool = Inlined(log, itertools.count(10, 10).__next__)
        with intercepted(monkeypatch, interceptor, tool):
            assert steps(program) == vanilla
        counts[interceptor] = tool.counter.count, tool.timer.executions, len(log.numbers)
        counts[interceptor] += tool.change.bytes, tool.change.use.peak
    assert counts["gate"] == counts["mode"]
    assert counts["gate"][0] > 0


class Measured(amanda.Tool):
    """One routine of amanda.inline at every forward operator, and nothing else."""

    def __init__(self, times: bool) -> None:
        super().__init__()
        self._times = times
        self._routines: dict[str, Any] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        made = amanda.inline.Timer() if self._times else amanda.inline.Counter()
        routine = self._routines.setdefault(context.get_op_id(), made)
        if isinstance(routine, amanda.inline.Timer):
            context.insert_before_op(routine.start, inputs=[])
            context.insert_after_op(routine.stop, outputs=[])
        else:
            context.insert_after_op(routine, outputs=[])

    def executions(self) -> dict[str, int]:
        kind = "executions" if self._times else "count"
        return {op_id: getattr(routine, kind) for op_id, routine in self._routines.items()}


@needs_gate
@pytest.mark.parametrize("times", [True, False], ids=["timer", "counter"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_single_measures_mean_the_same(
    name: str, times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a counter or a timer is all that an operator has, each operator is measured as often by
    the gate as by the mode, also in calls of a new form, in properties, and where PyTorch refuses
    the arguments."""
    vanilla = steps(PROGRAMS[name]())
    found = {}
    for interceptor in BOTH:
        program, tool = PROGRAMS[name](), Measured(times)
        with intercepted(monkeypatch, interceptor, tool):
            assert steps(program) == vanilla
        found[interceptor] = tool.executions()
    assert found["gate"] == found["mode"]


@needs_gate
@pytest.mark.usefixtures("gated")
def test_counts_and_times_grow_beyond_small_numbers() -> None:
    """A counter counts on, and a timer adds up, beyond the numbers that Python or C keeps ready; a
    number that the program has read stays what it was."""
    counter, timer = amanda.inline.Counter(250), amanda.inline.Timer(amanda.inline.Log())
    tool, x = amanda.Tool(), torch.ones(2)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "exp":
            context.insert_after_op(counter, outputs=[])
        elif context.get_op().__name__ == "sin":
            context.insert_before_op(timer.start, inputs=[])
            context.insert_after_op(timer.stop, outputs=[])

    tool.add_inst_for_op(analyse)
    read = []
    with applied(tool):
        for i in range(3000):
            x.exp(), x.sin()
            if i == 1500:
                timer.nanoseconds += 1 << 30
            elif i == 2000:
                timer.nanoseconds += 1 << 60
            read.append((counter.count, timer.nanoseconds))
            amanda.new_iteration()
    assert [count for count, _ in read] == list(range(251, 3251))
    numbers = timer.log.numbers if timer.log is not None else []
    spans = [numbers[i + 2] - numbers[i + 1] for i in range(0, len(numbers), 4)]
    sums = itertools.accumulate(spans)
    added = [0] * 1500 + [1 << 30] * 500 + [(1 << 30) + (1 << 60)] * 1000
    assert [time for _, time in read] == [a + b for a, b in zip(sums, added, strict=True)]


class Checks(amanda.Tool):
    """A check around every forward and backward operator.

    Attributes:
        found: ids of the operators with outputs that are not finite, the shapes of their inputs
            and outputs, and whether the inputs were finite, in the order of the executions.
        trail: ids of all operators, likewise.
        asked: kinds of tensors that Python was asked about.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.trail: collections.deque[str] = collections.deque()
        self.asked: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def check(self, op_id: str) -> amanda.inline.Check:
        def found(inputs: Any, outputs: Any, was_finite: bool) -> None:
            shapes = [t if t is None else list(t.shape) for t in (*inputs, None, *outputs)]
            self.found.append((op_id, shapes, was_finite))

        return amanda.inline.Check(
            self.is_finite, found, overwrites=None, trail=self.trail, name=op_id
        )

    def is_finite(self, tensor: torch.Tensor) -> bool:
        self.asked.append(f"{tensor.layout} {tensor.dtype} {tensor.device}")
        try:
            return bool(torch.isfinite(tensor).all())
        except (RuntimeError, TypeError):
            return True

    def forward(self, context: amanda.OpContext) -> None:
        check = self.check(context.get_op_id())
        context.insert_before_op(check.before)
        context.insert_after_op(check.after)

    def backward(self, context: amanda.OpContext) -> None:
        check = self.check(str(context.get_backward_op_id()))
        context.insert_before_backward_op(check.before)
        context.insert_after_backward_op(check.after)


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


PROGRAMS_WITH_NAN = PROGRAMS | {"broken": lambda: _broken}


@needs_gate
@pytest.mark.parametrize("name", PROGRAMS_WITH_NAN)
def test_checks_mean_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check finds by the gate what it finds by the mode, in the same order and with the same
    inputs and outputs; results, gradients and random numbers stay the same bits."""
    program, done = PROGRAMS_WITH_NAN[name], {}
    vanilla = steps(program())
    for interceptor in BOTH:
        tool, run = Checks(), program()
        with intercepted(monkeypatch, interceptor, tool):
            assert str(steps(run)) == str(vanilla)
        done[interceptor] = tool.found, list(tool.trail)
    assert done["gate"] == done["mode"]
    assert done["gate"][1] or name == "ignored"
    assert done["gate"][0] or name != "broken"


@needs_gate
@pytest.mark.usefixtures("gated")
def test_checks_run_no_python_of_ours() -> None:
    """Checks of finite tensors run in C, forward and backward, also of operators that write into
    their inputs, and Python is asked about no tensor."""
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    tool = Checks()

    def forward_pass() -> torch.Tensor:
        one, two = nn.functional.linear((x * 2.0).expand(2, 2), w, x).chunk(2)
        return (one * x + two.exp()).add_(1.0).sum()

    def step() -> Any:
        z, forward = profiled(forward_pass)
        return forward, profiled(z.backward)[1]

    with applied(tool):
        for _ in range(5):
            tool.asked.clear()
            tool.trail.clear()
            forward, backward = step()
            amanda.new_iteration()
    assert len(forward) == 0, f"\n{forward}"
    ours = ("before", "after", "_before", "_after", "_are_finite", "supply", "checked")
    assert not any(backward.count(name) for name in ours), f"\n{backward}"
    assert tool.asked == tool.found == []
    assert len(tool.trail) > 15


UNKNOWN: dict[str, Callable[[], torch.Tensor]] = {
    "an infinity": lambda: torch.tensor([1.0, float("inf")]),
    "a sum that overflows": lambda: torch.full((100,), 60000.0).half(),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: (torch.eye(2) * math.inf).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(2, device="meta"),
    "a subclass": lambda: torch.ones(2).as_subclass(Doubled),
}


@needs_gate
@pytest.mark.filterwarnings("ignore:.*(quantiz|[Ss]parse)")
@pytest.mark.parametrize("name", UNKNOWN)
def test_tensors_that_checks_leave_to_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What C does not find finite, and kinds of tensors that it does not know, Python decides on at
    each execution, as it does without the gate."""
    asked = {}
    for interceptor in BOTH:
        x, tool, counts = UNKNOWN[name](), Checks(), []
        with intercepted(monkeypatch, interceptor, tool):
            for _ in range(4):
                tool.asked.clear()
                x.clone()
                counts.append(list(tool.asked))
                amanda.new_iteration()
        asked[interceptor] = counts[1:], tool.found
    assert asked["gate"][0] == asked["mode"][0] == [asked["mode"][0][0]] * 3
    assert asked["gate"] == asked["mode"]
    assert asked["gate"][0][0]


class Noting(TorchDispatchMode):
    """A mode of the program's that notes what runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@needs_gate
@pytest.mark.usefixtures("gated")
def test_checks_are_not_seen() -> None:
    """What a check computes is not an operator: neither tools nor modes of the program see it; it
    records no gradient, makes no node, and gradients are recorded as before."""
    x, tool, ids = torch.ones(2, requires_grad=True), Checks(), Ids(acts=True)
    with applied(tool), applied(ids):
        for _ in range(4):
            ids.ids.clear()
            before = _internals.sequence_number()
            y = x * 2.0 + x
            nodes = _internals.sequence_number() - before
            assert torch.is_grad_enabled()
            with torch.no_grad():
                x.exp()
                assert not torch.is_grad_enabled()
            with torch.inference_mode():
                assert (x * 2.0).is_inference()
            amanda.new_iteration()
        with Noting() as mode:
            x * 2.0 + x
    assert nodes == 2
    assert y.requires_grad
    names = [op_id.partition(":")[0] for op_id in ids.ids]
    assert names == ["/mul", "/add", "/exp", "/mul", "/mul", "/add"]
    # There Python looks at the tensors.
    assert not [name for name in mode.ran if "sum" in name]


@needs_gate
@pytest.mark.usefixtures("gated")
def test_checks_keep_no_tensor() -> None:
    """Inputs, outputs and gradients die when the program drops them, also where Python is asked."""
    tool, references = Checks(), []
    with applied(tool):
        for start in (1.0, 1.0, 1.0, 0.0):
            x = torch.full((3,), start, requires_grad=True)
            y = x.mul(1.0)
            z = torch.log(y).sum()
            z.backward()
            references += [weakref.ref(t) for t in (x, y, z)]
            del x, y, z
            amanda.new_iteration()
        assert [found for found, _, _ in tool.found]
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


@needs_gate
@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_a_check_raises_reaches_the_program(error: type[Exception]) -> None:
    """An exception of the function that a check calls, forward and backward, leaves modes, gradient
    mode and the next executions as they are; a TypeError keeps its text where an operator such as
    `a / b` would hide it."""
    raised = []

    class Raising(Checks):
        def check(self, op_id: str) -> amanda.inline.Check:
            def fail(*_: Any) -> None:
                raised.append(op_id)
                raise error(op_id)

            return amanda.inline.Check(self.is_finite, fail, trail=self.trail, name=op_id)

    x = torch.zeros(2, requires_grad=True)
    with applied(Raising()):
        for _ in range(4):
            with pytest.raises((error, ToolTypeError), match="/div:0"):
                torch.ones(2) / torch.zeros(2)
            with pytest.raises(error, match="sqrt"):
                torch.sqrt(x).sum().backward()
            assert torch.is_grad_enabled()
            amanda.new_iteration()
    assert len(raised) == 8


@needs_gate
@pytest.mark.usefixtures("gated")
def test_checks_in_threads() -> None:
    """Threads that run one model under checks find what is theirs, and no more."""
    model, tool, count = nn.Linear(2, 2), Checks(), 40
    found: list[list[bool]] = []

    def work(value: float) -> None:
        x = torch.full((1, 2), value)
        found.append([bool(torch.isfinite(model(x).sum())) for _ in range(count)])
        model(x).sum().backward()

    with applied(tool), torch.no_grad():
        threads = [threading.Thread(target=work, args=(v,)) for v in (1.0, math.inf, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(any, found)) == [False, True, True]
    linear = [one for one in tool.found if one[0].endswith("linear:0")]
    assert len(linear) == count + 1


class Sums(amanda.Tool):
    """A sum around every forward and backward operator.

    Attributes:
        sums: by id of the operator.
        asked: ids of the operators of which a number was asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, amanda.inline.ShapeSum] = {}
        self.total = amanda.inline.Counter()
        self.asked: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def sum(self, op_id: str, of: str | None = None) -> amanda.inline.ShapeSum:
        forward = self.sums.get(of) if of else None

        def weigh(shapes: Any) -> int | None:
            self.asked.append(op_id)
            last = forward.last if forward is not None else ()
            found = str((plain_shapes(shapes), plain_shapes(last)))
            return None if "9" in found else sum(map(ord, found))

        made = amanda.inline.ShapeSum(weigh, self.total, of=forward)
        return self.sums.setdefault(op_id, made)

    def forward(self, context: amanda.OpContext) -> None:
        one = self.sum(context.get_op_id())
        context.insert_before_op(one.before)
        context.insert_after_op(one.after)

    def backward(self, context: amanda.OpContext) -> None:
        one = self.sum(str(context.get_backward_op_id()), context.get_op_id())
        context.insert_before_backward_op(one.before)
        context.insert_after_backward_op(one.after)

    def figures(self) -> Any:
        rows = {
            op_id: (one.executions, one.amount, one.unknown, plain_shapes(one.last))
            for op_id, one in self.sums.items()
        }
        return rows, self.total.count


def plain_shapes(value: Any) -> Any:
    """Shapes as plain numbers."""
    return [plain_shapes(one) for one in value] if isinstance(value, (tuple, list)) else value


def _of_many_shapes(x: torch.Tensor) -> Any:
    """Modules and operators whose tensors have other shapes each time, and lists of tensors."""
    net, results = Net(), []
    for rows in (2, 3, 9, 2, 3, 1, 9):
        y = x.repeat(5, 1)[:rows].clone().requires_grad_()
        z = torch.cat([net.first(y), torch.ones(rows, 4)], dim=0).split(rows)[0]
        z.mul(other=y.sum()).sum().backward()
        results.append(y.grad)
        with torch.no_grad():
            checkpoint(net.layers[0], z.detach(), use_reentrant=False)
    return results


PROGRAMS_OF_SHAPES = PROGRAMS | {"many shapes": lambda: _of_many_shapes}


@needs_gate
@pytest.mark.parametrize("name", PROGRAMS_OF_SHAPES)
def test_sums_mean_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum adds up by the gate what it adds up by the mode, whatever shapes come after each
    other, and results and gradients stay the same bits."""
    program, figures = PROGRAMS_OF_SHAPES[name], {}
    vanilla = steps(program())
    for interceptor in BOTH:
        tool, run = Sums(), program()
        with intercepted(monkeypatch, interceptor, tool):
            assert steps(run) == vanilla
        figures[interceptor] = tool.figures()
    assert figures["gate"] == figures["mode"]
    assert figures["gate"][0] or name == "ignored"


def _loss(y: torch.Tensor) -> torch.Tensor:
    parts = [y[0].mean(dim=0), (y * 2.0).sum(), torch.ones(()) + y.mean()]
    return torch.stack(parts).sum()


@needs_gate
@pytest.mark.usefixtures("gated")
def test_the_operators_of_a_loss_run_no_python_of_ours() -> None:
    """Those outside of modules that take a recorded tensor, also in a list, are forward ones, which
    C tells as Python does; without gradients Python is asked."""
    model, x = nn.Sequential(nn.Linear(2, 3), nn.GELU()), torch.ones(4, 2)
    with applied(Watcher()):
        for _ in range(4):
            y = model(x)
            made, run = profiled(lambda: torch.ones(()))  # of no module, and of no loss
            loss, computed = profiled(lambda y=y: _loss(y))
            loss.backward()
        with torch.no_grad():
            _, asked = profiled(lambda: _loss(model(x)))
    assert run.count("_run_outside") == 1
    # The ones in it are such, too.
    assert computed.count("_run_outside") == computed.count("__torch_function__") == 1
    assert asked.count("_run_outside") > 6
    assert made.item() == 1


def _losses_and_metrics() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.GELU()), torch.ones(4, 2)
    for step in range(4):
        y = model(x * (x * 2.0).mean())
        loss = (y * 2.0).mean() + sum((p * p).mean() for p in model.parameters())
        metric = (y.detach() * 2.0).mean()
        with torch.no_grad():
            metric = metric + (y * 2.0).mean() * step
        (loss * 2.0).backward()
        (metric * 2.0).mean()


@needs_gate
def test_what_is_told_of_a_loss_holds_for_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of one name are those of a loss, of metrics, of parameters and of data, in turns,
    with the ids of the mode."""
    found = []
    for interceptor in BOTH:
        with intercepted(monkeypatch, interceptor, tool := Counter()):
            _losses_and_metrics()
        found.append(tool.ids)
    assert found[0] == found[1]
    assert collections.Counter(found[0])["/mul:0"] >= 4
    assert any(op_id.startswith("/other/") for op_id in found[0])


@needs_gate
@pytest.mark.usefixtures("gated")
def test_sums_run_no_python_of_ours() -> None:
    """An operator whose shapes have been met is added in C, forward and backward, also where two
    kinds of shapes take turns."""
    model, tool = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2)), Sums()
    inputs = [torch.ones(rows, 2) for rows in (1, 4)]

    def step(x: torch.Tensor) -> Any:
        y, forward = profiled(lambda: model(x))
        return forward, profiled(y.sum().backward)[1]

    with applied(tool):
        for _ in range(4):
            tool.asked.clear()
            pairs = [step(x) for x in inputs]
    for forward, backward in pairs:
        assert not forward.count("run_around"), f"\n{forward}"
        assert not backward.count("_add"), f"\n{backward}"
    # The loss is outside of modules.
    assert {op_id for op_id in tool.asked if not op_id.startswith("/")} == set()
    assert {one.executions for op_id, one in tool.sums.items() if op_id.startswith("S")} == {8}


@needs_gate
@pytest.mark.usefixtures("gated")
def test_sums_keep_no_tensor() -> None:
    """What a sum knows of executions are shapes."""
    tool, references = Sums(), []
    with applied(tool):
        for rows in (2, 2, 3, 3):
            x = torch.ones(rows, requires_grad=True)
            y = x.mul(x).sum()
            y.backward()
            references += [weakref.ref(t) for t in (x, y)]
            del x, y
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


@needs_gate
@pytest.mark.usefixtures("gated")
def test_a_form_that_changes_is_noticed() -> None:
    """An operator of many nodes whose gradient graph takes another form has its own backward
    operators each time, and a leaf that is new is found."""
    cell, x = nn.LSTMCell(3, 3), torch.ones(2, 3)
    seen: list[int] = []
    tool = Inlined()
    with applied(tool):
        for needs_x, needs_h in ((False, False), (False, True), (True, False), (True, True)) * 3:
            one = x.clone().requires_grad_(needs_x)
            h = torch.ones(2, 3, requires_grad=needs_h)
            before = tool.counter.count
            cell(one, (h, torch.ones(2, 3)))[0].sum().backward()
            seen.append(tool.counter.count - before)
            assert (one.grad is not None) == needs_x
    assert seen[:4] == seen[4:8] == seen[8:]
    assert seen[1] > seen[0] < seen[2] < seen[3]


@needs_gate
@pytest.mark.usefixtures("gated")
def test_hooks_of_the_program_stay_its_own() -> None:
    """A hook that the program registers on a node that ours are on can be removed by its handle,
    before and after ours were registered."""
    x, called = torch.ones(2, requires_grad=True), []
    with applied(Inlined()):
        for _ in range(3):
            y = (x * 2.0).exp()
            node = y.grad_fn
            handles = [
                node.register_prehook(lambda g: called.append("before")),
                node.register_hook(lambda i, o: called.append("after")),
                node.register_hook(lambda i, o: called.append("removed")),
            ]
            handles[2].remove()
            y.sum().backward()
            amanda.new_iteration()
    assert called == ["before", "after"] * 3


# -- everything is seen, and nothing is left ----------------------------------------


@needs_gate
def test_every_builtin_operator_is_noticed() -> None:
    """Each builtin that PyTorch lets be overridden, and that is an operator, is noticed."""
    owned = {id(builtin) for _, builtin, _, _, _ in extension.load().sites()}
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


@needs_gate
@pytest.mark.usefixtures("gated")
def test_nothing_is_left() -> None:
    """After a scope all that was replaced is as it was, also after an exception, and no function
    has another identity or hash within it."""
    functions = [torch.add, torch.nn.functional.linear, *_internals.MODE_BUILTINS]
    functions += [builtin for _, builtin, _, _, _ in extension.load().sites() if callable(builtin)]
    table, hashes = dict.fromkeys(functions), list(map(hash, functions))
    before = [row[:4] for row in extension.load().sites()]
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
        assert [row[:4] for row in extension.load().sites()] == before
        assert {name: vars(torch.Tensor)[name] for name in vars(torch.Tensor)} == attributes
        assert torch.ones(2).as_subclass(made)[0] == 1.0
        gc.collect()
    now = [sys.getrefcount(f) for f in (torch.add, torch.Tensor.add, nn.Module.__call__)]
    # What PyTorch reports for a builtin is kept from the first report on.
    assert all(b - a <= 1 for a, b in zip(counts, now, strict=True))


@needs_gate
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


@needs_gate
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


@needs_gate
@pytest.mark.usefixtures("gated")
def test_routines_return_what_they_got() -> None:
    """Routines at all points that return their arguments change no bit, of gradients neither."""
    results = []
    for tool in (None, Identity()):
        net, x = Net(), torch.arange(1.0, 5.0).reshape(2, 2)
        with applied(tool) if tool else contextlib.nullcontext():
            for _ in range(3):
                loss = net(x)
                loss.backward()
        results.append([loss.item(), *(p.grad.tolist() for p in net.parameters())])
    assert results[0] == results[1]


# -- whether it is used -------------------------------------------------------------


def test_untested_versions_of_pytorch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is not used with a PyTorch that it was not tested with, and the reason is given."""
    with monkeypatch.context() as patched:
        patched.setattr("torch.__version__", "2.99.0")
        found = extension.refusal()
    assert found == "amanda-torch-accel was not tested with PyTorch 2.99.0"


@pytest.mark.parametrize("asked", ["auto", "mode", "gate"])
def test_without_it_the_mode_is_used(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gate cannot be used the mode is; it is a warning if the gate was asked for."""
    monkeypatch.setattr(gate, "reason_unusable", lambda: "for a test")
    monkeypatch.setenv(VARIABLE, asked)
    tool = Counter()
    warns = pytest.warns(CoverageWarning, match="gate, which cannot be used \\(for a test\\)")
    with warns if asked == "gate" else contextlib.nullcontext(), applied(tool):
        torch.ones(2).exp()
        assert type(_internals.mode_at(0)) is Interceptor
    assert tool.ops == {"ones": 1, "exp": 1}


def test_an_unknown_interceptor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names one of three; another word counts as auto, and is a warning."""
    monkeypatch.setenv(VARIABLE, "gat")
    with pytest.warns(CoverageWarning, match="'gat', not one of auto, gate, mode"):
        gate.choose()


def test_doctor_says_which_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of checks names the interceptor, and the reason where it is the mode."""
    driver = TorchEagerDriver.loaded()
    monkeypatch.setattr(gate, "reason_unusable", lambda: "for a test")
    assert driver.remarks() == ["operators are noticed by a TorchFunctionMode (for a test)"]
    monkeypatch.setattr(gate, "reason_unusable", lambda: "")
    monkeypatch.setenv(VARIABLE, "gate")
    assert driver.remarks() == ["operators are noticed by the gate, in C++"]


@needs_gate
def test_the_gate_is_used_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gate works it notices the operators, unless another interceptor is asked for."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, is_used in (("", True), ("auto", True), ("gate", True), ("mode", False)):
        if name:
            monkeypatch.setenv(VARIABLE, name)
        with applied(Counter()):
            assert extension.load().is_installed() == is_used


def test_the_package_needs_no_extension() -> None:
    """amanda-torch works where amanda-torch-accel is not installed."""
    code = (
        "import sys; sys.modules['amanda_torch_accel'] = None\n"
        "import torch, amanda\n"
        "from amanda_torch.eager import gate\n"
        "tool = amanda.Tool(); seen = []\n"
        "tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))\n"
        "with amanda.apply(tool): torch.ones(2).exp()\n"
        "print(seen, gate.reason_unusable())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("['/setup/ones:0', '/exp:0'] amanda-torch-accel is not installed")


@needs_gate
@pytest.mark.usefixtures("gated")
def test_other_threads_compile_without_breaks() -> None:
    """A model that a thread outside of the scope compiles is one graph: Dynamo sees through what
    takes the place of a module's call."""
    model, done = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    ready, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        done.append(compiled(torch.ones(1, 2)).shape)
        ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    with applied(Watcher()):
        begun.set()
        ready.wait(60)
    thread.join()
    assert done == [(1, 2)]


def test_the_command_line_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """``amanda run --interceptor`` sets the variable of the drivers that know the name."""
    monkeypatch.setenv(VARIABLE, "auto")
    choose_interceptor("mode")
    assert os.environ[VARIABLE] == "mode"
    choose_interceptor("")
    assert os.environ[VARIABLE] == "mode"


# -- accumulations of leaves that outlive a step --------------------------------


def kept(model: nn.Module, steps: int, each: Callable[[torch.Tensor], None] | None = None) -> None:
    """Train as most loops do: the graph of each step is alive until the next one has been made."""
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if each is not None:
            each(loss)
        loss.backward()


@needs_gate
def test_a_loop_that_keeps_its_loss_costs_no_more(gated: None) -> None:
    """Accumulations that live on after the first step, in which analyses were pending, are given to
    the gate: no function of ours runs for them later."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    def kept_step() -> None:
        nonlocal loss
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()

    runs = []
    loss = None
    for one in (step, kept_step):
        with applied(amanda.tools.load("count")()):
            for _ in range(6):
                one()
            runs.append(profiled(one)[1])
    assert len(runs[1]) <= len(runs[0]), f"\n{runs[1]}"


@pytest.mark.parametrize("name", BOTH)
def test_accumulations_that_live_on_act_once_in_each_step(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where the gate takes them over, a routine at them runs once for each step."""
    if name == "gate" and gate.reason_unusable():
        pytest.skip(gate.reason_unusable())
    model, tool = nn.Linear(4, 4), amanda.Tool()
    ran: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(doubled, name=context.get_backward_op_id())

    def doubled(gradient: torch.Tensor, name: str) -> torch.Tensor:
        ran.append(name)
        return gradient * 2

    tool.add_inst_for_op(analyse, backward=True)
    kept(model, 1)
    vanilla = [parameter.grad.clone() for parameter in model.parameters()]
    with intercepted(monkeypatch, name, tool):
        for _ in range(2):
            kept(model, 5)
        assert set(collections.Counter(ran).values()) == {10}
        for parameter, gradient in zip(model.parameters(), vanilla, strict=True):
            assert torch.equal(parameter.grad, gradient * 2)
    kept(model, 2)
    assert len(ran) == 20
    for parameter, gradient in zip(model.parameters(), vanilla, strict=True):
        assert torch.equal(parameter.grad, gradient)


@needs_gate
def test_hooks_of_the_program_keep_their_place_at_an_accumulation(gated: None) -> None:
    """An accumulation that has hooks of the program beside ours is left to Python, so that all run
    in the order in which they were registered."""
    model, tool = nn.Linear(4, 4, bias=False), amanda.Tool()
    order: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(lambda gradient: order.append("tool"))

    tool.add_inst_for_op(analyse, backward=True)
    handles: list[Any] = []

    def hook(loss: torch.Tensor) -> None:
        if not handles:
            node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
            handles.append(node.register_prehook(lambda *_: order.append("program")))

    with applied(tool):
        kept(model, 4, hook)
    assert order == ["tool", "program"] * 4
    handles[0].remove()


@needs_gate
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux")
def test_the_self_test_starts_no_thread() -> None:
    """A program that forks after a scope has no more threads than it had."""
    code = (
        "import os, torch, amanda\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "with amanda.apply(amanda.Tool()):\n    pass\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    environment = {**os.environ, VARIABLE: "gate"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0", run.stderr
