"""``nan``: the operator that produces NaN or infinities, and not one that passes them on."""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CapabilityError
from amanda_tools.nan import NanTool, NonFiniteError, NonFiniteWarning
from amanda_tools.nan.events import statistics
from tests import models
from tests.running import line_of, run_python


class Planted(nn.Module):
    """A block whose functional line overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x).relu() + 1
        h = h * 1e30 * 1e30  # planted here
        return torch.sigmoid(h)


def searched(run: Callable[[], Any], **options: Any) -> NanTool:
    tool = NanTool(**{"action": "record", **options})
    with amanda.apply(tool):
        run()
    return tool


def first(run: Callable[[], Any], **options: Any) -> Any:
    return searched(run, **options).summary()["first"]


# -- which operator ----------------------------------------------------------


def test_a_product_in_eight_bits() -> None:
    """Numbers of eight bits are looked at, for which PyTorch has few kernels."""
    found = first(lambda: torch.full((3,), 1e9).to(torch.float8_e5m2))
    assert found["type"] == "to"


def test_the_planted_product_is_named_with_its_line() -> None:
    """The second multiplication overflows: it is named, with module path and line."""
    model = nn.Sequential(Planted(), nn.Linear(4, 1))
    found = first(lambda: model(torch.rand(2, 4)))
    source = found.pop("source")
    assert source.endswith(f"test_nan.py:{line_of(__file__, '# planted here')}")
    assert found == {
        "id": "Sequential.0/mul:1",
        "type": "mul",
        "name": "mul",
        "module": "0",
        "direction": "forward",
        "kind": "inf",
        "fate": "masked",
        "parameter": None,
    }


PRODUCERS: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    "log of zero": (lambda x: torch.log(x - x), "log", "inf"),
    "zero by zero": (lambda x: (x - x) / (x - x), "div", "nan"),
    "square root": (lambda x: torch.sqrt(-1 - x), "sqrt", "nan"),
    "exponential": (lambda x: torch.exp(x + 1000), "exp", "inf"),
    "half precision": (lambda x: (x + 1000).half() * 1000, "mul", "inf"),
    "conversion": (lambda x: (x + 1e10).half().double(), "half", "inf"),
    "linear": (lambda x: nn.functional.linear(x + 1e30, x.T + 1e30), "linear", "inf"),
    "power in place": (lambda x: (x + 1e30).pow_(3), "pow", "inf"),
    "infinity minus infinity": (
        lambda x: torch.full_like(x, float("inf")) - torch.full_like(x, float("inf")),
        "sub",
        "nan",
    ),
    "softmax of masked rows": (
        lambda x: x.masked_fill(x > -1, float("-inf")).softmax(-1),
        "softmax",
        "nan",
    ),
    "sum": (lambda x: (x + 2e38).sum(), "sum", "inf"),
    "second output": (lambda x: torch.frexp(x)[0] / 0 * 0, "div", "inf"),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_forward_producers(name: str) -> None:
    """Overflow, undefined functions, infinities that meet, narrow types, in place."""
    function, kind, what = PRODUCERS[name]
    found = first(lambda: torch.relu(function(torch.rand(3, 3)) * 2))
    assert (found["type"], found["kind"], found["direction"]) == (kind, what, "forward")


def test_half_precision_that_is_fine() -> None:
    """Finite numbers whose sum overflows are no finding."""
    x = torch.full((4000,), 30000.0).half()
    assert first(lambda: x * 1) is None


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: torch.complex(x, x),
    "coo": torch.Tensor.to_sparse_coo,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((3, 3)),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_are_looked_at(kind: str) -> None:
    """Complex, sparse and nested tensors are looked at: the operator is named that overflows, and
    not the next one that gives real numbers of a dense tensor."""
    x = KINDS[kind](torch.full((3, 3), 6e4))

    def run() -> None:
        y = x * 1e30 * 1e30
        y.unbind() if y.is_nested else y.to_dense().abs()

    tool = searched(run)
    assert tool.summary()["first"]["id"] == "/mul:1"
    assert tool.summary()["not_looked_at"] == {}
    assert tool.events[0].outputs[0] is not None
    assert tool.events[0].outputs[0]["nan"] + tool.events[0].outputs[0]["posinf"] > 0


def test_tensors_without_numbers_are_counted() -> None:
    """Tensors that hold no numbers to look at are counted by kind, in the result and on screen."""
    tool = searched(lambda: torch.zeros(2, device="meta").log())
    assert tool.summary()["not_looked_at"] == {"meta": 2}
    [table] = [table for table in tool.tables() if "not looked at" in table.title]
    assert table.rows == [("meta", 2)]


PASSED_ON: dict[str, Callable[[torch.Tensor], Any]] = {
    "masks of attention": lambda x: x.masked_fill(x > 0.5, float("-inf")).clamp(min=-1).softmax(-1),
    "added masks": lambda x: (x + torch.full((3, 3), float("-inf")).triu(1)).softmax(-1),
    "uninitialized memory": lambda x: torch.empty(1000, 100) is x,
    "maxima from below": lambda x: torch.maximum(x, torch.full_like(x, float("-inf"))),
    "integers": lambda x: (x * 1000).int() // 3,
    "complex": lambda x: torch.complex(x, x) * 2,
    "eight bits": lambda x: x.to(torch.float8_e4m3fn).float(),
    "four bits": lambda x: (x * 9).to(torch.uint8).view(torch.float4_e2m1fn_x2).view(torch.uint8),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_infinities_that_a_program_means(name: str) -> None:
    """Masks and their like are no finding."""
    tool = searched(lambda: PASSED_ON[name](torch.rand(3, 3)))
    assert tool.summary()["first"] is None


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2", "llama", "vit", "lstm"])
def test_healthy_models(name: str) -> None:
    """A training step of a healthy model has no finding."""
    model, inputs = models.build(name)
    tool = searched(lambda: models.loss(model(**inputs)).backward())
    assert tool.summary()["first"] is None
    assert tool.summary()["watched"] > 10


def test_a_nan_of_the_data_is_nobodys_product() -> None:
    """What came in as NaN is passed on, forward and backward; who read it first is said."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 1))
    data = torch.tensor([[1.0, float("nan")]])
    tool = searched(lambda: model(data).sum().backward())
    summary = tool.summary()
    assert summary["first"] is None
    assert summary["received"]["id"] == "Sequential.0/linear:0"
    assert summary["received"]["input"] == "input"
    out = io.StringIO()
    tool.print_summary(out)
    assert "no operator produced" in " ".join(out.getvalue().split())


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_a_broken_parameter_or_buffer_is_named_where_it_is_read(name: str) -> None:
    """A tensor of a model that is NaN is received, by name, and is no data."""
    layer = nn.BatchNorm1d(2).eval()
    layer.state_dict()[name].fill_(float("nan"))
    with pytest.warns(NonFiniteWarning, match=r"^a (parameter|buffer) of the model|^parameter"):
        received = searched(lambda: layer(torch.rand(1, 2)), action="warn").summary()["received"]
    kinds = received["is_parameter"], received["is_state"]
    assert (received["input"], kinds) == (name, (name == "weight", name != "weight"))


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: nn.functional.embedding(torch.tensor([1]), weight),
        lambda weight: weight.t().contiguous()[:, 1],
        lambda weight: weight.detach().gather(0, torch.tensor([[1, 1]])),
        lambda weight: weight[1:].to(torch.float64),
    ],
)
def test_a_parameter_is_named_through_operators_that_move_its_elements(
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A NaN that a moving operator has read from a parameter is the parameter's, and no data."""
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))

    class Net(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.tanh(read(weight) * 2)

    summary = searched(lambda: Net()()).summary()
    assert summary["first"] is None
    assert summary["received"]["is_parameter"]


class Root(nn.Module):
    """The root of a parameter that is zero: its slope is infinite, and times zero NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.scale = nn.Embedding(3, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x) + self.scale.sqrt() * 0


def test_a_nan_names_the_parameter_that_holds_it() -> None:
    """A NaN row of an embedding, a gradient and what an optimizer writes have the path."""
    model = nn.Sequential(Root())
    tool = searched(lambda: model(torch.tensor([0])).sum().backward())
    first = tool.summary()["first"]
    assert (first["parameter"], first["direction"]) == ("0.scale", "backward")
    assert "in the gradient of 0.scale: op" in next(iter(tool.tables())).title
    with torch.no_grad():
        model[0].emb.weight[1] = float("nan")
    received = searched(lambda: model(torch.tensor([0, 1]))).summary()["received"]
    assert (received["parameter"], received["is_parameter"]) == ("0.emb.weight", True)
    for form in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        layer = nn.Sequential(nn.Linear(2, 2, bias=False))
        optimizer = torch.optim.Adam(layer.parameters(), lr=math.inf, eps=0, **form)

        def step(layer: Any = layer, optimizer: Any = optimizer) -> None:
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        first = searched(step).summary()["first"]
        assert (first["parameter"], first["direction"]) == ("0.weight", "forward")


def test_a_list_of_other_tensors_has_no_name_of_a_parameter() -> None:
    """Where an operator gets a list of another length than before."""
    model = nn.Linear(2, 2)

    def run() -> None:
        with torch.no_grad():
            model(torch.ones(1, 2))
            torch._foreach_log_([torch.ones(2), model.bias.abs_()])
            amanda.new_iteration()
            torch._foreach_log_([torch.zeros(2)])

    assert [event.parameter for event in searched(run).events] == [None]


def test_a_nan_in_a_parameter_cannot_be_overlooked() -> None:
    """It is a warning, and the first line of the summary, also before operators at fault."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")

    def run() -> None:
        layer(torch.rand(1, 2))
        torch.log(torch.zeros(2))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tool = searched(run, action="warn")
    assert "parameter weight of the model holds NaN: weight of op Linear/linear:0" in str(
        caught[0].message
    )
    titles = [table.title for table in tool.tables()]
    assert titles[0].startswith("nan: parameter weight of the model holds NaN: weight of op Linear")
    assert "log produced an infinity" in titles[1]
    data = searched(lambda: layer.bias + torch.tensor([1.0, float("nan")]), action="warn")
    assert next(iter(data.tables())).title.startswith("nan: data of the program holds NaN: other")


