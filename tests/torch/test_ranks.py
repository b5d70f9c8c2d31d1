"""Trainings of several processes by gloo: under tools they are as without, and figures add up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.running import run_python

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed here")

KINDS = ("single", "accumulation", "fsdp_checkpointed", "tensor_parallel", "pipeline")
PRUNED = ("pruned_ddp", "pruned_fsdp", "pruned_tensor_parallel")
FORWARD, BACKWARD = 32768, 49152
"""FLOPs of the training of one process."""


def run(folder: Path, size: int, *kinds: str) -> list[dict[str, Any]]:
    """What each process tells of the kinds of :mod:`tests.torch.ranks`."""
    words = ("-m", "tests.torch.ranks", str(folder), str(size), *kinds)
    done = run_python(*words, env={"OMP_NUM_THREADS": "1"}, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), 2, *KINDS, *PRUNED, "remat_fsdp", "exchanges")


def check(kind: str, ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """Check the bits, and that no operator is unknown, or taken for the producer of a NaN; return
    the operators of each rank."""
    found = [rank[kind] for rank in ranks]
    assert [len(set(of["bits"])) for of in found] == [1] * len(found)
    assert [(of["flops"][2], of["nan"]) for of in found] == [({}, None)] * len(found)
    return [of["ops"] for of in found]


def flops(kind: str, ranks: list[dict[str, Any]]) -> list[int]:
    """The FLOPs of all ranks, forward and backward."""
    return [sum(rank[kind]["flops"][i] for rank in ranks) for i in (0, 1)]


def collectives(ops: list[Any]) -> set[tuple[str, tuple[int, ...]]]:
    """The types of the collectives, and the ranks of their groups."""
    return {(kind, tuple(given["ranks"])) for _, kind, given in ops if "ranks" in (given or {})}


@pytest.mark.parametrize("kind", KINDS)
def test_trainings_stay_bit_identical(kind: str, ranks: list[dict[str, Any]]) -> None:
    """Parameters and gradients are those without tools, and ids those of the other ranks that run
    the same."""
    one, other = check(kind, ranks)
    assert kind == "pipeline" or [op[0] for op in one] == [op[0] for op in other]


def test_flops_of_ranks_add_up(ranks: list[dict[str, Any]]) -> None:
    """Together ranks have the operations of one process, and those that are done again: of the
    first layer from checkpoints, and of a micro-batch by which a pipeline finds shapes, with the
    gradient of one input."""
    assert flops("single", ranks[:1]) == flops("accumulation", ranks) == [FORWARD, BACKWARD]
    assert flops("tensor_parallel", ranks) == [FORWARD, BACKWARD]
    assert flops("fsdp_checkpointed", ranks) == [FORWARD + FORWARD // 2, BACKWARD]
    assert flops("pipeline", ranks) == [FORWARD + FORWARD // 8, BACKWARD + FORWARD // 16]


def test_collectives_of_trainings_are_operators(ranks: list[dict[str, Any]]) -> None:
    """What FSDP2, distributed tensors and pipelines exchange is seen, with the ranks of the group,
    in the backward pass, too; what the reducer of DDP does in C++ is not."""
    group = (0, 1)
    seen = {kind: collectives(ranks[0][kind]["ops"]) for kind in KINDS}
    assert seen == {
        "single": set(),
        "accumulation": set(),
        "fsdp_checkpointed": {("all_gather", group), ("reduce_scatter", group)},
        "tensor_parallel": {("all_reduce", group)},
        "pipeline": {("send", group), ("recv", group)},
    }


WHOLE, PART, BOTH = [2, 3], [1, 3], [4, 3]

EXCHANGES: dict[str, tuple[str, Any, list[Any], list[Any]]] = {
    "all_reduce": ("all_reduce", 24, [WHOLE], [WHOLE]),
    "all_reduce_coalesced": ("all_reduce", 48, [WHOLE] * 2, [WHOLE] * 2),
    "all_gather": ("all_gather", 24, [WHOLE] * 2, [WHOLE] * 2),
    "all_gather_coalesced": ("all_gather", 12, [PART] * 2, [PART] * 2),
    "all_gather_into_tensor": ("all_gather", 24, [BOTH], [BOTH]),
    "all_gather_single": ("all_gather", 24, [BOTH], [BOTH]),
    "all_to_all": ("all_to_all", 24, [PART] * 2, [PART] * 2),
    "all_to_all_single": ("all_to_all", 24, [WHOLE], [WHOLE]),
    "barrier": ("barrier", 0, [], []),
    "monitored_barrier": ("barrier", 0, [], []),
    "broadcast": ("broadcast", 24, [WHOLE], [WHOLE]),
    "gather": ("dist_gather", 24, [WHOLE] * 2, []),
    "scatter": ("dist_scatter", (48, 24), [WHOLE], [WHOLE]),
    "reduce": ("reduce", 24, [WHOLE], [WHOLE]),
    "reduce_scatter": ("reduce_scatter", 48, [WHOLE], [WHOLE]),
    "reduce_scatter_tensor": ("reduce_scatter", 24, [PART], [PART]),
    "reduce_scatter_single": ("reduce_scatter", 24, [PART], [PART]),
    "send": ("recv send", 24, [WHOLE], []),
    "recv": ("send recv", 24, [], [WHOLE]),
    "f_all_reduce": ("all_reduce", 24, [WHOLE], [WHOLE]),
    "f_all_gather_tensor": ("all_gather", 24, [BOTH], [BOTH]),
    "f_reduce_scatter_tensor": ("reduce_scatter", 24, [PART], [PART]),
    "f_all_to_all_single": ("all_to_all", 24, [WHOLE], [WHOLE]),
    "f_broadcast": ("broadcast", 24, [WHOLE], [WHOLE]),
    "f_all_reduce_coalesced": ("all_reduce", 48, [WHOLE] * 2, [WHOLE] * 2),
}
"""Of each collective that is one operator: its type, its bytes, and the shapes of its outputs on
both ranks."""

COMPOSED = {
    "all_gather_object": "all_gather all_gather",
    "broadcast_object_list": "broadcast broadcast",
    "gather_object": "all_gather dist_gather",
    "scatter_object_list": "broadcast dist_scatter dist_scatter",
    "isend": "send recv",
    "batch_isend_irecv": "send recv",
    "send_object_list": "send send",
}
"""The operators on rank 0 of those that are several."""


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_collective_is_an_operator(name: str, ranks: list[dict[str, Any]]) -> None:
    """Its type, group and bytes are known, and what it writes into is its output."""
    kinds, sizes, *outputs = EXCHANGES[name]
    reductions = {"all_reduce": "sum", "reduce_scatter": "sum", "reduce": "max"}
    for rank in (0, 1):
        kind = kinds.split()[rank if " " in kinds else 0]
        attributes = {"group": "0", "ranks": [0, 1]}
        attributes["bytes"] = sizes[rank] if isinstance(sizes, tuple) else sizes
        attributes |= {"reduction": reductions[kind]} if kind in reductions else {}
        assert ranks[rank]["exchanges"][name] == [[kind, attributes, outputs[rank]]]


def test_no_collective_is_forgotten(ranks: list[dict[str, Any]]) -> None:
    """Those that consist of others are seen as these; all functions that exchange are in the
    tests."""
    found = {name: [kind for kind, *_ in ranks[0]["exchanges"][name]] for name in COMPOSED}
    assert found == {name: kinds.split() for name, kinds in COMPOSED.items()}
    public = dist.distributed_c10d.__all__
    exchanging = "all_ reduce gather scatter send recv broadcast barrier"
    named = {name for name in public if any(part in name for part in exchanging.split())}
    functions = {name for name in named if callable(getattr(dist, name)) and name.islower()}
    assert functions - {*EXCHANGES, *COMPOSED} == {"irecv", "recv_object_list"}


def test_norms_of_shards_are_those_of_the_whole(ranks: list[dict[str, Any]]) -> None:
    """The sums of squares of shards add up to that of one process; what is replicated counts
    once."""
    whole = {row["key"]: norm([row]) for row in keyed("single", ranks[0])}
    parts: dict[str, list[Any]] = {}
    for row in [row for rank in ranks for row in keyed("tensor_parallel", rank)]:
        assert row["placement"] in ("Replicate", "Shard(0)", "Shard(1)")
        assert math.prod(row["global_shape"]) * 2 in (row["elements"], 2 * row["elements"])
        known = parts.setdefault(row["key"], [])
        if not known or row["placement"] != "Replicate":
            known.append(row)
    assert {key: norm(rows) for key, rows in parts.items()} == pytest.approx(whole, rel=1e-6)


def keyed(kind: str, rank: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "key": f"{row['parameter']} {row['kind']}"} for row in rank[kind]["stats"]]


def norm(rows: list[dict[str, Any]]) -> float:
    return math.sqrt(sum(r["elements"] * (r["mean"] ** 2 + r["std"] ** 2) for r in rows))


def test_masks_are_those_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Ranks with all of a weight make the same mask, whichever data they have; a weight of which a
    rank has a part is left alone, and named."""
    one, other = ([rank[kind]["masks"] for kind in PRUNED] for rank in ranks)
    assert one == other
    assert one[0] == one[1]
    assert [torch.tensor(mask).float().mean().item() for mask in one[0].values()] == [0.5, 0.5]
    assert ranks[0]["pruned_ddp"]["bits"] == ranks[1]["pruned_ddp"]["bits"]
    assert one[2] == {}
    reason = "its weight is spread over processes, and this one has a part of it"
    assert ranks[0]["pruned_tensor_parallel"]["skipped"] == [reason, reason]


def test_nothing_is_recomputed_from_dropped_weights(ranks: list[dict[str, Any]]) -> None:
    """Under ``remat`` an operator whose weight FSDP2 drops after it does not run again."""
    assert [len(set(rank["remat_fsdp"]["bits"])) for rank in ranks] == [1, 1]


@pytest.mark.slow
def test_a_mesh_of_two_axes(tmp_path: Path) -> None:
    """Four ranks, two groups of two that share a tensor: the ranks know their places, collectives
    their groups."""
    ranks = run(tmp_path, 4, "sharded_and_split")
    ops = check("sharded_and_split", ranks)
    assert all([op[0] for op in one] == [op[0] for op in ops[0]] for one in ops)
    assert flops("sharded_and_split", ranks) == [FORWARD, BACKWARD]
    places = [rank["sharded_and_split"]["mesh"] for rank in ranks]
    assert places == [{"dp": i // 2, "tp": i % 2} for i in range(4)]
    assert collectives(ops[3]) == {
        ("all_gather", (1, 3)),
        ("reduce_scatter", (1, 3)),
        ("all_reduce", (2, 3)),
    }
