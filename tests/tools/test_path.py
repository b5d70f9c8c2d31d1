"""The tool ``path`` on PyTorch: the choice, classes, programs of all kinds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import amanda
from amanda_tools.path import Call, NoRule, PathTool, Wanted, containment, rule, similarity
from amanda_tools.path.rules import rule_of
from amanda_tools.path.synapses import select_critical
from tests.tools.path_oracle import applied

END = "Sequential.2/linear:0"

# -- the choice itself -------------------------------------------------------------


def test_the_choice_is_the_smallest_set() -> None:
    """Against all subsets; ties, negative values, values out of reach and zeros included."""
    random = np.random.default_rng(0)
    products = random.integers(-3, 6, (200, 6)).astype(float)
    values = products.sum(axis=1) + random.integers(-4, 5, 200)
    for theta in (0.3, 0.5, 1.0):
        for row, value, mask in zip(
            products, values, select_critical(products, values, theta), strict=True
        ):
            sign = -1 if value < 0 else 1
            gains = sign * row
            goal = min(theta * abs(value), gains[gains > 0].sum())
            reaching = [
                len(subset)
                for count in range(7)
                for subset in itertools.combinations(range(6), count)
                if sum(gains[list(subset)]) >= goal - 1e-9
            ]
            assert mask.sum() == min(reaching)
            assert (gains[mask] > 0).all()
            assert gains[mask].sum() >= goal - 1e-4


def test_a_larger_theta_takes_more_and_one_takes_all_that_adds() -> None:
    """Paths grow with theta; of positive products alone theta=1 takes all."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    x = torch.rand(2, 2, 6, 6)
    tools = [applied(net, x, theta=theta) for theta in (0.2, 0.5, 0.8, 1.0)]
    for small, large in itertools.pairwise(tools):
        for a, b in zip(small.paths, large.paths, strict=True):
            for kind in ("neurons", "weights", "synapses"):
                assert containment(a, b, kind) == 1
            assert a.density("synapses") < b.density("synapses")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
            parameter += 0.1
    tool = applied(net, x + 0.1, theta=1.0)
    for path in tool.paths:
        [mask] = path.inputs.values()
        assert mask.array.all()
        weights = path.ops["Sequential.3/linear:0"].weights
        assert weights is not None
        assert weights.array[path.label].all()
        assert weights.count == 64


# -- classes -----------------------------------------------------------------------


def test_digits_have_paths_of_their_class() -> None:
    """A small net on real digits: a digit's path is more like its class's than like others'."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(data.target)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        batch = torch.randint(0, 1200, (128,))
        functional.cross_entropy(net(images[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (net(images[1200:]).argmax(1) == targets[1200:]).float().mean() > 0.85
    profiled = PathTool()
    with torch.no_grad(), amanda.apply(profiled):
        for start in range(0, 200, 50):
            net(images[start : start + 50])
    assert sum(profiled.counts.values()) == len(profiled.paths) == 200
    fresh = applied(net, images[1200:1240])
    own, others = [], []
    for path in fresh.paths:
        for label in range(10):
            found = containment(path, profiled.class_paths[label], "weights")
            (own if label == path.label else others).append(found)
    assert np.mean(own) > np.mean(others) + 0.1
    ranks = np.array(
        [
            np.argmax([similarity(p, profiled.class_paths[c], "weights") for c in range(10)])
            == p.label
            for p in fresh.paths
        ]
    )
    assert ranks.mean() > 0.6


# -- programs ----------------------------------------------------------------------


def test_what_has_no_rule_is_taken_in_full_and_listed() -> None:
    """Within the input's own rows, and never silently."""
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    tool = applied(lambda x: net[1](net[0](x).sort(dim=-1)[0]), torch.rand(2, 3))
    assert tool.summary()["unknown_ops"] == {"sort": 1}
    for path in tool.paths:
        mask = path.ops["Linear/linear:0"].neurons
        assert mask is not None
        assert mask.array.all()
        assert mask.shape == (4,)
    [row] = [row for row in tool.op_rows() if row["reason"]]
    assert (row["type"], row["reason"]) == ("sort", "no rule for its type")
    assert any("no rule fits" in table.title for table in tool.tables())