class Buckets(nn.Module):
    """Takes the logarithm of a zero and drops it, as relative positions do; may fail later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.tensor([0.0, 1.0, 2.0])
        buckets = torch.log(positions).long()
        y = self.fc(x) + torch.where(positions < 1, 0, buckets).sum()
        return y / (y - y) if self.fails else y


def bucketed(*fails: bool) -> NanTool:
    """Trains for as many steps, some of which fail."""
    model = Buckets()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        for model.fails in fails:
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()

    return searched(run, action="warn")


def test_an_infinity_that_is_masked_is_no_finding() -> None:
    """It is said to be masked, without a warning, and comes after an operator whose NaN reaches the
    outputs of the model or a gradient; an operator that was masked before is not to blame."""
    tool = bucketed(False, False)
    assert tool.findings() == []
    assert tool.summary()["first"]["fate"] == "masked"
    first, second, *_ = tool.tables()
    assert first.title.startswith("nan: no operator's NaN or infinity reached an output of")
    assert "reached no output" in second.title
    with pytest.warns(NonFiniteWarning, match="div produced") as caught:
        tool = bucketed(False, True, True)
    assert len(caught) == 1
    assert tool.summary()["first"]["id"] == "Buckets/div:0"
    assert tool.replay is not None
    assert tool.replay.op.id == "Buckets/div:0"
    [folded] = [table.rows for table in tool.tables() if "masked" in table.title]
    assert [(row[0], *row[3:]) for row in folded] == [("Buckets/log:0", 3, "masked")]


class Dropping(nn.Module):
    """Takes the logarithm of a zero, and drops it unless told to keep it."""

    def __init__(
        self, *, keeps: bool = False, after: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    ) -> None:
        super().__init__()
        self.fc, self.keeps, self.after = nn.Linear(4, 4), keeps, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lost = torch.log(torch.zeros(1))
        return self.after(self.fc(x) + (lost if self.keeps else 0))


@pytest.mark.parametrize("skips", [True, False])
def test_an_overflow_that_a_gradient_scaler_skips_is_no_finding(skips: bool) -> None:
    """The scaler provokes it and leaves the parameters alone; without a scaler it is a finding."""
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, enabled=skips)

    def run() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)) * (1 if skips else 3e38)).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    if not skips:
        with pytest.warns(NonFiniteWarning):
            assert searched(run, action="warn").summary()["first"]["fate"] == "reached"
        return
    tool = searched(run, action="warn")
    assert scaler.get_scale() < 2.0**126
    assert (tool.findings(), tool.summary()["first"]["fate"]) == ([], "skipped")
    assert next(iter(tool.tables())).title.endswith("but in steps that were skipped")


@pytest.mark.parametrize(
    ("updates", "fate"),
    [
        ("never", "skipped"),
        ("before", "reached"),
        ("after", "reached"),
        ("with others", "masked"),
        ("after the program", "masked"),
    ],
)
def test_an_optimizer_that_looks_at_gradients_and_drops_them_skips(updates: str, fate: str) -> None:
    """A gradient that an optimizer finds not to be finite reaches nothing if the update is left
    out, as Keras' loss scaling does; it is masked if the optimizer or the program replaces it, and
    a finding if the optimizer writes it, before or after the look."""

    def mask() -> None:
        for p in model.parameters():
            p.grad = torch.where(torch.isfinite(p.grad), p.grad, 0.0)  # type: ignore[arg-type]

    class Scaling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if updates == "before":
                super().step(closure)
            finite = all(torch.isfinite(p.grad).all() for p in self.param_groups[0]["params"])
            if updates == "with others":
                mask()
            if updates in ("after", "with others", "after the program") or (
                finite and updates == "never"
            ):
                super().step(closure)

    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    optimizer = Scaling(model.parameters(), 0.1)

    def run() -> None:
        for factor in (1.0, 1e30):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) * factor).square().sum().backward()
            if updates == "after the program":
                mask()
            optimizer.step()

    assert {event.fate for event in searched(run).events} == {fate}


@pytest.mark.parametrize("steps", [[(0, 1), (0, 1e38), (1, 1)], [(1, 1), (0, 1e38)]])
def test_a_skipped_step_takes_nothing_from_other_iterations(steps: list[tuple[int, float]]) -> None:
    """What reaches the outputs before or after a skipped step is a finding."""
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def run() -> None:
        for keeps, factor in steps:
            optimizer.zero_grad()
            model.keeps = bool(keeps)
            scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.warns(NonFiniteWarning, match="log produced"):
        tool = searched(run, action="warn")
    assert scaler.get_scale() < 64
    assert tool.events[0].fate == "reached"
    assert min(tool.events[0].fates.values()) >= 0


def test_a_rank_tells_of_what_follows_skipped_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with its number and the step, as of the steps that are skipped then; also if the
    operator is one that steps were skipped for."""
    monkeypatch.setattr("amanda_tools.nan.current_rank", lambda: (1, 2))
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)

    def run() -> None:
        for step in range(7):
            optimizer.zero_grad()
            output = model(torch.ones(2, 4))
            loss = (output - 1e9).sqrt().sum() if step >= 5 else output.square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    searched(run, action="warn")
    told = re.findall(r"amanda: nan: rank 1, step (\d): (\w+)", capsys.readouterr().err)
    assert told[0][0] == "0"
    assert told[-2:] == [("5", "sqrt"), ("6", "sqrt")]


