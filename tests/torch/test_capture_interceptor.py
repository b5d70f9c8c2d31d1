"""The interceptor ``capture``: modules run as Dynamo captures them, with the mode's results."""

from __future__ import annotations

import array
import copy
import functools
import gc
import itertools
import mmap
import os
import pickle
import random
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame, mark_static_address
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import amanda
from amanda import inline
from amanda.cli.results import last_line
from amanda.errors import InPlaceWarning
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.compiled import direct, modules
from amanda_torch.compiled.binding import Binding
from amanda_torch.compiled.code import GraphCode, NotCapturableError
from amanda_torch.compiled.derived import DerivedGraph
from amanda_torch.compiled.direct import DirectCode
from amanda_torch.compiled.driver import EagerDriver
from amanda_torch.compiled.modules import _CAPTURED, REFUSALS, REFUSALS_ALIKE
from amanda_torch.compiled.modules import CALLS as CALLS_BEFORE
from amanda_torch.eager import gate
from amanda_torch.eager.interceptors import LOCAL
from amanda_torch.plugin import TorchEagerDriver
from tests import models
from tests.benchmarks.watching import Watch
from tests.counting import no_collection
from tests.torch.support import Counter, ForwardCounter, applied, fingerprint, interceptors
from tests.torch.test_call_counts import profiled

VARIABLE = TorchEagerDriver.interceptor_variable
CALLS = 5


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "capture")
    yield
    torch.compiler.reset()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Binding]:
    """The captured runs without an interceptor."""
    runs: list[Binding] = []
    vanilla = Binding.run

    def run(binding: Binding, *args: Any) -> Any:
        runs.append(binding)
        return vanilla(binding, *args)

    monkeypatch.setattr(Binding, "run", run)
    return runs


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each captured run without an interceptor whether routines are written into its code."""
    runs: list[bool] = []
    vanilla = DirectCode.function

    def function(code: DirectCode, inputs: Any) -> Any:
        found = vanilla(code, inputs)
        runs.append(found is not None)
        return found

    monkeypatch.setattr(DirectCode, "function", function)
    return runs


class Net(nn.Module):
    """Linear, batch norm, dropout and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(4)
        self.kind = "sum"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)))
        return getattr(self.norm(x), self.kind)()


class Lambda(nn.Module):
    """Runs a function on a linear layer and its input."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.fc, x)


def call(model: nn.Module, given: Any) -> Any:
    """Call a model with one input, or with keyword arguments."""
    return model(**given) if isinstance(given, Mapping) else model(given)


def train(model: nn.Module, given: Any) -> Any:
    """A training step: the loss and the gradients."""
    model.zero_grad()
    loss = models.loss(call(model, given))
    loss.backward()
    return [loss, *[p.grad for p in model.parameters()]]


def infer(model: nn.Module, given: Any) -> Any:
    """The output, without gradients."""
    with torch.no_grad():
        return [*models.tensors(call(model, given))]


Step = Callable[[nn.Module, Any], Any]


def executed(
    interceptor: str, model: nn.Module, step: Step, inputs: Sequence[Any]
) -> tuple[Any, dict[str, str]]:
    """What a tool meets, and what a copy of a model gives, under an interceptor; how it ran."""
    model, tool = copy.deepcopy(model), Counter()
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, interceptor)
        with applied(tool) as scope:
            results = [fingerprint(step(model, given)) for given in inputs]
    results.append(fingerprint([*model.state_dict().values(), torch.rand(2)]))
    return (tool.ids, tool.backward_ids, results), scope.statistics.modules


def way_of(model: nn.Module, step: Step, inputs: Sequence[Any]) -> str:
    """How the last call of a model ran under ``capture``, with all that it gives under ``mode``."""
    wanted, _ = executed("mode", model, step, inputs)
    found, ways = executed("capture", model, step, inputs)
    assert found == wanted
    return next(iter(ways.values()), "")


def some(*sizes: int) -> list[torch.Tensor]:
    """Inputs of these batches."""
    torch.manual_seed(1)
    return [torch.rand(size, 4) for size in sizes]


X = some(*[3] * CALLS)


# -- what is captured ---------------------------------------------------------


@pytest.fixture
def earned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are earned back in three calls, by modules of three operators."""
    monkeypatch.setattr(modules.RepeatedModules, "iterations_before", 3)
    monkeypatch.setattr(modules.RepeatedModules, "worth", 3)


def run_unasked(model: nn.Module, step: Step = infer, calls: int = 9) -> dict[str, str]:
    """How a model ran under ``auto``, with all that it gives under ``mode``."""
    inputs = some(*[3] * calls)
    wanted, _ = executed("mode", model, step, inputs)
    found, ways = executed("auto", model, step, inputs)
    assert found == wanted
    return ways


@pytest.mark.usefixtures("earned")
@pytest.mark.parametrize("step", [infer, train])
def test_modules_that_are_called_again_and_again_are_captured_without_being_asked_for(
    step: Step, bound: list[Binding]
) -> None:
    """Under ``auto``, when the calls so far have earned the capture back, and two more have run."""
    assert run_unasked(Net(), step, calls=3) == {}
    assert run_unasked(Net(), step) == {"Net": "captured"}
    assert bound


@pytest.mark.usefixtures("earned")
def test_unasked_neither_small_modules_nor_those_within_others_are_captured(
    attempts: list[str],
) -> None:
    """They run as they are, as what cannot be captured does after some attempts."""
    assert run_unasked(Lambda(lambda fc, x: fc(x))) == {}
    assert not attempts
    ways = run_unasked(Lambda(lambda fc, x: fc(x).relu().exp() if x.sum() > 0 else x), calls=20)
    assert set(ways) == {"Lambda"}
    assert ways["Lambda"].startswith("as they are (Dynamo: ")
    assert 0 < len(attempts) <= modules.FAILURES + 1


@pytest.mark.usefixtures("earned")
@pytest.mark.parametrize("name", interceptors("mode", "gate"))
def test_interceptors_that_are_asked_for_capture_nothing(name: str) -> None:
    """Only ``capture``, and ``auto`` in time, capture modules."""
    assert executed(name, Net(), infer, some(*[3] * 9))[1] == {}


@pytest.mark.usefixtures("earned")
def test_a_debugger_sees_all_lines_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured unasked while something looks at the program's lines or calls."""
    lines: list[int] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is Net.forward.__code__ and event == "line":
            lines.append(frame.f_lineno)
        return trace

    model, outer = Net(), sys.gettrace()
    monkeypatch.setenv(VARIABLE, "auto")
    with applied(Counter()) as scope:
        sys.settrace(trace)
        try:
            for x in some(*[3] * 9):
                model(x)
        finally:
            sys.settrace(outer)
    assert scope.statistics.modules == {}
    assert len(lines) == 2 * 9


MODELS = {
    "gpt2": lambda: models.gpt2(layers=1),
    "bert": models.bert,
    "llama": models.llama,
    "resnet18": models.resnet18,
}
QUICK = [("gpt2", True), ("gpt2", False), ("bert", True), ("llama", False), ("resnet18", True)]
ALL = [(name, training) for name in MODELS for training in (False, True)]


@pytest.mark.parametrize(
    ("name", "training"), ALL if os.environ.get("AMANDA_CAPTURE") == "all" else QUICK
)
def test_models_run_captured_with_the_results_and_ids_of_the_mode(
    name: str, training: bool, bound: list[Binding]
) -> None:
    """From its third call on a model runs captured; all bits and ids are those of the mode.

    A part of the models is tried; AMANDA_CAPTURE=all tries them all, in training and in inference.
    """
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train(training)
    assert way_of(model, train if training else infer, [inputs] * CALLS) == "captured"
    assert len(bound) == CALLS - CALLS_BEFORE - 1


class Named(nn.Module):
    """Two linear layers, one of which has a name that is not a name of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.others = nn.ModuleDict({"layer-1": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others["layer-1"](self.first(x).relu())


class Forward:
    """A forward of a module, as a library puts it there."""

    def __init__(self, module: nn.Module) -> None:
        self.keep(module)
        self.run = type(module).forward

    def keep(self, module: nn.Module) -> None:
        """Keep the module."""
        self.module = weakref.ref(module)

    def kept(self) -> nn.Module:
        """The module."""
        return self.module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.kept(), *args, **kwargs)


class ByReference(Forward):
    """As of nnsight."""


class _List(list[nn.Module]):
    pass


class _Dict(dict[str, nn.Module]):
    pass


class ByList(Forward):
    """In a class of its own, for which Dynamo has other expressions."""

    def keep(self, module: nn.Module) -> None:
        self.modules = _List([module])

    def kept(self) -> nn.Module:
        return self.modules[0]


class ByDict(Forward):
    def keep(self, module: nn.Module) -> None:
        self.modules = _Dict(module=module)

    def kept(self) -> nn.Module:
        return self.modules["module"]


class ByName(Forward):
    def keep(self, module: nn.Module) -> None:
        setattr(self, "the module", module)

    def kept(self) -> nn.Module:
        return getattr(self, "the module")


class Hook:
    """As of accelerate."""

    def pre_forward(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, _: nn.Module, output: Any) -> Any:
        return output


def hooked(module: nn.Module) -> Any:
    """A forward that calls a hook before and after the one that was there."""
    old = module.forward
    module.hf_hook, module.old_forward = Hook(), old  # type: ignore[assignment]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module.hf_hook.pre_forward(module, *args, **kwargs)
        output = module.old_forward(*args, **kwargs)
        return module.hf_hook.post_forward(module, output)

    return functools.update_wrapper(functools.partial(forward, module), old)


def closed_over(module: nn.Module) -> Any:
    """A function that has the module among its variables."""
    run, reference = type(module).forward, weakref.ref(module)
    return lambda *args, **kwargs: run(reference(), *args, **kwargs)


FORWARDS = [ByReference, ByList, ByDict, ByName, hooked, closed_over]


class Emptied(nn.Module):
    """Its first call runs nothing, its second one an operator."""

    def forward(self, x: torch.Tensor, runs: bool) -> torch.Tensor:
        return x * 2 if runs else x


def test_modules_that_run_no_operator_do_not_keep_others_from_capture() -> None:
    """``nn.Identity`` keeps no model from capture; numbers of calls are those of the mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Sequential(nn.Identity()))
    assert way_of(model, infer, X) == "captured"
    emptied = Emptied()
    way_of(Lambda(lambda fc, x: emptied(emptied(fc(x), False), True)), infer, X)


