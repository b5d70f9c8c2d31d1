"""The optimization tools under ``amanda run``: programs that know nothing of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from safetensors.numpy import load_file

from tests.running import run_python

PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
x = torch.rand(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
print(f"loss {loss:.9f}")
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`amanda run` of the program in a folder."""
    (folder / "train.py").write_text(PROGRAM)
    return run_python("-m", "amanda", "run", *options, "--", "train.py", cwd=folder)


def test_prune_writes_masks_that_another_run_uses(tmp_path: Path) -> None:
    """The second run, with the masks of the first, prints the same loss."""
    first = run(tmp_path, "-t", "prune:method=nm,ops=linear", "-o", "one")
    assert first.returncode == 0, first.stderr
    result = json.loads((tmp_path / "one/prune.json").read_text())
    assert result["summary"]["sparsity"] == 0.5
    masks = load_file(tmp_path / "one/prune.masks.safetensors")
    assert masks["Sequential.0/linear:0"].reshape(-1, 4).sum(1).tolist() == [2] * 16
    again = run(tmp_path, "-t", "prune:masks=one/prune.masks.safetensors,ops=linear", "-o", "two")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == first.stdout.splitlines()[0]
    vanilla = run_python("train.py", cwd=tmp_path, check=True)
    assert vanilla.stdout.splitlines()[0] != first.stdout.splitlines()[0]


def test_inject_lists_its_faults(tmp_path: Path) -> None:
    done = run(tmp_path, "-t", "inject:ops=linear,fault=normal,std=0.1,seed=3", "-o", "out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/inject.json").read_text())
    assert result["summary"]["faults"] == len(result["faults"]) == 8