def test_each_forward_pass_of_an_iteration_decides_about_its_own() -> None:
    """An infinity in the outputs of one model has reached them, whatever another model gives."""
    first, second = Dropping(keeps=True), Dropping()

    def run() -> None:
        kept = first(torch.ones(2, 4)).detach().clamp(max=1)
        between = torch.log(torch.zeros(1)).clamp(min=0)
        loss = second(torch.ones(2, 4)).sum() + kept.sum() + between
        loss.sum().backward()

    events = searched(run).events
    assert [event.op.id for event in events] == ["Dropping/log:0", "/log:0", "Dropping@1/log:0"]
    assert [event.fate for event in events] == ["reached", "reached", "masked"]


def test_passes_after_the_last_step_are_decided_too() -> None:
    """What an evaluation after training has masked is masked; what a loss holds that has no
    gradient is not known to be."""
    # The smallest of the random outputs is zero.
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def run() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            Dropping(after=torch.relu)(torch.ones(2, 4)).min().log()

    tool = searched(run)
    fates = {event.op.id: event.fate for event in tool.events}
    assert fates == {"Dropping/log:0": "masked", "Dropping@1/log:0": "masked", "/log:0": ""}
    assert "is not known" in next(iter(tool.tables())).title


def test_what_has_become_of_it_is_not_known_without_outputs() -> None:
    """A forward pass that raises shows no outputs: what it produced is not said to be masked."""
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        with pytest.raises(ZeroDivisionError):
            Dropping(after=lambda _: 1 / 0)(torch.ones(2, 4))
        x.sum().backward()  # type: ignore[no-untyped-call]

    tool = searched(run)
    assert [event.fate for event in tool.events] == [""]
    assert tool.findings() == tool.events