@pytest.mark.parametrize("through_view", [False, True])
def test_values_that_change_behind_an_operator_are_listed(through_view: bool) -> None:
    """What is written without an operator of the path in between is said."""
    torch.manual_seed(13)

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if through_view:
                x[:, 1].zero_()
            else:
                x[:, 1] = 0.0
            return self.head(x)

    tool = applied(Writing(), torch.rand(2, 3))
    [row] = [row for row in tool.op_rows() if row["reason"]]
    assert row["id"] == "Writing.head/linear:0"
    assert row["reason"] == "something has written into its input 0"


def test_half_precision() -> None:
    """Numbers whose products leave the range of half precision; as in full precision."""
    net = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[300.0, 200.0, 1.0], [1.0, 1.0, 1.0]]))
    x = torch.tensor([[150.0, 1.0, 2.0]])
    half = applied(net.half(), x.half() / 4)
    whole = applied(net.float(), x / 4)
    assert half.op_rows()[0]["synapses"] == whole.op_rows()[0]["synapses"] == 1
    low = applied(net.bfloat16(), x.bfloat16() / 4)
    assert low.op_rows()[0]["weights"] == 1


@pytest.mark.usefixtures("restored_table")
def test_rules_of_third_parties() -> None:
    """A registered rule is used; one that fails is not the end of the run."""
    # How many neurons are on the path depends on the weights.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def run(x: torch.Tensor) -> torch.Tensor:
        return net[1](net[0](x).sort(dim=-1)[0])

    def by_values(call: Call, wanted: Wanted) -> None:
        order = call.output(1).reshape(-1)
        rows = wanted.index // 4 * 4
        wanted.add(0, np.sort(rows + order[wanted.index]), None)

    def refused(call: Call, wanted: Wanted) -> None:
        raise NoRule("not this form")

    def broken(call: Call, wanted: Wanted) -> None:
        raise ZeroDivisionError("oh")

    rule("sort")(by_values)
    tool = applied(run, torch.rand(2, 3))
    assert tool.summary()["unknown_ops"] == {}
    assert tool.paths[0].ops["Linear/linear:0"].neurons is not None
    assert 0 < tool.paths[0].ops["Linear/linear:0"].neurons.count < 4
    for function, reason in ((refused, "not this form"), (broken, "ZeroDivisionError: oh")):
        rule("sort")(function)
        tool = applied(run, torch.rand(2, 3))
        assert [row["reason"] for row in tool.op_rows() if row["reason"]] == [reason]


@pytest.mark.usefixtures("restored_table")
def test_the_decorator_registers() -> None:
    """In place of a rule that a type has."""

    @rule("gate_a", "tanh")
    def gate(call: Call, wanted: Wanted) -> None:
        wanted.add(0, wanted.index)

    assert rule_of("gate_a") is rule_of("tanh") is gate


class Window(nn.Module):
    """Takes other elements each time."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, self.start : self.start + 3])


def test_arguments_that_change_from_pass_to_pass() -> None:
    """Each pass is taken as it was."""
    net, tool = Window(), PathTool()
    nn.init.ones_(net.head.weight)
    starts = (0, 2, 3)
    with amanda.apply(tool):
        for start in starts:
            net.start = start
            net(torch.rand(1, 6))
    for start, path in zip(starts, tool.paths, strict=True):
        [mask] = path.inputs.values()
        taken = {int(i) for i in np.flatnonzero(mask.array)}
        assert taken
        assert taken <= set(range(start, start + 3))


def test_each_input_has_the_path_that_it_has_alone() -> None:
    """A batch's paths are those of its inputs one by one."""
    torch.manual_seed(11)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    x = torch.rand(3, 2, 6, 6)
    together = applied(net, x)
    for i, path in enumerate(together.paths):
        [alone] = applied(net, x[i : i + 1]).paths
        for kind in ("neurons", "weights", "synapses"):
            assert path.density(kind) == alone.density(kind)
        assert similarity(path, alone, "neurons") == similarity(path, alone, "weights") == 1