_GLOBAL = nn.GELU()


def test_modules_that_are_globals_of_the_program_are_found() -> None:
    """A module that a function takes from its globals has the ids that it has without capture, as
    ``gelu`` in several models of Transformers."""
    assert way_of(Lambda(lambda fc, x: _GLOBAL(fc(x)) + fc(_GLOBAL(x))), train, X) == "captured"


def test_a_captured_module_serves_the_next_scope(bound: list[Binding]) -> None:
    """What was captured belongs to the module: the next scope runs it from its first call on."""
    net = Net()
    for _ in range(2):
        with applied(Counter()) as scope:
            for x in X[: CALLS_BEFORE + 1]:
                train(net, x)
    assert scope.statistics.modules == {"Net": "captured"}
    assert len(bound) == CALLS_BEFORE


def test_a_module_stays_as_it_is_and_is_not_kept_alive() -> None:
    """Capture changes nothing of a module, and keeps no memory after it is gone."""
    net = Net()
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    with applied(Counter()):
        for x in X:
            train(net, x)
        assert {name: set(vars(module)) for name, module in net.named_modules()} == before
        gc.collect()
        known = len(_CAPTURED[False])
        left = [weakref.ref(net), *map(weakref.ref, net.parameters())]
        del net
        gc.collect()
        assert [reference() for reference in left] == [None] * len(left)
        assert len(_CAPTURED[False]) == known - 1


class _Unflattens(nn.Module):
    """Calls a method that is written in Python, and calls the builtin of the same name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.unflatten(1, (-1, 2)).flatten(1)
        return x


def test_operators_are_seen_after_a_look_at_the_graph() -> None:
    """What runs without tools while a module is captured does not hide operators for good."""
    counter, net, x = ForwardCounter(), _Unflattens(), torch.ones(2, 4)
    with applied(counter):
        for _ in range(CALLS):
            net(x)
        counter.ids.clear()
        for _ in range(2):
            torch.ones(4).unflatten(0, (2, 2))
            torch.ones(2, 4).unflatten(1, (2, 2))
    assert [op_id.partition(":")[0] for op_id in counter.ids if "unflatten" in op_id] == [
        "/unflatten"
    ] * 4


def test_tensors_of_a_captured_module_get_no_attributes() -> None:
    """Copies and pickles of the module are those of one that was never captured."""
    net = Net().eval()
    tensors = [*net.parameters(), *net.buffers()]
    vars(tensors[0])["own"] = "the program's"
    before = pickle.dumps(net.state_dict(keep_vars=True))
    with applied(Counter()) as scope:
        for _ in range(CALLS):
            infer(net, X[0])
        assert [vars(tensor) for tensor in tensors[1:]] == [{}] * (len(tensors) - 1)
        assert vars(tensors[0]) == {"own": "the program's"}
        assert pickle.dumps(net.state_dict(keep_vars=True)) == before
    assert scope.statistics.modules == {"Net": "captured"}


def test_marks_of_the_program_on_tensors_stay() -> None:
    """Dynamo marks tensors as static, as a program may by ``mark_static_address``."""
    net = Net()
    weight = next(net.parameters())
    mark_static_address(weight)
    before = vars(weight).copy()
    with applied(Counter()):
        for _ in range(CALLS):
            infer(net, X[0])
    assert vars(weight) == before != {}


def test_what_was_captured_is_gone_with_its_module() -> None:
    """Dynamo keeps nothing of a module that is gone, or of one that has got another method."""

    class Own(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + super().forward(x)

    net, x, left = Own(), torch.rand(3, 4), list[Any]()
    with applied(Counter()) as scope:
        for forward in (Own.forward, lambda self, x: Body.forward(self, x)):
            Own.forward = forward  # type: ignore[method-assign]
            for _ in range(CALLS):
                infer(net, x)
            captured = _CAPTURED[False][net]
            assert captured.function.__code__ in convert_frame.input_codes
            left.append(weakref.ref(captured))
        del captured
        gc.collect()
        assert left[0]() is None
        del net
        gc.collect()
        assert left[1]() is None
    assert scope.statistics.modules == {"Own": "captured"}


def test_captures_leave_no_tensors_without_values_to_the_process() -> None:
    """What PyTorch keeps for the process of operators on such tensors is dropped with a capture."""
    known = FakeTensorMode.cache.copy()
    net = Net()
    with applied(Counter()):
        for size in (2, 3, 4, 5, 6):
            infer(net, torch.rand(size, 4))
    assert FakeTensorMode.cache == known


@pytest.mark.parametrize("is_refused", [False, True], ids=["captured", "refused"])
def test_a_capture_leaves_the_random_numbers_of_a_device_alone(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Neither asks it for their state nor sets it: cuDNN would begin the dropout of an LSTM anew,
    and a program that computes on the processor would begin to use the device."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: asked.append("get"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: asked.append("set"))
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    model = nn.LSTM(4, 4) if is_refused else nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with applied(Counter()) as scope:
        for _ in range(4):
            model(torch.ones(2, 4))
    (way,) = scope.statistics.modules.values()
    assert way.startswith("as they are" if is_refused else "captured")
    assert not asked
    assert (torch.cuda.get_rng_state, torch.cuda.set_rng_state) == before


def test_refused_modules_keep_no_class_alive() -> None:
    """What is known of refused modules goes with their class."""

    class Refused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    x = torch.rand(3, 4)
    with applied(amanda.Tool()) as scope:
        net = Refused()
        for _ in range(CALLS):
            infer(net, x)
        left = weakref.ref(Refused)
        del net, Refused
        # Dynamo keeps the code that it has tried, until it is reset.
        torch.compiler.reset()
        gc.collect()
        assert left() is None
    assert "Data-dependent" in scope.statistics.modules["Refused"]


def test_interceptors_are_switched_within_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scopes of one process may use different interceptors on one module."""
    net, ids = Net(), []
    for interceptor in ("capture", "mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        with applied(tool := Counter()) as scope:
            for x in X:
                train(net, x)
        ids.append((tool.ids, tool.backward_ids))
    assert ids == ids[:1] * 3
    assert scope.statistics.modules == {"Net": "captured"}


def test_the_last_line_says_how_modules_ran() -> None:
    """The last line of a run counts modules by the way in which they ran, with the reason."""
    net, other = Net(), Lambda(data_dependent)
    with applied(Counter()) as scope:
        for x in X:
            net(x), other(x)
    line = last_line(scope.statistics, 1.0)
    reason = "as they are (Dynamo: Data-dependent branching): 1"
    assert f"; modules ran captured: 1, {reason}; " in line


def test_doctor_says_whether_modules_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where capture is asked for, a small module is captured, or the reason is given why not."""
    captured, *others = EagerDriver.remarks()
    assert captured.startswith("modules are captured")
    assert "gate" in others[0] or "TorchFunctionMode" in others[0]

    def fails(*_: Any) -> Any:
        raise NotCapturableError("this is a test")

    monkeypatch.setattr(GraphCode, "__init__", fails)
    torch.compiler.reset()
    assert EagerDriver.remarks()[0] == (
        "modules cannot be captured: in the self-test modules run as they are (this is a test)"
    )


class Body(nn.Module):
    """Sixteen layers, of which none is worth a capture of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Dropout(0.1))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 1