# -- backward -----------------------------------------------------------------


@pytest.mark.parametrize("form", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_an_optimizer_that_makes_a_nan_is_named(name: str, form: str) -> None:
    """The operator that updates the parameters has produced it, in each form of an optimizer."""
    options: dict[str, Any] = {"lr": math.inf} if name == "SGD" else {"eps": 0.0}
    options |= {"fused": form == "fused", "foreach": form == "foreach"}
    net, tool = nn.Linear(2, 1), NanTool(action="record")
    optimizer = getattr(torch.optim, name)(net.parameters(), **options)
    with amanda.apply(tool):
        net(torch.zeros(2, 2)).sum().mul(0).backward()
        optimizer.step()
        net(torch.ones(2, 2))
    ops = {"fused": f"_fused_{name.lower()}_", "foreach": "_foreach_add", "loop": "add"}
    summary = tool.summary()
    assert summary["first"]["id"].startswith(f"/optimizer/{ops[form]}")
    assert summary["received"] is None


def test_a_gradient_that_is_infinite_although_the_value_is_fine() -> None:
    """The root of zero is zero and its slope infinite: the backward operator is named, with the
    forward operator's line."""
    x = torch.zeros(2, requires_grad=True)

    def run() -> None:
        y = torch.sqrt(x)  # rooted here
        (y * 2).sum().backward()

    found = first(run)
    assert found["direction"] == "backward"
    assert (found["type"], found["name"]) == ("sqrt_backward", "SqrtBackward0")
    assert found["source"].endswith(f"test_nan.py:{line_of(__file__, '# rooted here')}")


def test_the_forward_pass_comes_first() -> None:
    """Of a product in both passes the forward one is the first."""
    x = torch.zeros(2, requires_grad=True)
    tool = searched(lambda: torch.log(x).sum().backward())
    assert tool.summary()["first"]["direction"] == "forward"
    assert [event.op.direction for event in tool.events] == ["forward", "backward"]


# -- options ------------------------------------------------------------------


class Clipped(nn.Module):
    """A layer whose weight is made from infinities, as samples of a clipped distribution may be."""

    def __init__(self, *, clips: bool, breaks: bool = False) -> None:
        super().__init__()
        weight = torch.tensor([-1.0, 0.25, 0.5]).erfinv()
        self.weight = nn.Parameter(weight.clamp(-2, 2) if clips else weight)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        return torch.log(h - h) if self.breaks else h


def trained(*, action: str = "record", **options: bool) -> NanTool:
    def run() -> None:
        Clipped(**options)(torch.ones(3)).sum().backward()

    return searched(run, action=action)


def test_an_infinity_that_building_the_model_removes_is_no_finding() -> None:
    """It is told aside; the first finding, and the inputs that are kept, are the model's."""
    tool = trained(clips=True)
    assert tool.summary()["first"] is None
    titles = [table.title for table in tool.tables()]
    assert titles[0].startswith("nan: no operator of the model produced any, of ")
    assert titles[1] == "nan: made while the model was built, and removed before it was used"
    assert [row["phase"] for row in tool.result()["ops"]] == ["setup"]
    tool = trained(clips=True, breaks=True)
    assert tool.summary()["first"]["type"] == "log"
    assert tool.replay is not None
    assert tool.replay.op.type == "log"


def test_an_infinity_of_building_that_the_model_receives_is_the_first_finding() -> None:
    """It is blamed on the operator that made it, not on those that pass it on."""
    tool = trained(clips=False)
    assert tool.summary()["first"]["type"] == "erfinv"
    assert "erfinv produced an infinity" in next(table.title for table in tool.tables())


def test_abort_stops_at_the_operator() -> None:
    """The program gets an error that names the operator; its traceback leads to the line."""
    model = nn.Sequential(Planted(), nn.Linear(4, 1))
    with pytest.raises(NonFiniteError, match=r"mul produced an infinity.*Sequential.0/mul:1") as e:
        searched(lambda: model(torch.rand(2, 4)), action="abort")
    lines = [entry.lineno + 1 for entry in e.traceback if entry.path.name == "test_nan.py"]
    assert line_of(__file__, "# planted here") in lines


def test_abort_raises_at_each_operator_of_the_model() -> None:
    """Not while the model is built, but again where the program has caught the first error."""
    assert [event.op.type for event in trained(clips=True, action="abort").events] == ["erfinv"]
    with pytest.raises(NonFiniteError, match="log produced"):
        trained(clips=True, breaks=True, action="abort")

    def run() -> None:
        model = Dropping()
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="log produced"):
                model(torch.ones(2, 4))
        with pytest.raises(NonFiniteError, match="sqrt produced"):
            torch.sqrt(torch.rand(2) - 2)

    searched(run, action="abort")