def test_weights_are_weights_after_the_optimizer_has_written_them() -> None:
    """A script that trains: the optimizer's operators are not part of the model."""
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    tool = PathTool()
    with amanda.apply(tool):
        for _ in range(3):
            x = torch.rand(2, 6)
            functional.cross_entropy(net(x * 2 - 1), torch.tensor([1, 2])).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(tool.paths) == 6
    for path in tool.paths:
        assert set(path.ops) == {"Sequential.0/linear:0", "Sequential.1/relu:0", END}
        assert path.inputs.keys() == {"Sequential.0/linear:0:0"}
        weights = path.ops[END].weights
        assert weights is not None
        assert weights.count <= 5
    assert all(path.density("weights") for path in tool.class_paths.values())
    assert [row["weights_total"] for row in tool.op_rows()] == [30, 0, 20]


def test_a_pass_that_begins_within_the_optimizer_has_weights() -> None:
    """The loss and Adam divide outside of modules, so that Adam's second step begins a pass."""
    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = torch.optim.Adam(net.parameters(), 0.1, foreach=False)
    tool = PathTool()
    x, labels = torch.rand(1, 6), torch.tensor([1])
    with amanda.apply(tool):
        for step in range(4):
            (functional.cross_entropy(net(x), labels) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert len(tool.paths) == 4
    for path in tool.paths:
        assert path.ops.keys() == {"Sequential.0/linear:0", "Sequential.1/relu:0", END}
        assert path.inputs.keys() == {"Sequential.0/linear:0:0"}
        assert path.ops[END].weights is not None


def test_an_optimizer_that_skips_parameters_numbers_its_operators_anew() -> None:
    """What has an id in one step may have had another one in the step before."""
    torch.manual_seed(13)
    first, second = nn.Linear(6, 5), nn.Linear(5, 4)
    parameters = [*second.parameters(), *first.parameters()]
    optimizer = torch.optim.AdamW(parameters, 0.1, foreach=False)
    tool, x = PathTool(output="/optimizer/addcdiv_:2"), torch.rand(6)
    with amanda.apply(tool):
        for step in range(6):
            optimizer.zero_grad()
            (first(x) if step % 2 else second(first(x).relu())).square().sum().backward()
            optimizer.step()
    assert tool.paths


def test_a_pass_that_ends_in_a_number_is_left_out() -> None:
    """The output that was found in the first pass may be anything in a later one."""
    net, tool = nn.Softplus(), PathTool()
    with amanda.apply(tool):
        for shape in ((2, 3), (3,), (), (0,), (2, 0), (2, 3)):
            net(torch.ones(shape))
    assert len(tool.paths) == 2 + 1 + 2


def test_what_is_no_real_number_ends_the_path_and_is_listed() -> None:
    torch.manual_seed(15)

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.fft.fft(self.first(x)).abs())

    tool = applied(Spectrum(), torch.rand(2, 4))
    [skipped] = [table for table in tool.tables() if "no rule fits" in table.title]
    reasons = {kind: why for _, kind, why in skipped.rows}
    assert reasons["fft_fft"] == "its output has no real numbers: the path ends"
    assert tool.summary()["unknown_ops"] == {"fft_fft": 1}
    for path in tool.paths:
        head = path.ops["Spectrum.head/linear:0"].neurons
        first = path.ops["Spectrum.first/linear:0"].neurons
        assert (head is None or head.count, first is None or first.count) == (1, 0)


def test_an_empty_batch() -> None:
    net = nn.Linear(3, 2)
    tool = applied(lambda: (net(torch.rand(0, 3)), net(torch.rand(1, 3))))
    assert [len(tool.paths), tool.summary()["inputs"]] == [1, 1]
