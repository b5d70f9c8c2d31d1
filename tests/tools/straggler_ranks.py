"""Four processes for :mod:`tests.tools.test_stragglers`; a file of JSON of each tells of them.

    python -m tests.tools.straggler_ranks /tmp/folder

PyTorch's optimizers and its DDP are not used: their imports take longer than all of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.nan import NanTool
from amanda_tools.stragglers import StragglersTool

SIZE, STEPS = 4, 12


class Sleeping(torch.autograd.Function):
    """An operator that takes its time on the last rank."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds or 0.001)
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2, None


class Slow(nn.Module):
    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(x, self.seconds if dist.get_rank() == SIZE - 1 else 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.slow, self.second = nn.Linear(8, 8), Slow(), nn.Linear(8, 8)
        self.shift = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.slow(self.first(x))).square().add(1 - self.shift).log()


def train(
    *tools: amanda.Tool, steps: int = STEPS, seconds: float = 0.0, shifted: int = -1
) -> dict[str, Any]:
    """Train under tools; the model of rank 1 takes the logarithm of negative numbers in a step."""
    model, content, said, before = Net(), b"", io.StringIO(), ""
    model.slow.seconds = seconds
    with contextlib.redirect_stderr(said), amanda.apply(*tools):
        for step in range(steps):
            model.shift = 1e9 if step == shifted and dist.get_rank() == 1 else 0.0
            model(torch.ones(4, 8)).sum().backward()
            before = before or said.getvalue()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    content += parameter.grad.numpy().tobytes()
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    return {
        "bits": hashlib.sha256(content).hexdigest(),
        "stderr": said.getvalue(),
        "before": before,
    }


def main(rank: int) -> dict[str, Any]:
    """What this rank tells."""
    found: dict[str, Any] = {"plain": train()}
    tool = StragglersTool(every=3, windows=2)
    found["late"] = train(tool, seconds=0.1)
    result = tool.result()
    found["late"] |= {
        "summary": result["summary"],
        "ops": result["ops"],
        "types": [row["type"] for row in result["ops"]],
    }
    others = [StragglersTool(every=2)] if rank else []
    found["partly"] = train(*others)
    if others:
        found["partly"]["not_compared"] = others[0].summary()["not_compared"]
    dist.barrier()
    os.environ.pop("MASTER_ADDR")
    found["gone"] = train(StragglersTool(every=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["nan"] = train(NanTool(), steps=2, shifted=1)
    return found


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.set_num_threads(1)
    number = 0
    for other in range(1, SIZE):
        if not os.fork():
            number = other
            break
    dist.init_process_group("gloo", rank=number, world_size=SIZE)
    told = main(number)
    with open(f"{sys.argv[1]}/{number}.json", "w") as file:
        json.dump(told, file)
    # The first process has the store.
    dist.barrier()
    dist.destroy_process_group()
    if not number:
        assert all(os.wait()[1] == 0 for _ in range(1, SIZE))
