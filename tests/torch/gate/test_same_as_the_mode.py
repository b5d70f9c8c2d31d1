"""Tools see by the gate what they see by the mode, and change nothing by either."""

from __future__ import annotations

import collections
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import InPlaceWarning
from amanda.inline import Log
from amanda.state import STATE
from tests.torch.gate.programs import BOTH, PROGRAMS, Doubled, intercepted, needs_gate, steps
from tests.torch.gate.tools import Around, Checks, Ids, Inlined, Measured, Returning, Sums
from tests.torch.support import Counter

pytestmark = needs_gate

TOOLS: dict[str, Callable[[], Any]] = {
    "watching": lambda: Ids(acts=False),
    "acting": lambda: Ids(acts=True),
    "routines": Around,
    "counters": lambda: Measured(times=False),
    "timers": lambda: Measured(times=True),
    "counters, timers and memory": lambda: Inlined(Log(), itertools.count(10, 10).__next__),
    "checks": Checks,
    "sums": Sums,
}


@pytest.mark.parametrize("make", TOOLS.values(), ids=list(TOOLS))
@pytest.mark.parametrize("name", PROGRAMS)
def test_tools_see_the_same(name: str, make: Callable[[], Any]) -> None:
    """A tool sees the same operators, in the same order and at the same ids, is given the same
    tensors, and counts, adds up and finds the same by the gate and by the mode; and results,
    gradients and random numbers stay the same bits."""
    vanilla, seen = str(steps(PROGRAMS[name]())), {}
    for interceptor in BOTH:
        tool, program = make(), PROGRAMS[name]()
        with intercepted(interceptor, tool):
            assert str(steps(program)) == vanilla
        seen[interceptor] = tool.found()
    assert seen["gate"] == seen["mode"]
    assert any(seen["gate"]) or name == "ignored"


@pytest.mark.parametrize("make", [Around, Checks, Sums])
def test_what_routines_are_given_is_not_kept(make: Callable[[], amanda.Tool]) -> None:
    """Inputs, outputs and gradients die when the program drops them, also where Python is asked."""
    references: list[weakref.ref[torch.Tensor]] = []
    with intercepted("gate", make()):
        for start in (1.0, 1.0, 1.0, 0.0):
            x = torch.full((3,), start, requires_grad=True)
            y, *_ = torch.stack([x.mul(1.0), x]).chunk(2)
            z = torch.log(y).sum()
            z.backward()
            references += [weakref.ref(t) for t in (x, y, z)]
            del x, y, z, _
            amanda.new_iteration()
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


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


def test_what_is_told_of_a_loss_holds_for_the_loss_alone() -> None:
    """Operators of one name are those of a loss, of metrics, of parameters and of data, in turns,
    with the ids of the mode."""
    found = []
    for interceptor in BOTH:
        with intercepted(interceptor, tool := Counter()):
            _losses_and_metrics()
        found.append(tool.ids)
    assert found[0] == found[1]
    assert collections.Counter(found[0])["/mul:0"] >= 4
    assert any(op_id.startswith("/other/") for op_id in found[0])


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


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("at", ["before 0", "before 1", "after 0", "after 1"])
@pytest.mark.parametrize("name", ACTS)
def test_what_routines_do_means_the_same(name: str, at: str, training: bool) -> None:
    """What a routine returns, raises or writes to has the effect that it has without the gate."""
    found = {}
    for interceptor in BOTH:
        tool = Returning(ACTS[name], at)
        found[interceptor] = [], tool.seen
        w = torch.full((2,), 3.0, requires_grad=training)
        catching = warnings.catch_warnings(record=True)
        with intercepted(interceptor, tool), catching as told:
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


def test_a_warning_of_a_change_names_the_line() -> None:
    """Where a routine changes a tensor in place, the warning names a line of the program."""
    x, files = torch.ones(2), []
    with intercepted("gate", Returning(_writes, "before 0")):
        for _ in range(4):
            with pytest.warns(InPlaceWarning, match="changed a tensor of op /mul:0") as told:
                _ = x * 2.0
            files.append([one.filename for one in told])
            amanda.new_iteration()
    assert files[-1] == [__file__]


UNKNOWN: dict[str, Callable[[], torch.Tensor]] = {
    "an infinity": lambda: torch.tensor([1.0, float("inf")]),
    "a sum that overflows": lambda: torch.full((100,), 60000.0).half(),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: (torch.eye(2) * math.inf).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(2, device="meta"),
    "a subclass": lambda: torch.ones(2).as_subclass(Doubled),
}


@pytest.mark.filterwarnings("ignore:.*(quantiz|[Ss]parse)")
@pytest.mark.parametrize("name", UNKNOWN)
def test_checks_ask_about_tensors_of_every_kind(name: str) -> None:
    """A check asks about tensors of each kind at each execution, by the gate as by the mode."""
    asked = {}
    for interceptor in BOTH:
        x, tool, counts = UNKNOWN[name](), Checks(), []
        with intercepted(interceptor, tool):
            for _ in range(4):
                tool.asked.clear()
                x.clone()
                counts.append(list(tool.asked))
                amanda.new_iteration()
        asked[interceptor] = counts[1:], tool.errors
    assert asked["gate"][0] == asked["mode"][0] == [asked["mode"][0][0]] * 3
    assert asked["gate"] == asked["mode"]
    assert asked["gate"][0][0]
