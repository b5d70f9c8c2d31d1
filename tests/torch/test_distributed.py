"""Distributed wrappers leave no trace in ids, and their gradients are the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amanda
from amanda.errors import CapabilityError
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from amanda_torch.plugin import TorchEagerDriver
from tests.torch.support import TRANSPARENT, Counter, On, after, applied, before, fingerprint

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed here"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _step(model: nn.Module, *tools: amanda.Tool) -> list[Any]:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    with applied(*tools):
        for _ in range(2):
            model.zero_grad()
            y = model(x)
            y.sum().backward()
    return fingerprint([y, *(p.grad for p in model.parameters())])


def test_ddp_is_transparent_in_ids() -> None:
    """Under DDP operators, forward and backward, have the ids of the bare model."""
    plain, counter = Counter(), Counter()
    _step(_model(), plain)
    _step(DistributedDataParallel(_model()), counter)
    assert {i for i in counter.ids if "linear" in i or "relu" in i} == {
        i for i in plain.ids if "linear" in i or "relu" in i
    }
    backward = {i for i in plain.backward_ids if "Sequential" in i}
    assert backward <= set(counter.backward_ids)
    assert counter.backward_ops["AccumulateGrad"] == plain.backward_ops["AccumulateGrad"]


@pytest.mark.parametrize("make", TRANSPARENT)
def test_ddp_stays_bit_identical(make: Any) -> None:
    """Tools that change nothing leave the gradients under DDP as they are."""
    assert _step(DistributedDataParallel(_model()), make()) == _step(
        DistributedDataParallel(_model()), amanda.Tool()
    )


def test_ddp_with_a_mask() -> None:
    """A masked weight gives the gradients of the bare model with the mask."""

    def masking() -> amanda.Tool:
        return On(linear=before(lambda w: w * (w > 0), [1]))

    assert _step(DistributedDataParallel(_model()), masking()) == _step(_model(), masking())


def _everywhere(x: torch.Tensor) -> None:
    """Call each kind of collective: at once, later, and in its functional form."""
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty(3)], x)
    dist.reduce_scatter_single(torch.empty(3), x, op=dist.ReduceOp.MAX)
    dist.all_to_all_single(torch.empty(3), x)
    dist.gather(x, [torch.empty(3)])
    dist.barrier()
    funcol.all_gather_tensor(x, 0, dist.group.WORLD) + 0


class Collectives(On):
    """Notes the collectives of a run: type, canonical attributes, and sizes of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any], list[Any]]] = []
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.look, require_outputs=True)

    def look(self, context: amanda.OpContext) -> None:
        outputs = [tuple(tensor.shape) for tensor in context.get_outputs() or ()]
        if "group" in context.get_attrs():
            self.found.append((context["op_type"], canonical.attributes(context), outputs))


@pytest.mark.parametrize("interceptor", ["gate", "mode"])
def test_collectives_are_operators(interceptor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have types of their own, with group, ranks and bytes; what they have written is their
    output, unless they are still under way. One name may be that of another operator."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, interceptor)
    tool, where = Collectives(), {"group": dist.group.WORLD.group_name, "ranks": (0,)}
    with applied(tool):
        _everywhere(torch.ones(3))
    reduced = {**where, "bytes": 12, "reduction": "sum"}
    assert tool.found == [
        ("all_reduce", reduced, []),
        ("broadcast", {**where, "bytes": 12}, [(3,)]),
        ("all_gather", {**where, "bytes": 12}, [(3,)]),
        ("reduce_scatter", {**reduced, "reduction": "max"}, [(3,)]),
        ("all_to_all", {**where, "bytes": 12}, [(3,)]),
        ("dist_gather", {**where, "bytes": 12}, [(3,)]),
        ("barrier", {**where, "bytes": 0}, []),
        ("all_gather", {**where, "bytes": 12}, [(3,)]),
    ]
    vocabulary = {kind: set(canonical.ATTRIBUTES.get(kind, ())) for kind, _, _ in tool.found}
    assert all(set(given) <= vocabulary[kind] for kind, given, _ in tool.found)


def test_a_collective_is_not_run_alone() -> None:
    """No tool can run it again, which would wait for the others forever; nor can a routine have it
    write into another tensor than the program's, while one after it can."""
    refused: list[str] = []

    def ask(context: amanda.OpContext) -> None:
        if "group" in context.get_attrs():
            with pytest.raises(CapabilityError, match="is a collective") as caught:
                context.get_function()
            refused.append(str(caught.value))

    x = torch.ones(3)
    tool = amanda.Tool()
    tool.add_inst_for_op(ask)
    with applied(tool):
        dist.all_reduce(x)
        funcol.all_reduce(x, "sum", dist.group.WORLD) + 0
    assert len(refused) == 2
    with (
        applied(On(all_reduce=before(lambda t: t + 1))),
        pytest.raises(CapabilityError, match="op /all_reduce:0 writes into its input 'tensor'"),
    ):
        dist.all_reduce(x)
    with applied(On(all_reduce=after(lambda t: t + 1))):
        for _ in range(3):
            dist.all_reduce(x)
    assert x.tolist() == [4, 4, 4]


def test_a_group_ends_with_the_program() -> None:
    """A tool that keeps the contexts of collectives keeps no group alive."""
    contexts = []
    tool = amanda.Tool()
    tool.add_inst_for_op(contexts.append)
    group: Any = dist.new_group([0])
    reference = weakref.ref(group)
    with applied(tool):
        dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    del group
    assert contexts
    assert reference() is None


def test_the_place_in_a_mesh_is_noted() -> None:
    """The driver knows the coordinates of the process in each mesh with names that is made within
    a scope; the class that makes meshes is as before afterwards."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    vanilla = DeviceMesh.__init__
    with applied(Counter()):
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("stage", "shard"))
        init_device_mesh("cpu", (1,))
    assert {name: TorchEagerDriver.mesh[name] for name in ("stage", "shard")} == {
        "stage": 0,
        "shard": 0,
    }
    assert DeviceMesh.__init__ is vanilla


def test_figures_of_tensor_parallelism_are_of_the_rank() -> None:
    """Shapes are those of the local parts, and what PyTorch computes on fake tensors, to find the
    shapes of results, is no operator of the program."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), ways)
    flops = amanda.tools.load("flops")()
    with applied(flops):
        for _ in range(2):
            net(torch.ones(8, 16)).sum().backward()
    found = flops.result()
    steps = {key: found["summary"]["per_step"][key] for key in ("flops", "flops_backward")}
    assert steps == {"flops": 8192, "flops_backward": 12288}
    assert "max" not in found["summary"]["per_step"]
    linear = [op["inputs"][1]["shape"] for op in found["ops"] if op["type"] == "linear"]
    assert linear == [[16, 16], [16, 16]]
    assert not [op["id"] for op in found["ops"] if "default" in op["id"] and "mm" in op["id"]]