class Stops(nn.Module):
    """Dynamo stops between its two modules."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(x) if x.sum() > -1e9 else x


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", [train, infer])
def test_modules_within_one_that_cannot_be_captured_are(
    bound: list[Binding], step: Step, depth: int
) -> None:
    """Where a module cannot be captured, those in it are on their own, if they are not small."""
    model: nn.Module = Body()
    for _ in range(depth):
        model = Stops(model)
    inputs = some(*[3] * (6 + 6 * depth))
    wanted, _ = executed("mode", model, step, inputs)
    found, ways = executed("capture", model, step, inputs)
    assert found == wanted
    path = "Stops" + ".first" * depth
    assert ways.pop(path) == "captured"
    assert bound
    assert len(ways) == depth
    assert all("Data-dependent" in way for way in ways.values())


def test_the_last_line_says_which_modules_ran_captured_within_others() -> None:
    """The last line of a run of which a part is captured says so, and why the rest is not."""
    model = Stops(Body())
    with applied(Counter()) as scope:
        for x in some(*[3] * 12):
            model(x)
    line = last_line(scope.statistics, 1.0)
    reason = "as they are (Dynamo: Data-dependent branching): 1"
    assert f"modules ran {reason}, captured: 1; " in line


def test_a_small_module_within_another_is_left_to_the_gate() -> None:
    """A module that is not worth a capture is entered as without the interceptor."""
    model = Stops(Body())
    with applied(Counter()):
        for x in some(*[3] * 12):
            model(x)
        interceptor = LOCAL.interceptor
        assert interceptor is not None
        (outermost,) = interceptor.root.children.values()
        (frame,) = outermost.frames
        assert frame.is_open
        assert {child.name: child.is_fused for child in frame.children.values()} == {
            "first": True,
            "head": False,
        }


@pytest.mark.parametrize("wrapped", FORWARDS, ids=lambda wrapped: wrapped.__name__)
def test_modules_with_a_forward_of_their_own_run_captured(
    wrapped: Callable[[nn.Module], Any],
) -> None:
    """Where libraries have put a forward into modules, these run captured, with the mode's ids."""
    found = []
    for interceptor in ("mode", "capture"):
        torch.manual_seed(0)
        model = nn.Sequential(Named(), Named())
        for module in model.modules():
            if type(module) is not nn.ModuleDict:
                module.forward = wrapped(module)  # type: ignore[method-assign, assignment]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, interceptor)
            with applied(tool := Counter()) as scope:
                results = [fingerprint(train(model, x)) for x in X]
        found.append((tool.ids, tool.backward_ids, results))
    assert scope.statistics.modules == {"Sequential": "captured"}
    assert found[0] == found[1]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules that Dynamo has been given, one for each time."""
    classes: list[str] = []
    vanilla = modules.capturing

    def capturing(*args: Any) -> Any:
        interceptor = LOCAL.interceptor
        assert interceptor is not None
        assert interceptor.frame.module is not None
        classes.append(type(interceptor.frame.module()).__name__)
        return vanilla(*args)

    monkeypatch.setattr(modules, "capturing", capturing)
    return classes


def test_what_siblings_have_in_common_is_refused_for_all_of_them(attempts: list[str]) -> None:
    """Of modules of one class with the same operators, two are tried if these two are refused."""
    # Other tests have X require gradients, with which the first of the six has another form.
    x = torch.rand(3, 4)
    model = nn.Sequential(Stops(nn.Sequential(*[Stops(Body()) for _ in range(6)])))
    with applied(Counter()) as scope:
        for _ in range(32):
            infer(model, x)
    assert [*scope.statistics.modules.values()].count("captured") == 6
    assert attempts.count("Body") == 6
    # For each class and form: the outermost, the one in it, what that calls, and the six.
    assert len(attempts) - 6 == REFUSALS_ALIKE * 4


def test_attempts_end_where_nothing_can_be_captured(attempts: list[str]) -> None:
    """However deep a model is, there is a bound to what is tried; then the gate has its modules."""
    model, x = cast(nn.Module, Body()), torch.rand(3, 4)
    for _ in range(10):
        model = Stops(model)
    for _ in range(2):
        with applied(Counter()) as scope:
            for _ in range(40):
                infer(model, x)
            interceptor = LOCAL.interceptor
            assert interceptor is not None
            (outermost,) = interceptor.root.children.values()
            (frame,) = outermost.frames
            assert not any(child.is_fused for child in frame.children.values())
    assert len(attempts) == REFUSALS
    assert scope.statistics.modules == {"Stops": "as they are (Dynamo: Data-dependent branching)"}


class InEvaluation(nn.Module):
    """Dynamo takes its forward in evaluation, and not in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.sum() > -1e9:
            return x * 2
        return x * 3


def test_a_form_of_call_that_is_refused_is_not_tried_for_ever(attempts: list[str]) -> None:
    """Captured calls of another form between them do not lead to further attempts."""
    model, x = InEvaluation(), torch.rand(3, 4)
    with applied(Counter()):
        for number in range(40):
            infer(model.train(number % 2 == 0), x)
    assert len(attempts) == REFUSALS_ALIKE + 1
    with applied(Counter()) as scope:
        infer(model.eval(), x)
    assert scope.statistics.modules == {"InEvaluation": "captured"}


# -- what changes between calls ------------------------------------------------


def changing(model: nn.Module, change: Callable[[nn.Module, int], Any]) -> Step:
    """A training step that first changes the model, with the number of the step."""
    steps = iter(range(1000))

    def step(model: nn.Module, given: Any) -> Any:
        nonlocal steps
        number = next(steps) % LONG
        change(model, number)
        return train(model, given)

    return step


LONG = 9
MANY = some(*[3] * LONG)


@pytest.mark.parametrize(
    "change",
    [
        lambda net, n: net.train(n % 4 != 3),
        lambda net, n: n == 5 and setattr(net.first, "weight", nn.Parameter(torch.ones(4, 4))),
        lambda net, n: n == 5 and net.first.weight.data.fill_(0.5),
        lambda net, n: n == 5 and net.twice.__setitem__(1, nn.GELU()),
        lambda net, n: n == 5 and net.twice.__setitem__(0, nn.Linear(4, 4, bias=False)),
        lambda net, n: n == 5 and setattr(net.twice[2], "p", 0.5),
        lambda net, n: n == 5 and setattr(net, "kind", "mean"),
        lambda net, n: n == 5 and net.first.weight.requires_grad_(False),
        lambda net, n: n == 5 and net.first.register_forward_hook(lambda m, i, o: o * 2),
        lambda net, n: n == 5 and net.twice.register_full_backward_hook(lambda m, i, o: None),
        lambda net, n: n == 5 and net.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
        lambda net, n: n == 5 and setattr(net.first, "forward", lambda x: x * 2),
        lambda net, n: n == 5 and setattr(net, "forward", lambda x: net.first(x) * 2),
    ],
    ids=[
        "training or not", "a parameter", "data", "a module", "a bias", "a rate", "a string",
        "a frozen parameter", "a hook", "a backward hook", "a hook on the outermost",
        "a forward", "the forward of the outermost",
    ],
)  # fmt: skip
def test_a_change_of_the_model_counts_at_the_next_call(
    change: Callable[[nn.Module, int], Any],
) -> None:
    """What is changed of a captured model has its effect as without capture."""
    way_of(Net(), changing(Net(), change), MANY)


