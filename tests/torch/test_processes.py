"""Child processes, and what is copied or saved inside a scope."""

from __future__ import annotations

import collections
import copy
import io
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.running import run_python
from tests.torch.support import TRANSPARENT, On, after, applied

X = torch.linspace(-1, 1, 3)


# -- processes ------------------------------------------------------------


class Rows(Dataset[Any]):
    """Items that a worker makes, each telling whether it was instrumented."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.relu(torch.full((2,), float(index + 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_workers_are_vanilla(workers: int) -> None:
    """A DataLoader's worker processes run vanilla; in the main process its items are seen."""
    with applied(On(relu=after(lambda y: y * 100))):
        rows = torch.cat(list(DataLoader(Rows(), num_workers=workers)))
    factor = 1 if workers else 100
    assert rows[:, 0].tolist() == [factor * i for i in (1, 2, 3, 4)]


_PROGRAM = """
import json
import torch
from torch import nn
from tests.torch.support import Counter, applied
counter = Counter()
with applied(counter):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for model in (nn.TransformerEncoder(layer, 2), nn.LSTM(8, 8, 2)):
        output = model(torch.rand(2, 3, 8))
        (output[0] if isinstance(output, tuple) else output).sum().backward()
print(json.dumps([counter.ids, sorted(counter.backward_ids)]))
"""


def test_ids_are_equal_across_processes() -> None:
    """The same program has the same ids in every process, whatever its hash seed."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM]
    runs = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(run.communicate()[0].splitlines()[-1]) for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert one == other
    assert len(one[0]) > 20
    assert len(one[1]) > 20


# -- copies and files -----------------------------------------------------


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_saved_files_are_bit_identical() -> None:
    """What is saved inside a scope is byte for byte what is saved without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    values = [model, model.state_dict(), optimizer.state_dict()]
    vanilla = [_saved(value) for value in values] + [pickle.dumps(model)]
    for make in TRANSPARENT:
        with applied(make()):
            model(torch.rand(4, 3))
            model[1].reset_running_stats()
            model.load_state_dict(torch.load(io.BytesIO(vanilla[1])))
            instrumented = [_saved(value) for value in values] + [pickle.dumps(model)]
        assert instrumented == vanilla


def test_copies_made_inside_are_vanilla_outside() -> None:
    """A model copied, saved or loaded inside a scope is an ordinary model after it."""
    model, tool = nn.Linear(3, 2), On(linear=after(lambda y: y * 2))
    with applied(tool):
        inside = model(X)
        copied = copy.deepcopy(model)
        loaded = torch.load(io.BytesIO(_saved(model)), weights_only=False)
        pickled = pickle.loads(pickle.dumps(model))
    assert torch.equal(inside, model(X) * 2)
    for other in (copied, loaded, pickled):
        assert torch.equal(other(X), model(X))
        assert vars(other).keys() == vars(model).keys()


_PROFILED = """
import json, os, sys
import torch
from torch.profiler import ProfilerActivity, profile
from tests.torch.support import Watcher, applied

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

def profiled():
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, with_stack=True, with_modules=True) as profiler:
        for _ in range(3):
            model(torch.ones(1, 2))
    names = [event.key for event in profiler.key_averages() for _ in range(event.count)]
    return sorted(name for name in names if name.startswith("nn.Module"))

with applied(Watcher()):
    first = profiled()
print(json.dumps([first, profiled()]))
"""


def test_a_profile_with_stacks_tells_modules() -> None:
    """PyTorch's profiler finds the program's modules in a scope, and after its first use in one."""
    run = run_python("-W", "ignore", "-c", _PROFILED, check=True)
    within, after = json.loads(run.stdout)
    assert within == after
    calls = collections.Counter(within)
    assert sorted(calls.values()) == [3, 3, 3]
    assert {name.partition("_")[0] for name in calls} == {
        "nn.Module: Linear", "nn.Module: ReLU", "nn.Module: Sequential",
    }  # fmt: skip