def test_a_message_says_what_is_true() -> None:
    """A NaN may come from infinities, an infinity comes from finite inputs."""
    infinity = torch.full((2,), math.inf)
    [event] = searched(lambda: infinity - infinity).events
    assert "sub produced NaN from inputs without NaN" in event.message()
    [event] = searched(lambda: torch.zeros(2).log()).events
    assert "log produced an infinity from finite inputs" in event.message()


def test_warn_points_at_the_line() -> None:
    """By default a warning is given, once, at the user's line."""
    with pytest.warns(NonFiniteWarning, match="produced NaN") as caught:
        searched(lambda: [torch.sqrt(torch.rand(2) - 2) for _ in range(3)], action="warn")
    assert [warning.filename.endswith("test_nan.py") for warning in caught] == [True]


def test_what_may_be_ignored() -> None:
    """Types that may produce such, and infinities altogether."""
    x = torch.zeros(2)
    assert first(lambda: torch.log(x), ignore="log") is None
    assert first(lambda: torch.log(x), inf=False) is None
    assert first(lambda: torch.log(x) - torch.log(x), inf=False)["type"] == "sub"


def test_misspelt_types_to_ignore_are_listed() -> None:
    """A type of ``ignore`` that no operator has is listed; one whose operators cannot produce a NaN
    is known, too."""
    tool = NanTool(ignore=["log", "relu", "lgo"])
    with amanda.apply(tool):
        torch.log(torch.relu(torch.ones(2)))
    assert tool.summary()["ignore_never_met"] == ["lgo"]
    assert [table.rows for table in tool.tables() if "ignore=" in table.title] == [[("lgo",)]]


