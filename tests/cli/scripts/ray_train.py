"""Ray Train on two workers: each trains with a tool of the name given, or without."""

import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import amanda
from amanda.cli.rank import Rank


def train(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(ray.train.get_context().get_world_rank())
    tools = [amanda.tools.load(name)() for name in config["tools"]]
    with amanda.apply(*tools):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 6)).square().mean().backward()
            optimizer.step()
    assert all(tool.op_rows() for tool in tools)
    rank = Rank.of_environment()
    weights = sum(p.sum().item() for p in model.parameters()).hex()
    print(f"rank {rank.number} of {rank.count}: {weights}", flush=True)


ray.init("local", num_cpus=2, include_dashboard=False)
TorchTrainer(
    train,
    train_loop_config={"tools": sys.argv[1:]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(Path("results").absolute())),
).fit()