def _doubles(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _replace_hooks(module: nn.Module) -> None:
    vars(module)["_forward_hooks"] = OrderedDict()
    module.register_forward_hook(_doubles)


def _replace_attributes(module: nn.Module) -> None:
    vars(module).update(copy.copy(vars(module)), _forward_hooks={0: _doubles})


@pytest.mark.parametrize("by_gate", [True, False])
@pytest.mark.parametrize(
    "add",
    [
        lambda net: net.twice[0].register_forward_hook(_doubles),
        lambda net: vars(net.twice[0])["_forward_hooks"].__setitem__(0, _doubles),
        lambda net: _replace_hooks(net.twice[0]),
        lambda net: _replace_attributes(net.twice[0]),
        lambda net: net.twice[0].register_forward_hook(lambda m, i, kw, o: o * 2, with_kwargs=True),
        lambda net: (
            net.twice.append(nn.Linear(4, 4)).append(nn.ReLU())[3].register_forward_hook(_doubles)
        ),
    ],
    ids=["a method", "an item", "another dict", "other attributes", "keywords", "a new module"],
)
def test_hooks_of_a_captured_module_run_however_they_were_added(
    add: Callable[[Any], Any], by_gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook on a module below a captured one runs from the next call on, found by the gate or by
    a guard of Dynamo's."""
    if not by_gate:
        monkeypatch.setattr(modules, "_finder_of_hooks", lambda: None)
    way_of(Net(), changing(Net(), lambda net, n: n == 5 and add(net)), MANY)


@pytest.mark.skipif(bool(gate.reason_unusable()), reason="guards of Dynamo drop the capture")
@pytest.mark.usefixtures("earned")
@pytest.mark.parametrize("name", ["capture", "auto"])
def test_hooks_for_some_calls_cost_no_new_capture(
    name: str, attempts: list[str], bound: list[Binding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured module with hooks below it runs as it is, and captured again without them."""
    monkeypatch.setenv(VARIABLE, name)
    net, inputs = Net(), some(*[3] * 9)
    with applied(Counter()) as scope:
        for x in inputs:
            net(x)
        captured = len(bound)
        assert captured
        handle = net.first.register_forward_hook(_doubles)
        for x in inputs:
            net(x)
        assert len(bound) == captured
        handle.remove()
        for x in inputs:
            net(x)
    assert scope.statistics.modules["Net"] == "captured"
    assert len(bound) == captured + len(inputs)
    assert attempts == ["Net"]


def test_another_precision_counts_at_the_next_call() -> None:
    """``Module.double()``, which leaves the Parameter objects what they are, is noticed."""

    def run(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return fc(torch.ones(2, 4, dtype=fc.weight.dtype)) * x.shape[0]

    def step(model: nn.Module, given: Any) -> Any:
        if len(given) == 2:
            model.double()
        return train(model, given)

    way = way_of(Lambda(run), step, some(3, 3, 3, 3, 2, 2, 2, 2))
    assert way == "captured"


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _tripled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 3 + 1


def test_another_forward_of_a_class_counts_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function ``forward`` that is put into a class, of which Dynamo takes no notice, runs."""
    model = nn.Sequential(nn.Linear(4, 4), Doubled())
    with applied(tool := Counter()) as scope:
        for x in X:
            model(x)
        monkeypatch.setattr(Doubled, "forward", _tripled)
        results = [model(x) for x in X]
    assert torch.equal(results[0], model[0](X[0]) * 3 + 1)
    assert tool.ops["add"] == CALLS
    assert scope.statistics.modules == {"Sequential": "captured"}


class Scale:
    """A class of a program's own, which is not a module."""

    def by_method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def by_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Scaled(nn.Module):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class CallsMethods(Scaled):
    """Calls a method of a base class, and those of an object that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other.by_class(self.other.by_method(self.scale(self.fc(x))))


@pytest.mark.parametrize(
    ("owner", "name", "method"),
    [
        (Scaled, "scale", _tripled),
        (CallsMethods, "scale", _tripled),
        (Scale, "by_method", _tripled),
        (Scale, "by_class", classmethod(_tripled)),
    ],
)
def test_another_method_of_a_class_counts_at_the_next_call(
    owner: type, name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that is put into a class, or hides one of a base class, runs instead."""
    model = CallsMethods()
    with applied(tool := Counter()) as scope:
        for x in X:
            model(x)
        assert "add" not in tool.ops
        monkeypatch.setattr(owner, name, method, raising=False)
        for x in X:
            model(x)
    assert tool.ops["add"] == CALLS
    assert scope.statistics.modules == {"CallsMethods": "captured"}


def test_other_sizes_and_modes_are_captured_or_run_as_they_are() -> None:
    """Calls of many sizes, with and without gradients and in inference mode, give the same."""
    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]

    def step(model: nn.Module, given: Any) -> Any:
        with modes[len(given) % 3]():
            return [model.eval()(given)]

    way_of(Net(), step, some(*range(2, 8), *range(2, 8)))


def test_autocast_and_gradients_may_differ_from_call_to_call() -> None:
    """Autocast on or off, and inputs that want gradients or not, give what they give uncaptured."""
    numbers = iter(range(1000))

    def step(model: nn.Module, given: Any) -> Any:
        number = next(numbers) % LONG
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 3 == 2):
            return train(model, given.clone().requires_grad_(number % 4 == 3))

    assert way_of(Net(), step, MANY) == "captured"


def test_a_module_whose_calls_all_differ_is_left_alone() -> None:
    """After a number of attempts a module runs as it is, which is said with a reason."""

    def count(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
        fc.calls = getattr(fc, "calls", 0) + 1
        return fc(x) * fc.calls

    ways = way_of(Lambda(count), train, some(*[3] * 30))
    assert ways.startswith("as they are (")


# -- what runs as it is --------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


def data_dependent(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = fc(x)
    return y * 2 if y.sum() > 0 else y * 3


def generating(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum((fc(row) for row in x), start=torch.zeros(4))


def told(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return fc(x) * (2 if torch.compiler.is_compiling() else 3)


def numpy(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return fc(x) * float(np.exp(x.detach().numpy()).sum())


def unused(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.rand(2)
    fc(x)
    return fc(x).add_(1)


def rows(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second, third = fc(x)
    return first + second * third


def partly_hidden(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with amanda.disabled():
        x = fc(x)
    return fc(x)


def detached(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = fc(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = fc(x)
    return fc(y) + z


def with_loss(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(fc(x), torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize(
    "function",
    [
        data_dependent, generating, told, numpy, unused, rows, partly_hidden, detached, with_loss,
        lambda fc, x: Cube.apply(fc(x)),
        lambda fc, x: checkpoint(fc, x, use_reentrant=False) + 1,
        lambda fc, x: checkpoint(fc, x.requires_grad_(), use_reentrant=True) + 1,
        lambda fc, x: torch.vmap(fc)(x),
        lambda fc, x: nn.functional.dropout(fc(x)) * random.random(),
        lambda fc, x: fc(x) * random.uniform(1, 2),
        lambda fc, x: {"a": [fc(x)], "b": (x * 2, None)},
        lambda fc, x: nn.LSTM(4, 4)(fc(x))[0],
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_any_code_has_the_results_and_ids_of_the_mode(
    function: Callable[[nn.Module, torch.Tensor], Any],
) -> None:
    """Whatever a module runs, captured or not, has the operators and the results of the mode."""
    random.seed(3)
    way_of(Lambda(function), seeded(train), X)


def seeded(step: Step) -> Step:
    """The step with Python's random numbers reset before it."""

    def run(model: nn.Module, given: Any) -> Any:
        random.seed(3)
        return step(model, given)

    return run


def test_an_optimizer_a_loss_and_a_second_model_are_seen_as_ever() -> None:
    """Operators outside of captured modules keep their ids: losses, optimizers, other models."""
    model = nn.ModuleList([Net(), nn.Linear(4, 4)])
    model[0].kind = "abs"

    def step(model: nn.Module, given: torch.Tensor) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        loss = nn.functional.mse_loss(model[1](model[0](given * 2)), given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss, *model.parameters()]

    assert way_of(model, step, X) == "captured"


def test_saved_tensors_hooks_meet_no_symbolic_tensors() -> None:
    """Within hooks on saved tensors a module runs as it is: capture would run them."""
    seen: list[torch.Tensor] = []

    def step(model: nn.Module, given: Any) -> Any:
        with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            return train(model, given)

    assert way_of(Net(), step, X).startswith("as they are")
    assert {type(tensor) for tensor in seen} <= {torch.Tensor, nn.Parameter}


def test_an_error_of_the_program_is_raised_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    """What a captured model raises for inputs that do not fit is what it raises by itself, and
    Dynamo logs nothing about it."""
    net = Net()
    with applied(Counter()):
        for x in X:
            net(x)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            net(torch.rand(3, 5))
        assert torch.isfinite(net(X[0]))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -- scopes and threads --------------------------------------------------------


def test_nested_scopes_disabled_and_reanalysis() -> None:
    """An inner scope, ``disabled()`` and ``reanalyse()`` act on captured modules at once."""
    net, outer, inner = Net().eval(), Counter(), Counter()
    with applied(outer):
        for x in X:
            net(x)
        per_call = len(set(outer.ids))
        with applied(inner):
            net(X[0])
        with amanda.disabled():
            wanted = net(X[0])
        outer.reanalyse()
        found = net(X[0])
    assert torch.equal(found, wanted)
    assert len(inner.ids) == per_call
    assert outer.ids == outer.ids[:per_call] * (CALLS + 2)


def test_routines_change_values_in_captured_modules() -> None:
    """A routine that returns another value acts in captured modules as in eager ones."""

    def halve(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "linear":
            context.insert_after_op(lambda y: y * 0.5)

    net, results = Net().eval(), []
    for _ in range(2):
        tool = amanda.Tool()
        tool.add_inst_for_op(halve)
        with applied(tool):
            results += [net(X[0]).item() for _ in range(CALLS)]
    assert len(set(results)) == 1
    assert results[0] != net(X[0]).item()


class Points(Counter):
    """Notes passes and iterations among the operators."""

    def __init__(self) -> None:
        super().__init__()
        for end in (False, True):
            self.add_inst_for_iteration(self.note, end=end)
            self.add_inst_for_pass(self.note, end=end)
            self.add_inst_for_pass(self.note, backward=True, end=end)

    def note(self, point: Any) -> None:
        self.ids.append(f"{point.point.name} {point.id} {point.iteration}")


def test_tools_are_told_of_the_passes_of_captured_modules() -> None:
    """A tool with routines at passes and iterations, as all that report figures of steps have,
    leaves modules captured, and is told what it is told without capture."""
    found, ways = [], []
    for interceptor in ("mode", "capture"):
        net = Net().eval()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, interceptor)
            with applied(tool := Points()) as scope:
                for x in X:
                    net(x).backward()
        found.append((tool.ids, tool.backward_ids))
        ways.append(scope.statistics.modules)
    assert found[0] == found[1]
    assert ways == [{}, {"Net": "captured"}]


def test_where_tools_are_told_of_modules_that_is_the_reason() -> None:
    """A tool with routines at modules keeps them as they are, which is said."""
    net, calls, tool = Net(), [], amanda.Tool()
    tool.add_inst_for_module(calls.append)
    with applied(tool) as scope:
        for x in X:
            net(x)
    assert len(calls) == CALLS * 11
    assert scope.statistics.modules == {"Net": "as they are (a tool has routines at modules)"}


# -- routines in the code of a graph -------------------------------------------


class AtBothEnds(Counter):
    """Notes what its routines get; after its tenth execution ReLU returns another value."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def forward(self, context: amanda.OpContext) -> None:
        super().forward(context)
        context.insert_before_op(self.note, scale=1)
        context.insert_after_op(self.changed if "relu" in context.get_op_id() else self.note)

    def note(self, *tensors: Any, **kwargs: Any) -> None:
        self.got.append((fingerprint(tensors), kwargs, torch.is_grad_enabled(), STATE.paused))

    def changed(self, y: torch.Tensor) -> torch.Tensor | None:
        self.note(y)
        self.calls = getattr(self, "calls", 0) + 1
        return y * 0.5 if self.calls > 10 else None


@pytest.mark.parametrize("sizes", [[3] * 9, [3] * 5 + [5, 4] * 4], ids=["one", "several"])
@pytest.mark.parametrize("step", [train, infer])
def test_routines_in_the_code_of_a_graph_get_and_give_what_they_do_elsewhere(
    step: Step, sizes: list[int], written: list[bool]
) -> None:
    """Routines that are called by the graph's code get the same, and what they return counts, also
    where sizes change from call to call."""
    found = []
    for interceptor in ("mode", "capture"):
        torch.manual_seed(5)
        net, tool = Net(), AtBothEnds()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, interceptor)
            with applied(tool):
                results = [fingerprint(step(net, x)) for x in some(*sizes)]
        found.append((tool.ids, tool.backward_ids, tool.got, results))
    assert found[0] == found[1]
    assert written[-1] is False
    assert True in written


def test_the_sizes_of_one_model_say_nothing_about_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes are symbolic where a model is called with several, and not where two models differ."""
    static: list[bool] = []
    vanilla = DirectCode.__init__

    def init(direct: DirectCode, *args: Any) -> None:
        *_, is_static = args
        static.append(is_static)
        vanilla(direct, *args)

    monkeypatch.setattr(DirectCode, "__init__", init)
    way_of(Net(), infer, X)
    way_of(Net(), infer, some(*[5] * CALLS))
    assert static == [True, True]
    way_of(Net(), infer, some(*[3] * CALLS, *[5] * CALLS))
    assert static == [True, True, True, False]


@pytest.mark.parametrize("step", [train, infer])
def test_what_changes_with_sizes_is_found_anew_in_each_run(step: Step, written: list[bool]) -> None:
    """Operators whose nodes or numbers of outputs depend on sizes have the results of the mode."""

    def function(fc: nn.Module, x: torch.Tensor) -> Any:
        y = fc(x).expand(len(x), 4).reshape(-1)[: 2 * len(x)].view(2, -1)
        parts = torch.chunk(y, 3, dim=1)
        scaled = nn.functional.interpolate(y[None], scale_factor=2.0)
        return sum(part.sum() for part in parts) * scaled.mean() + torch.full((len(x),), 0.5).sum()

    way = way_of(Lambda(function), step, some(*[3] * 5, *[7, 2, 5, 1, 8, 4] * 3))
    assert way.startswith(("captured", "as they are"))
    assert True in written


@contextmanager
def armed(tool: Any, net: nn.Module) -> Iterator[None]:
    """A scope of a tool whose routines do something from now on: they are in the code of `net`'s
    graph by then."""
    tool.armed = False
    with applied(tool):
        for x in X * 2:
            net(x)
        tool.armed = True
        yield


def test_an_error_of_a_routine_in_the_code_of_a_graph_leaves_nothing_behind() -> None:
    """The error names the routine and the operator; gradients are recorded as before."""
    net = Net()

    class Failing(Counter):
        def forward(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.fail)

        def fail(self, *_: Any) -> None:
            if self.armed and torch.is_grad_enabled() is False:
                raise ValueError("failed")

    tool = Failing()
    with armed(tool, net):
        with pytest.raises(ValueError, match="failed") as raised:
            net(X[0])
        tool.armed = False
        assert torch.is_grad_enabled()
        assert not STATE.paused
        assert not TOOL_LOCK.is_owned()
        assert net(X[0]).requires_grad
    assert "Failing.fail at op Net.first/linear:0" in "".join(raised.value.__notes__)


def test_an_error_of_the_second_of_two_routines_names_that_one() -> None:
    """Where routines run before and after an operator, an error names the one that raised it."""

    class Failing(Counter):
        def forward(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.pass_by)
            context.insert_after_op(self.fail)

        def pass_by(self, *_: Any) -> None:
            pass

        def fail(self, *_: Any) -> None:
            if self.armed:
                raise ValueError("failed")

    net, tool = Net(), Failing()
    with armed(tool, net), pytest.raises(ValueError, match="failed") as raised:
        net(X[0])
    notes = "".join(raised.value.__notes__)
    assert "Failing.fail at op Net.first/linear:0" in notes
    assert "pass_by" not in notes


class Checking(amanda.Tool):
    """A check around each operator."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.raises = raises
        self.trail: deque[str] = deque()
        self.asked = 0
        self.found: list[Any] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the check."""
        check = inline.Check(
            self.is_finite,
            functools.partial(self.note, context.get_op_id()),
            overwrites=None,
            trail=self.trail,
            name=context.get_op_id(),
        )
        context.insert_before_op(check.before)
        context.insert_after_op(check.after)

    def is_finite(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is finite."""
        self.asked += 1
        assert not torch.is_grad_enabled()
        assert STATE.paused
        return bool(tensor.isfinite().all())

    def note(self, op_id: str, inputs: Any, outputs: Any, was_finite: bool) -> None:
        """Note an operator with an output that is not finite."""
        self.found.append((op_id, fingerprint([*inputs, *outputs]), was_finite))
        if self.raises:
            raise ValueError("not finite")


@pytest.mark.parametrize("step", [train, infer])
def test_checks_in_the_code_of_a_graph_find_what_they_do_elsewhere(
    step: Step, written: list[bool]
) -> None:
    """Each check leaves its trail, and finds the same operators with the same tensors; sums that
    overflow are no finding."""
    seen = []
    given = some(*[3] * 12)
    inputs = [*given, given[0] / 0, torch.full_like(given[0], 1e38), *given]
    for interceptor in ("mode", "capture"):
        torch.manual_seed(5)
        net, tool = Net(), Checking()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, interceptor)
            with applied(tool):
                results = [fingerprint(step(net, x)) for x in inputs]
        seen.append(([*tool.trail], tool.found, results))
    assert seen[0] == seen[1]
    assert tool.found
    assert written[-1]


def test_a_check_in_the_code_of_a_graph_takes_no_function_where_all_is_finite() -> None:
    """Finite outputs are found by the graph's own code, however many operators there are."""
    calls = []
    for layers in (4, 24):
        model, tool = nn.Sequential(*[nn.Sigmoid() for _ in range(layers)]), Checking()
        with torch.no_grad(), applied(tool):
            for _ in range(12):
                model(X[0])
            asked = tool.asked
            _, run = profiled(functools.partial(model, X[0]))
        assert tool.asked == asked
        calls.append(str(run))
    assert calls[0] == calls[1]


def test_a_check_in_the_code_of_a_graph_asks_its_tool_of_what_has_no_sum(
    written: list[bool],
) -> None:
    """Tensors whose sum is not a real number are looked at by the tool."""
    model, tool = Lambda(lambda fc, x: torch.complex(fc(x), x).abs()), Checking()
    with torch.no_grad(), applied(tool):
        for x in X * 2:
            model(x)
        asked = tool.asked
        model(X[0])
    assert written[-1]
    assert tool.asked == asked + 1
    assert not tool.found


def test_an_error_of_a_check_in_the_code_of_a_graph_leaves_nothing_behind() -> None:
    """It names the operator; gradients are recorded, and tools run, as before."""
    net, tool, infinite = Net(), Checking(raises=True), some(3)[0] / 0
    with applied(tool):
        for x in X * 2:
            net(x)
        with pytest.raises(ValueError, match="not finite") as raised:
            net(infinite)
        assert torch.is_grad_enabled()
        assert not STATE.paused
        assert not TOOL_LOCK.is_owned()
        assert net(X[0]).requires_grad
    assert "at op Net.first/linear:0" in "".join(raised.value.__notes__)


def test_a_captured_call_looks_at_no_variables_of_frames(
    monkeypatch: pytest.MonkeyPatch, bound: list[Binding]
) -> None:
    """The module that a graph belongs to is known, and with it all of its modules."""
    monkeypatch.setattr(_internals, "program_frame", lambda: pytest.fail("a frame is asked"))
    nets = [Net(), Net()]
    for net in nets:
        tool = Counter()
        with applied(tool):
            for x in X:
                net(x)
        assert {op_id.partition("/")[0].partition("@")[0] for op_id in tool.ids} >= {"Net.first"}
    assert len(bound) == len(nets) * (len(X) - CALLS_BEFORE - 1)


class Acting(amanda.Tool):
    """Has two routines before and two after each linear layer, `relu` and `cat`; the second ones
    do something once the tool is armed."""

    armed = False

    def __init__(self, act: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.seen: list[Any] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines."""
        if context.get_op().__name__ in ("linear", "relu", "cat"):
            context.insert_before_op(self.look)
            context.insert_before_op(self.meddle, inputs=[0])
            context.insert_after_op(self.look)
            context.insert_after_op(self.meddle)

    def look(self, *tensors: torch.Tensor) -> None:
        """Note what a routine meets."""
        if self.armed:
            state = torch.is_grad_enabled(), STATE.paused, TOOL_LOCK.is_owned()
            self.seen.append((fingerprint(tensors), state))

    def meddle(self, tensor: torch.Tensor) -> Any:
        """Act, if armed."""
        return self.act(tensor) if self.armed else None

    def outcome(self, model: nn.Module, step: Step, given: Any) -> Any:
        """What a step gives when the tool is armed, and how it leaves the thread."""
        self.armed = True
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                found: Any = fingerprint(step(model, given))
            except Exception as error:
                found = str(error), getattr(error, "__notes__", ())
        self.armed = False
        left = torch.is_grad_enabled(), STATE.paused, TOOL_LOCK.is_owned()
        return found, left, self.seen, [(one.category, str(one.message)) for one in told]


def _raise(tensor: torch.Tensor) -> None:
    raise ValueError(f"not {len(tensor)}")


def _write(tensor: torch.Tensor) -> None:
    tensor[:0].zero_()


@pytest.mark.parametrize("step", [train, infer])
@pytest.mark.parametrize("act", [lambda x: None, lambda x: x * 2, lambda x: [], _write, _raise])
@pytest.mark.parametrize("most", [direct.MOST_VALUES, -1])
def test_routines_in_the_code_of_a_graph_do_what_they_do_elsewhere(
    monkeypatch: pytest.MonkeyPatch, act: Any, step: Step, most: int, written: list[bool]
) -> None:
    """What they return, change and raise has the same effect, and their time is charged, whether
    the gate runs those of a point, or the code does; also where there are more tensors than the
    gate takes."""
    monkeypatch.setattr(direct, "MOST_VALUES", most)
    outcomes = []
    for interceptor in ("mode", "capture"):
        torch.manual_seed(5)
        tool = Acting(act)
        model = Lambda(lambda fc, x: torch.cat([fc(x).relu(), *[x] * 70]).sum())
        monkeypatch.setenv(VARIABLE, interceptor)
        with applied(tool):
            for x in X * 2:
                step(model, x)
            before = STATE.scopes[0].statistics.tool_seconds
            outcomes.append(tool.outcome(model, step, X[0]))
            assert STATE.scopes[0].statistics.tool_seconds > before
            outcomes[-1] += (fingerprint(step(model, X[1])),)
    assert outcomes[0] == outcomes[1]
    assert written[-2]


def test_a_routine_in_the_code_of_a_graph_that_changes_a_tensor_is_warned_of() -> None:
    """A change in place of an operator's tensor is noticed in captured code, too."""
    net = Net().eval()

    class Writing(Counter):
        def forward(self, context: amanda.OpContext) -> None:
            if context.get_op().__name__ == "relu":
                context.insert_before_op(self.write)

        def write(self, x: torch.Tensor) -> None:
            if self.armed:
                x.mul_(2)

    warned = pytest.warns(InPlaceWarning, match="changed a tensor of op .*/relu:0 in place")
    with torch.no_grad(), armed(Writing(), net), warned:
        net(X[0])


def test_an_operator_whose_input_becomes_a_leaf_has_that_leafs_accumulation(
    written: list[bool],
) -> None:
    """Where no backward operator is wanted, another kind of input is noticed nevertheless."""
    model = Lambda(lambda fc, x: (x * 2) * fc(x))

    def step(model: nn.Module, given: Any) -> Any:
        leaf = given.clone().requires_grad_()
        model(leaf if len(given) == 2 else leaf + 1).sum().backward()
        return [leaf.grad]

    # Of an even number of rows there are other operators before.
    way_of(model, step, some(3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 3))
    assert True in written


def test_operators_that_nothing_is_wanted_of_are_called_by_the_graph_itself() -> None:
    """In a steady captured call few functions of ours run, however many operators there are."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)])
    with applied(Watch(backward=True)):
        for x in X * 2:
            net(x).sum().backward()
        _, run = profiled(lambda: net(X[0]))
    assert len(run) <= 80, f"\n{run}"


class Inlined(amanda.Tool):
    """Counts and times each operator by routines of ``amanda.inline``, and reads the memory that is
    in use; that of the process without a function."""

    def __init__(
        self, log: inline.Log | None = None, used: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self.use = inline.MemoryUse(used)
        self.changes: dict[str, inline.MemoryChange] = {}
        self.counters: dict[str, tuple[inline.Counter, inline.Counter]] = {}
        self.timers: dict[str, inline.Timer] = {}
        self.backward: dict[str, inline.Counter] = {}
        self.log = log
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert a counter, a timer and a change of memory around an operator."""
        op_id = context.get_op_id()
        before, after = self.counters.setdefault(op_id, (inline.Counter(), inline.Counter()))
        timer = self.timers.setdefault(op_id, inline.Timer(self.log, len(self.timers)))
        change = self.changes.setdefault(op_id, inline.MemoryChange(self.use))
        context.insert_before_op(before, inputs=[])
        context.insert_before_op(change.before, inputs=[])
        context.insert_before_op(timer.start, inputs=[])
        context.insert_after_op(timer.stop, outputs=[])
        context.insert_after_op(change.after, outputs=[])
        context.insert_after_op(after, outputs=[])

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert a counter behind a backward operator."""
        counter = self.backward.setdefault(context.get_backward_op_id(), inline.Counter())
        context.insert_after_backward_op(counter, grad_inputs=[])

    def figures(self) -> list[dict[str, Any]]:
        """All that was counted, by id."""
        return [
            {op_id: (a.count, b.count) for op_id, (a, b) in self.counters.items()},
            {op_id: timer.executions for op_id, timer in self.timers.items()},
            {op_id: counter.count for op_id, counter in self.backward.items()},
        ]

    def memory(self) -> list[Any]:
        """By how much operators have changed the memory, by id, and its peak."""
        return [{i: change.bytes for i, change in self.changes.items()}, self.use.peak]


class TimedBackward(Inlined):
    """Times backward operators, too: one timer within another, and all executions in one log; and
    reads the memory."""

    def __init__(self, log: inline.Log | None = None) -> None:
        super().__init__(inline.Log() if log is None else log)
        self.pairs: dict[str, tuple[inline.Timer, inline.Timer]] = {}

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert a counter and two timers around a backward operator."""
        super().analyse_backward(context)
        op_id = context.get_backward_op_id()
        made = inline.Timer(), inline.Timer(self.log, -1 - len(self.pairs))
        outer, inner = self.pairs.setdefault(op_id, made)
        change = self.changes.setdefault(op_id, inline.MemoryChange(self.use))
        for start in (change.before, outer.start, inner.start):
            context.insert_before_backward_op(start, grad_outputs=[])
        for stop in (inner.stop, outer.stop, change.after):
            context.insert_after_backward_op(stop, grad_inputs=[])

    def spans(self) -> list[tuple[int, int, int]]:
        """The number of the timer, start and end of what backward operators have logged."""
        assert self.log is not None
        numbers = self.log.numbers
        rows = zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True)
        return [row for row in rows if row[0] < 0]

    def figures(self) -> list[dict[str, Any]]:
        """All that was counted and logged, by id."""
        logged = [number for number, *_ in self.spans()]
        timed = {
            op_id: (a.executions, b.executions, logged.count(b.number))
            for op_id, (a, b) in self.pairs.items()
        }
        return [*super().figures(), timed]


class BackwardAlone(TimedBackward):
    """Inserts nothing at forward operators."""

    def analyse(self, context: amanda.OpContext) -> None:
        """Look at an operator."""


class Looks(inline.Log):
    """Looks at every third execution or so, and keeps what it has read."""

    def __init__(self) -> None:
        super().__init__(due=0)
        self.read: list[int] = []
        self.looks: list[int] = []
        self.paused: set[int] = set()

    def look(self, now: int) -> None:
        """Take what is there."""
        self.looks.append(now)
        self.paused.add(vars(STATE)["paused"])
        self.due = now if len(self.looks) % 3 else now + 1
        self.read += self.numbers
        del self.numbers[:]


@pytest.mark.parametrize("step", [train, infer])
def test_counters_and_timers_in_the_code_of_a_graph_are_exact(
    monkeypatch: pytest.MonkeyPatch, written: list[bool], step: Step
) -> None:
    """They have counted and timed what they do with the mode, each execution once, and read the
    memory around each."""
    figures = []
    for interceptor in ("mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        model, log = Net(), Looks()
        tool = Inlined(log, itertools.count(10, 10).__next__)
        with applied(tool):
            for x in some(*[3] * 9):
                step(model, x)
        figures.append([*tool.figures(), *tool.memory()])
        rows = [log.read[i : i + 4] for i in range(0, len(log.read) + len(log.numbers), 4)]
        rows = [row for row in rows if row]
        assert log.paused == {1}
        assert {row[3] for row in rows} == {threading.get_native_id()}
        for number, timer in enumerate(tool.timers.values()):
            times = [row[2] - row[1] for row in rows if row[0] == number]
            assert len(times) == timer.executions
            assert sum(times) == timer.nanoseconds
        assert log.looks == sorted(log.looks)
    assert figures[0] == figures[1]
    assert written[-1]


class Fails(nn.Module):
    """An operator in the middle fails for an input of zeros, without a branch."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x + 1).abs().index_select(0, index).neg().sum()


def test_of_a_run_that_raises_what_has_run_is_counted(
    monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    """Where an operator of a graph raises, those before it are counted and timed, and no others."""
    figures = []
    for interceptor in ("mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        used = itertools.count(10, 10).__next__
        model, tool, x = Fails(), Inlined(used=used), torch.rand(3)
        with applied(tool):
            for _ in range(6):
                model(x, torch.tensor([1]))
            for _ in range(2):
                with pytest.raises(IndexError):
                    model(x, torch.tensor([7]))
        figures.append([*tool.figures(), tool.memory()[0]])
    assert figures[0] == figures[1]
    counts = {op_id.partition("/")[2]: count for op_id, count in figures[0][0].items()}
    assert counts["abs:0"] == (8, 8)
    assert counts["index_select:0"] == (8, 6)
    assert counts["neg:0"] == (6, 6)
    assert written[-1]


def test_a_timer_that_is_stopped_at_another_operator_measures_what_is_between() -> None:
    """A timer around several operators of a graph runs as it does elsewhere."""
    timer = inline.Timer()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "abs":
            context.insert_before_op(timer.start, inputs=[])
        if context.get_op().__name__ == "neg":
            context.insert_after_op(timer.stop, outputs=[])

    tool, model = amanda.Tool(), Fails()
    tool.add_inst_for_op(analyse)
    with applied(tool):
        for _ in range(8):
            model(torch.rand(3), torch.tensor([1]))
    assert timer.executions == 8
    assert timer.nanoseconds > 0


def _new_pages(count: int) -> torch.Tensor:
    """Numbers in a mapping of their own: an allocator may have pages of earlier tensors left."""
    return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)


class ReadsPages(nn.Module):
    """Reads its input, and has a parameter of the same size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + self.weight.abs().mean()


@pytest.mark.skipif(not inline.resident_bytes(), reason="it is not known here")
@pytest.mark.parametrize("interceptor", ["mode", "gate", "capture"])
def test_the_memory_of_the_process_is_read_around_each_operator(
    interceptor: str, monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    """Pages that a forward or a backward operator has touched first are its own, also where no
    routine is called."""
    monkeypatch.setenv(VARIABLE, interceptor)
    count, steps = 1 << 22, 8
    model, tool = ReadsPages(count), TimedBackward()
    with applied(tool):
        for _ in range(steps):
            # What adds to it touches it.
            model.weight.grad = _new_pages(count)
            model(_new_pages(count)).backward()
            amanda.new_iteration()
    changes, peak = tool.memory()
    found = {op_id: round(change / (4 * count)) for op_id, change in changes.items()}
    [first] = [op_id for op_id in found if op_id.endswith("/sum:0")]
    [last] = [op_id for op_id in found if "AccumulateGrad" in op_id]
    assert (found[first], found[last]) == (steps, steps)
    assert peak > 3 * 4 * count
    if interceptor == "capture":
        assert written[-1]


@pytest.mark.parametrize("step", [infer, train])
def test_an_operator_that_is_counted_and_timed_takes_no_function_of_ours(step: Step) -> None:
    """A captured call runs no more functions of ours with more operators; in training in C."""
    if step is train and gate.reason_unusable():
        pytest.skip("the gate cannot be used: backward operators are claimed by Python")
    calls = []
    for layers in (4, 24):
        model, tool = nn.Sequential(*[nn.ReLU() for _ in range(layers)]), Inlined()
        x = torch.rand(3, 4, requires_grad=True)
        with applied(tool):
            for _ in range(14):
                step(model, x)
            _, run = profiled(functools.partial(step, model, x))
        calls.append(str(run))
    assert calls[0] == calls[1]


def test_threads_capture_and_run_at_the_same_time() -> None:
    """Threads that call one model, and models of their own, get the results of one thread."""
    net = Net().eval()
    wanted, found = fingerprint([net(X[0])]), []

    def work() -> None:
        own = copy.deepcopy(net)
        for _ in range(CALLS):
            found.append(fingerprint([net(X[0])]))
            found.append(fingerprint([own(X[0])]))

    with applied(Counter()):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [wanted] * (3 * 2 * CALLS)


# -- counts of backward operators ---------------------------------------------


class Branches(nn.Module):
    """Two outputs with a part in common, an attention, an operator in place and shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.norm(self.first(x)).relu() * 2
        parts = torch.split(self.second(self.first(x)), 2, dim=-1)
        left, right = parts[0].exp().clone().add_(1), parts[1].tanh().neg()
        query = x[None, None]
        attended = nn.functional.scaled_dot_product_attention(query, query, query)
        return left.sum(), right.sum(), attended.sin().sum()


Outputs = tuple[torch.Tensor, ...]
BackwardPasses = Callable[[Branches, Outputs], None]


def _second_pass(model: Branches, outputs: Outputs) -> None:
    sum(outputs).backward(retain_graph=True)  # type: ignore[union-attr]
    outputs[0].backward()


def _three_passes(model: Branches, outputs: Outputs) -> None:
    for _ in range(3):
        outputs[1].backward(retain_graph=True)
    outputs[0].backward(retain_graph=True)


def _for_chosen_inputs(model: Branches, outputs: Outputs) -> None:
    torch.autograd.grad(outputs[0], [model.second.weight], retain_graph=True)
    outputs[1].backward(inputs=[model.first.bias])


def _gradients_of_gradients(model: Branches, outputs: Outputs) -> None:
    grads = torch.autograd.grad(outputs[1], [model.first.weight], create_graph=True)
    grads[0].square().sum().backward()


def _freed_graph(model: Branches, outputs: Outputs) -> None:
    outputs[0].backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].backward()


def _from_an_edge(model: Branches, outputs: Outputs) -> None:
    inner: Any = outputs[1].grad_fn
    edge = torch.autograd.graph.GradientEdge(inner.next_functions[0][0], 0)
    torch.autograd.grad([edge], [model.first.weight], [torch.ones(3, 2)], retain_graph=True)
    outputs[1].backward()


def _with_hooks_of_the_program(model: Branches, outputs: Outputs) -> None:
    handles = [outputs[0].register_hook(lambda g: g * 2)]
    handles += [model.first.weight.register_hook(lambda g: g + 1)]
    (outputs[0] + outputs[2]).backward()
    for handle in handles:
        handle.remove()


def _a_pass_within_a_pass(model: Branches, outputs: Outputs) -> None:
    def inner(gradient: torch.Tensor) -> None:
        outputs[1].backward(retain_graph=True)

    outputs[0].register_hook(inner)
    outputs[0].backward()


def _in_another_thread(model: Branches, outputs: Outputs) -> None:
    thread = threading.Thread(target=outputs[0].backward)
    thread.start()
    thread.join()


def _while_disabled(model: Branches, outputs: Outputs) -> None:
    with amanda.disabled():
        outputs[0].backward(retain_graph=True)
    outputs[1].backward()


def _two_calls_in_one_pass(model: Branches, outputs: Outputs) -> None:
    again = model(torch.ones(3, 4))
    penalty = model.first.weight.square().sum()
    (outputs[0] + again[0] + again[1] + penalty).backward()


def _through_a_penalty_alone(model: Branches, outputs: Outputs) -> None:
    model.first.weight.square().sum().backward()
    outputs[0].backward(retain_graph=True)
    (model.first.weight.exp().sum() + model.second.bias.sum()).backward()
    outputs[1].backward()


def _after_a_penalty(model: Branches, outputs: Outputs) -> None:
    penalty = model.first.weight.square().sum()
    again = model(torch.ones(3, 4))
    (outputs[0] + again[0] + penalty).backward()


def _beside_a_call_of_another_size(model: Branches, outputs: Outputs) -> None:
    again = model(torch.ones(5, 4))
    (outputs[0] + again[1]).backward()
    (model(torch.ones(5, 4))[0] + model(torch.ones(3, 4))[1]).backward()


def _one_call_after_the_other(model: Branches, outputs: Outputs) -> None:
    again = model(torch.ones(3, 4))
    again[0].backward(retain_graph=True)
    outputs[1].backward()
    again[1].backward()


_KEPT: list[Any] = []


def _whose_graph_is_kept(model: Branches, outputs: Outputs) -> None:
    _KEPT[:] = [*_KEPT[-1:], outputs]
    sum(outputs).backward(retain_graph=True)  # type: ignore[union-attr]
    model(torch.ones(3, 4))[0].backward()
    _KEPT[0][0].backward(retain_graph=True)


def _together_with_the_last(model: Branches, outputs: Outputs) -> None:
    last, _KEPT[:] = _KEPT[-1:], [outputs]
    sum(sum(one) for one in (outputs, *last)).backward(retain_graph=True)  # type: ignore[union-attr]


def _to_everything(model: Branches, outputs: Outputs) -> None:
    sum(outputs).backward()  # type: ignore[union-attr]


PASSES: Sequence[BackwardPasses] = (
    *(_to_everything, _second_pass, _three_passes, _for_chosen_inputs, _gradients_of_gradients),
    *(_freed_graph, _from_an_edge, _with_hooks_of_the_program, _a_pass_within_a_pass),
    *(_in_another_thread, _while_disabled, _two_calls_in_one_pass, _through_a_penalty_alone),
    *(_after_a_penalty, _beside_a_call_of_another_size, _one_call_after_the_other),
    *(_whose_graph_is_kept, _together_with_the_last),
)


@pytest.mark.parametrize("kind", [Inlined, TimedBackward])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("first", [_to_everything, _second_pass, _together_with_the_last])
def test_backward_operators_are_counted_as_by_the_mode_whatever_passes_run(
    monkeypatch: pytest.MonkeyPatch,
    passes: BackwardPasses,
    first: BackwardPasses,
    kind: type[Inlined],
) -> None:
    """However a graph is differentiated, each backward operator is counted and timed as often as in
    eager mode."""
    figures, results = [], []
    claimed: list[bool] = []
    vanilla = DerivedGraph.claim

    def claim(graph: DerivedGraph, *args: Any) -> bool:
        claimed.append(vanilla(graph, *args))
        return claimed[-1]

    monkeypatch.setattr(DerivedGraph, "claim", claim)
    for interceptor in ("mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        torch.manual_seed(0)
        _KEPT.clear()
        model, tool = Branches(), kind()
        # What the collector ends meanwhile, of other tests, may end what is known of passes.
        with no_collection(), applied(tool):
            for run in (*[first] * 6, passes, first, passes, first):
                model.zero_grad()
                run(model, model(torch.ones(3, 4)))
                amanda.new_iteration()
        figures.append(tool.figures())
        results.append([fingerprint(p.grad) for p in model.parameters()])
    assert figures[0] == figures[1]
    assert results[0] == results[1]
    assert claimed or (kind is not Inlined and not _has_gate())
    assert all(claimed)


_REGISTERING = frozenset({"claim", "attach", "register_hook", "register_prehook"})


def _has_gate() -> bool:
    return not gate.reason_unusable()


@pytest.mark.parametrize("kind", [Inlined, TimedBackward, BackwardAlone])
@pytest.mark.parametrize("layer", [nn.ReLU, lambda: nn.Linear(4, 4)], ids=["relu", "linear"])
def test_counted_backward_operators_take_no_hook_each(
    layer: Callable[[], nn.Module], kind: type[Inlined]
) -> None:
    """A captured step of more operators that are counted, or timed beside the gate, registers no
    more hooks, also with more parameters."""
    if kind is not Inlined and not _has_gate():
        pytest.skip("needs the gate")
    counts = []
    for layers in (4, 24):
        model, tool = nn.Sequential(*[layer() for _ in range(layers)]), kind()
        x, calls = torch.rand(3, 4, requires_grad=True), []

        def note(frame: Any, event: str, function: Any, calls: list[str] = calls) -> None:
            if event == "c_call" and function.__name__ in _REGISTERING:
                calls.append(function.__name__)

        with applied(tool):
            for _ in range(8):
                train(model, x)
            sys.setprofile(note)
            train(model, x)
            sys.setprofile(None)
        counts.append(sorted(calls))
        assert {n for id, n in tool.figures()[2].items() if "Sequential" in id} == {9}
    assert counts[0] == counts[1]


def _timed_steps(log: inline.Log | None = None) -> tuple[TimedBackward, nn.Module]:
    """A tool, and a model whose backward operators it times, to be gone on with in its scope."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.ReLU())])
    return TimedBackward(log), model


def test_times_of_backward_operators_follow_each_other_within_their_pass() -> None:
    """Of the spans that a captured model's backward operators log, each begins after the end of the
    one before it, and all lie within the pass."""
    tool, model = _timed_steps()
    with applied(tool):
        for _ in range(8):
            model(torch.rand(3, 4)).sum().backward()
        tool.log.numbers[:] = array.array("q")  # type: ignore[union-attr]
        loss = model(torch.rand(3, 4)).sum()
        begin = time.perf_counter_ns()
        loss.backward()
        end = time.perf_counter_ns()
    spans = tool.spans()
    moments = [moment for _, *span in spans for moment in span]
    assert moments == sorted(moments)
    assert begin <= moments[0]
    assert moments[-1] <= end
    assert len(spans) == len({number for number, *_ in spans}) > 24


def test_a_log_that_is_due_within_a_backward_pass_is_looked_at_there() -> None:
    """A log is looked at by the first end of a backward operator when it is due, and what
    it raises reaches the program; the executions up to there are noted."""
    seen: list[int] = []

    class Ends(inline.Log):
        def look(self, now: int) -> None:
            assert self.numbers[-2] == now
            seen.append(now)
            if len(seen) == 3:
                raise ValueError("enough")

    log = Ends()
    tool, model = _timed_steps(log)
    with applied(tool):
        for _ in range(8):
            train(model, torch.rand(3, 4, requires_grad=True))
        loss = model(torch.rand(3, 4, requires_grad=True)).sum()
        log.numbers[:], log.due = array.array("q"), 0
        with pytest.raises(ValueError, match="enough"):
            loss.backward()
        log.due = None
        assert [*log.numbers[2::4]] == seen
        # The next pass has nothing of this one.
        model(torch.rand(3, 4)).sum().backward()
        assert len(tool.spans()) > 24


def test_backward_operators_before_one_that_raises_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a backward pass that raises, what has ended is timed, as by the mode."""
    figures = []

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    for interceptor in ("mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        model, tool = Branches(), TimedBackward()
        with applied(tool):
            for _ in range(8):
                _to_everything(model, model(torch.ones(3, 4)))
                amanda.new_iteration()
            outputs = model(torch.ones(3, 4))
            handle = model.first.weight.register_hook(refuse)
            with pytest.raises(ValueError, match="no gradient"):
                outputs[0].backward()
            handle.remove()
        figures.append(tool.figures()[3])
    assert figures[0] == figures[1]


class Sums(amanda.Tool):
    """Adds up the sizes of the tensors of each operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = inline.Counter()
        self.sums: dict[str, inline.ShapeSum] = {}
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the sum around an operator."""
        one = self.sums.setdefault(context.get_op_id(), inline.ShapeSum(_sizes, self.total))
        context.insert_before_op(one.before)
        context.insert_after_op(one.after)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert a sum around a backward operator, which depends on its operator's, too."""
        of = self.sums[context.get_op_id()]

        def weigh(shapes: Any) -> int | None:
            own = _sizes(shapes)
            return None if own is None else own + 1000 * (_sizes(of.last) or 0)

        made = inline.ShapeSum(weigh, self.total, of=of)
        one = self.sums.setdefault(context.get_backward_op_id(), made)
        context.insert_before_backward_op(one.before)
        context.insert_after_backward_op(one.after)

    def figures(self) -> Any:
        """All that was added, by id."""
        sums = {
            op_id: (one.executions, one.amount, one.unknown, one.last)
            for op_id, one in self.sums.items()
        }
        return self.total.count, sums


def _sizes(shapes: Any) -> int | None:
    """The elements of all tensors; unknown of scalars alone."""
    known = [shape.numel() for part in shapes for shape in part if shape]
    return sum(known) if known else None


@pytest.mark.parametrize("passes", [_to_everything, _second_pass, _for_chosen_inputs])
def test_sums_over_shapes_are_those_of_the_mode(
    monkeypatch: pytest.MonkeyPatch, passes: BackwardPasses
) -> None:
    """Sums in captured modules have the executions and the numbers of eager mode, with other sizes
    and other calls between, forward and backward."""
    figures = []
    for interceptor in ("mode", "capture"):
        monkeypatch.setenv(VARIABLE, interceptor)
        torch.manual_seed(0)
        model, tool = Branches(), Sums()
        with applied(tool):
            for size in (3, 3, 3, 3, 3, 3, 3, 5, 5, 5, 5, 5, 3, 3, 5):
                model.zero_grad()
                passes(model, model(torch.ones(size, 4)))
                amanda.new_iteration()
        figures.append(tool.figures())
    assert figures[0] == figures[1]


def test_sums_in_the_code_of_a_graph_take_no_function_of_ours() -> None:
    """A captured call runs no more functions of ours with more operators that are added up."""
    calls = []
    for layers in (4, 24):
        model, tool = nn.Sequential(*[nn.ReLU() for _ in range(layers)]), Sums()
        with applied(tool):
            for _ in range(14):
                infer(model, torch.rand(3, 4))
            _, run = profiled(functools.partial(infer, model, torch.rand(3, 4)))
        # The sums themselves, once the run has ended.
        run.codes[:] = [code for code in run.codes if code is not inline.ShapeSum.add.__code__]
        calls.append(str(run))
    assert calls[0] == calls[1]
