"""Trainings of several processes, run by :mod:`tests.torch.test_ranks`: one kind after the other.

    python -m tests.torch.ranks /tmp/folder 2 ddp pipeline

Each trains plainly, under routines everywhere, and under tools. A file of JSON of each rank tells
of each kind the bits of parameters and gradients, and what the tools have found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.cli.rank import Rank
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from tests.identity import Identity

WIDTH, BATCH, STEPS = 16, 8, 2

Training = tuple[nn.Module, Callable[[], None]]
"""A model, or the part of it that a rank has, and a function that computes its gradients."""


class Net(nn.Module):
    """Two layers and an activation; the body may be checkpointed."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = checkpoint if self.is_checkpointed else _call
        return run(self.body, x, **({"use_reentrant": False} if self.is_checkpointed else {}))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def data() -> torch.Tensor:
    """The batch of all ranks that compute the same."""
    return torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)


def part(axis: str = "", mesh: Any = None) -> torch.Tensor:
    """The samples of this rank."""
    rank = mesh.get_local_rank(axis) if mesh is not None else dist.get_rank()
    size = mesh[axis].size() if mesh is not None else dist.get_world_size()
    return data().chunk(size)[rank]


def simple(model: nn.Module, x: torch.Tensor) -> Training:
    return model, lambda: model(x).square().sum().backward()


def single() -> Training:
    """The training of one process."""
    return simple(Net(), data())


def ddp() -> Training:
    return simple(DistributedDataParallel(Net()), part())


def accumulation() -> Training:
    """Two passes, of which the first one reduces nothing."""
    model, x = DistributedDataParallel(Net()), part()

    def run() -> None:
        with model.no_sync():
            model(x[:2]).square().sum().backward()
        model(x[2:]).square().sum().backward()

    return model, run


def fsdp(is_checkpointed: bool = False) -> Training:
    model, mesh = Net(is_checkpointed), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for module in model.first, model.second, model:
        fully_shard(module, mesh=mesh)
    return simple(model, part())


def fsdp_checkpointed() -> Training:
    return fsdp(is_checkpointed=True)


def _split(model: Net, mesh: Any) -> Net:
    ways = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(model, mesh, ways)  # type: ignore[return-value]


def tensor_parallel() -> Training:
    return simple(_split(Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), data())


def sharded_and_split() -> Training:
    """Tensor parallel in each of two groups, between which FSDP2 shards: four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _split(Net(), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return simple(model, part("dp", mesh))


def pipeline() -> Training:
    """One layer each on two ranks, four micro-batches."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank, net = dist.get_rank(), Net()
    model = nn.Sequential(net.second) if rank else nn.Sequential(net.first, net.act)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    arguments = {"target": data()} if rank else {}
    return model, lambda: schedule.step(*([] if rank else [data()]), **arguments)


def exchanges() -> dict[str, Callable[[], Any]]:
    """A call of each collective, of tensors of 24 bytes, by its name; ``f_`` in front of those in
    functional form."""
    x, out, half, parts = (
        torch.ones(2, 3),
        torch.empty(2, 3),
        torch.empty(1, 3),
        torch.empty(4, 3),
    )
    rank, world = dist.get_rank(), dist.group.WORLD
    given = [x, x] if rank == 0 else None
    taken = [torch.empty(2, 3), out] if rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x, x]),
        "all_gather": lambda: dist.all_gather([torch.empty(2, 3), out], x),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[half], [half]], [x[:1]]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(parts, x),
        "all_gather_single": lambda: dist.all_gather_single(parts, x),
        "all_gather_object": lambda: dist.all_gather_object([None, None], rank),
        "all_to_all": lambda: dist.all_to_all([half, half], [x[:1], x[1:]]),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x),
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "broadcast": lambda: dist.broadcast(x, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather": lambda: dist.gather(x, taken, 0),
        "gather_object": lambda: dist.gather_object(rank, [0, 0] if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(out, given, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1, 2], 0),
        "reduce": lambda: dist.reduce(x, 0, dist.ReduceOp.MAX),
        "reduce_scatter": lambda: dist.reduce_scatter(out, [x, x]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, x),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(half, x),
        "send": lambda: dist.recv(out, 1) if rank == 0 else dist.send(x, 0),
        "recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(out, 0),
        "isend": lambda: [
            one.wait() for one in (dist.isend(x, 1 - rank), dist.irecv(out, 1 - rank))],
        "batch_isend_irecv": lambda: [one.wait() for one in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)])],
        "send_object_list": lambda: (
            dist.send_object_list([1], 1) if rank == 0 else dist.recv_object_list([None], 0)),
        "f_all_reduce": lambda: funcol.all_reduce(x, "sum", world) + 0,
        "f_all_gather_tensor": lambda: funcol.all_gather_tensor(x, 0, world) + 0,
        "f_reduce_scatter_tensor": lambda: funcol.reduce_scatter_tensor(x, "sum", 0, world) + 0,
        "f_all_to_all_single": lambda: funcol.all_to_all_single(x, None, None, world) + 0,
        "f_broadcast": lambda: funcol.broadcast(x, 0, world) + 0,
        "f_all_reduce_coalesced": lambda: funcol.all_reduce_coalesced([x, x], "sum", world)[0] + 0,
    }  # fmt: skip


