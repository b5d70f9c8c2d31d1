"""Campaigns of ``inject``: outcomes against a recomputation by hand, resume, bad programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.inject import InjectTool
from tests import models


class Classifier(nn.Module):
    """Two layers, of which the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.two(self.two(self.one(x).relu()).relu())


@pytest.fixture
def run() -> Any:
    model, x = Classifier(), torch.rand(3, 4)
    return lambda: model(x)


def test_outcomes_are_those_of_the_same_faults_by_hand(run: Any) -> None:
    """Each trial's fault, put into the same activation by a module hook, ends the same."""
    tool = InjectTool(ops=["linear"], seed=7)
    campaign = tool.campaign(run, 60)
    model = run.__closure__[0].cell_contents
    golden = run().detach()
    for trial in campaign.trials:
        (fault,) = trial.faults
        name = trial.op.partition("/")[0].partition(".")[2]
        path, _, call = name.partition("#")
        calls = [0]

        def hook(_m: Any, _i: Any, y: Any, calls: Any = calls, k: Any = int(call or 0)) -> Any:
            calls[0] += 1
            if calls[0] - 1 != k:
                return None
            y = y.detach().clone()
            assert y.view(-1)[fault["position"]] == float(fault["before"])  # noqa: B023
            y.view(-1)[fault["position"]] = float(fault["after"])  # noqa: B023
            return y

        handle = model.get_submodule(path).register_forward_hook(hook)
        found = run().detach()
        handle.remove()
        if torch.equal(found, golden):
            expected = "masked"
        elif not torch.isfinite(found).all():
            expected = "not_finite"
        else:
            wrong = not torch.equal(found.argmax(1), golden.argmax(1))
            expected = "wrong" if wrong else "tolerable"
        assert trial.outcome == expected
    assert len({trial.outcome for trial in campaign.trials}) >= 3
    assert campaign.sdc_rate == campaign.count("wrong") / 60
    low, high = campaign.sdc_interval
    assert 0 <= low < campaign.sdc_rate < high < 1


def test_operators_are_hit_in_proportion_to_their_elements() -> None:
    model = nn.Sequential(nn.Linear(4, 60), nn.Linear(60, 20))
    x = torch.rand(1, 4)
    campaign = InjectTool(ops=["linear"]).campaign(lambda: model(x), 200)
    counts = [sum(t.op == f"Sequential.{i}/linear:0" for t in campaign.trials) for i in (0, 1)]
    assert sum(counts) == 200
    assert 125 < counts[0] < 175


def test_an_interrupted_campaign_goes_on_as_if_it_had_not_been(run: Any, tmp_path: Path) -> None:
    expected = InjectTool(ops=["linear"]).campaign(run, 20)
    path = tmp_path / "campaign.jsonl"

    def interrupt(done: int, _: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        InjectTool(ops=["linear"]).campaign(run, 20, path=str(path), progress=interrupt)
    with path.open("a") as file:
        file.write('{"number": 8, "op": "Cl')  # cut off while it was written
    seen: list[int] = []
    again = InjectTool(ops=["linear"]).campaign(
        run, 20, path=str(path), progress=lambda done, _: seen.append(done)
    )
    assert seen == list(range(9, 21))
    assert again == expected
    assert len(path.read_text().splitlines()) == 21
    assert InjectTool(ops=["linear"]).campaign(run, 20, path=str(path)) == expected


def test_a_file_of_another_campaign_is_refused(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "campaign.jsonl")
    InjectTool(ops=["linear"]).campaign(run, 2, path=path)
    with pytest.raises(AmandaError, match="a campaign with other options"):
        InjectTool(ops=["linear"], seed=1).campaign(run, 2, path=path)


def test_functions_without_modules_have_campaigns_too() -> None:
    x, weight = torch.rand(3, 4), torch.rand(5, 4)
    campaign = InjectTool(ops=["linear"]).campaign(lambda: nn.functional.linear(x, weight), 10)
    assert {trial.op for trial in campaign.trials} == {"/linear:0"}


def test_exceptions_are_an_outcome(run: Any) -> None:
    """Of a fault: one that comes without is the program's own, and raised."""

    def strict() -> Any:
        y = run()
        if y.abs().max() > 10:
            raise ArithmeticError("too large")
        return y

    campaign = InjectTool(ops=["linear"], fault="value", value=1e6).campaign(strict, 10)
    assert campaign.count("error") == 10

    def broken() -> Any:
        run()
        raise ArithmeticError("always")

    with pytest.raises(ArithmeticError, match="always"):
        InjectTool(ops=["linear"]).campaign(broken, 10)


def test_a_users_criterion_decides(run: Any) -> None:
    tool = InjectTool(ops=["linear"], fault="normal", std=1e-3)
    assert tool.campaign(run, 10).count("wrong") == 0
    assert tool.campaign(run, 10, is_wrong=lambda a, b: True).count("tolerable") == 0


def test_programs_that_cannot_be_compared_are_refused(run: Any) -> None:
    with pytest.raises(AmandaError, match="gives another output when it runs again"):
        InjectTool(ops=["linear"]).campaign(lambda: run() + torch.rand(1), 3)
    with pytest.raises(AmandaError, match="no operator of the types conv3d"):
        InjectTool(ops=["conv3d"]).campaign(run, 3)


def test_a_campaign_leaves_the_tool_and_the_model_as_they_were(run: Any) -> None:
    golden = run().detach()
    tool = InjectTool(ops=["linear"], target="weights")
    tool.campaign(run, 5)
    assert torch.equal(run(), golden)
    with amanda.apply(tool):
        assert not torch.equal(run(), golden)


@pytest.mark.parametrize("target", ["outputs", "weights"])
def test_a_campaign_on_a_real_model(target: str) -> None:
    """Outputs that are a mapping; rates by operator and bit; plain data."""
    model, inputs = models.build("bert", training=False)
    tool = InjectTool(ops=["linear", "attention"], target=target)
    with torch.no_grad():
        campaign = tool.campaign(lambda: model(**inputs), 12)
    found = json.loads(json.dumps(campaign.to_dict()))
    assert sum(found["outcomes"].values()) == found["trials"] == 12
    assert sum(sum(counts.values()) for counts in found["by_bit"].values()) == 12
    assert sum(sum(counts.values()) for counts in found["by_op"].values()) == 12