def test_the_history_and_the_limit() -> None:
    """The operators watched before it, in order; no more than so many findings."""

    def run() -> None:
        x = torch.rand(2) + 1
        for i in range(4):
            x = x * (i + 1)
        for function in (torch.log, torch.sqrt, torch.acos):
            function(-x - 2)

    tool = searched(run, history=3, limit=2)
    assert [event.op.type for event in tool.events] == ["log", "sqrt"]
    # The negation only passes on, and is not watched.
    assert tool.events[0].last == ["/mul:2", "/mul:3", "/sub:0"]


def test_the_limit_goes_on_counting_recorded_ones() -> None:
    """Once the limit is reached no further operator is recorded; known ones are counted on."""
    model = nn.Sequential(Dropping(keeps=True, after=lambda h: torch.sqrt(-1 - torch.exp(-h))))

    def run() -> None:
        for _ in range(3):
            model(torch.ones(2, 4))

    [event] = searched(run, limit=1).events
    assert (event.op.type, event.times, event.fates["reached"]) == ("log", 3, 3)


# -- what is told of it -------------------------------------------------------


def test_statistics_of_inputs_and_outputs() -> None:
    """Range, moments and counts, as numpy has them."""
    x = torch.tensor([[1.0, 2.0], [3.0, 1e38]])
    [event] = searched(lambda: x * 10).events
    assert event.inputs[0] == statistics(x)
    values = x.numpy().astype(np.float64)
    assert event.inputs[0]["mean"] == pytest.approx(values.mean())
    assert event.inputs[0]["std"] == pytest.approx(values.std())
    assert event.outputs[0] is not None
    assert (event.outputs[0]["posinf"], event.outputs[0]["max"]) == (1, 30.0)
    assert event.attributes["other"] == 10