class Noting(amanda.Tool):
    """Notes type, canonical attributes, and shapes of the outputs of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any], list[Any]]] = []
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.look, require_outputs=True)

    def look(self, context: amanda.OpContext) -> None:
        attributes = canonical.attributes(context)
        if "ranks" in attributes:
            outputs = [tuple(tensor.shape) for tensor in context.get_outputs() or ()]
            self.found.append((context["op_type"], attributes, outputs))


def noted() -> dict[str, Any]:
    """What is noted of each exchange."""
    found = {}
    for name, run in exchanges().items():
        tool = Noting()
        with amanda.apply(tool):
            run()
        found[name] = tool.found
    return found


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(build: Callable[[], Training], *tools: amanda.Tool) -> str:
    """Train from the same beginning; return the bits of parameters and gradients."""
    model, run = build()
    optimizer, content = torch.optim.AdamW(model.parameters(), 0.01), b""
    with amanda.apply(*tools) if tools else warnings.catch_warnings():
        for _ in range(STEPS):
            run()
            content += _bytes(p.grad for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    content += _bytes(model.parameters())
    return hashlib.sha256(content + _bytes([torch.get_rng_state()])).hexdigest()


def _bytes(tensors: Any) -> bytes:
    return b"".join(_local(tensor).detach().numpy().tobytes() for tensor in tensors)


def report(kind: str) -> dict[str, Any]:
    """What is to be told of one kind."""
    if kind == "exchanges":
        return noted()
    if kind.startswith("pruned_"):
        tool = amanda.tools.load("prune")()
        bits = train(globals()[kind.removeprefix("pruned_")], tool)
        masks = {op_id: mask.tolist() for op_id, mask in tool.masks.items()}
        skipped = [row["reason"] for row in tool.result()["summary"]["skipped"]]
        return {"bits": bits, "masks": masks, "skipped": skipped}
    if kind.startswith("remat_"):
        build = globals()[kind.removeprefix("remat_")]
        return {"bits": [train(build), train(build, amanda.tools.load("remat")())]}
    build = globals()[kind]
    count, flops, trace = (amanda.tools.load(name)() for name in ("count", "flops", "trace"))
    stats = amanda.tools.load("stats")(tensors=["weights", "gradients"])
    nan = amanda.tools.load("nan")(action="record")
    runs: list[tuple[amanda.Tool, ...]] = [(), (Identity(),), (count, flops, trace, stats, nan)]
    bits = [train(build, *tools) for tools in runs]
    figures = flops.result()["summary"]
    return {
        "bits": bits,
        "ops": [[op["id"], op["type"], op.get("attributes")] for op in trace.result()["ops"]],
        "flops": [figures["flops"], figures["flops_backward"], figures.get("unknown_ops")],
        "nan": nan.result()["summary"]["first"],
        "stats": [row for row in stats.result()["ops"] if row["parameter"]],
        "mesh": Rank().located().mesh,
    }


def main() -> None:
    """Run the kinds, each rank in a process of its own, and write what they tell."""
    folder, count, *kinds = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Memory that nothing has written to is NaN.
    torch.use_deterministic_algorithms(True)
    # The imports take longer than all that follows.
    rank, size = 0, int(count)
    for other in range(1, size):
        if not os.fork():
            rank = other
            break
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({kind: report(kind) for kind in kinds}, file)
    dist.destroy_process_group()
    if not rank:
        assert all(os.wait()[1] == 0 for _ in range(1, size))


if __name__ == "__main__":
    main()