def test_the_first_one_can_be_run_again(tmp_path: Path) -> None:
    """In the process, and from the file with its inputs."""
    tool = searched(lambda: nn.functional.linear(torch.ones(1, 2) * 1e30, torch.ones(3, 2) * 1e30))
    assert tool.replay is not None
    assert torch.isinf(tool.replay.run()).all()
    [path] = tool.write_files(tmp_path, "nan")
    with np.load(path) as file:
        assert sorted(file.files) == ["0.input", "1.weight", "op"]
        again = torch.from_numpy(file["0.input"]) @ torch.from_numpy(file["1.weight"]).T
        assert json.loads(str(file["op"]))["type"] == "linear"
    assert torch.isinf(again).all()


def test_a_replay_in_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    """bfloat16 is written as float32 and said to be bfloat16."""
    tool = searched(lambda: torch.ones(2).bfloat16() * 1e38 * 100)
    [path] = tool.write_files(tmp_path, "nan")
    with np.load(path) as file:
        assert file["0.input"].dtype == np.float32
        assert json.loads(str(file["op"]))["dtypes"] == {"0.input": "bfloat16"}


def test_what_an_operator_has_overwritten_is_said() -> None:
    """The input of an in-place operator is gone when it is known to have been interesting."""
    [event] = searched(lambda: torch.full((2,), 1e30).mul_(1e30)).events
    assert event.overwritten == [0]


def test_a_backward_operator_cannot_be_run_alone() -> None:
    """Its gradients are there; running it needs what autograd has saved."""
    tool = searched(lambda: torch.sqrt(torch.zeros(2, requires_grad=True)).sum().backward())
    assert tool.replay is not None
    assert len(tool.replay.inputs) == 1
    with pytest.raises(CapabilityError, match="SqrtBackward0"):
        tool.replay.run()


# -- other ways ---------------------------------------------------------------


PROGRAM = """
import torch
x = torch.rand(3)
for step in range(3):
    x = x * 1e30
print("end")
"""


@pytest.mark.parametrize(("action", "status"), [("warn", 0), ("abort", 1), ("record", 0)])
def test_from_the_command_line(action: str, status: int, tmp_path: Path) -> None:
    """The program goes on, or ends with a traceback; the results are written all the same."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "amanda", "run", "-t", f"nan:action={action}", "-o", "out", "program.py"]
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert ("end" in done.stdout) is (status == 0)
    assert ("mul produced an infinity" in done.stderr) is (action != "record")
    found = json.loads((tmp_path / "out/nan.json").read_text())["summary"]["first"]
    assert (found["id"], found["source"]) == ("/mul:1", "program.py:5")
    assert (tmp_path / "out/nan.inputs.npz").exists()
