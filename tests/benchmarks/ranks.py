"""Tables of a thousand ranks: ``python -m tests.benchmarks.ranks [--ranks N] [TOOL ...]``.

A small network is trained under each tool; the rows of the run become those of each rank, with
other figures. Then `amanda merge` and each view of `amanda query` run with one thread, and the part
of a rank is compared with the JSON of the same rows.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb

from amanda.files import read_json, write_json
from amanda_tools.tables import merge, query, reading
from amanda_tools.tables.rows import copy_to, quoted
from amanda_tools.tables.views import VIEWS

_PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range({layers})]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(8, 16)).sum().backward()
    optimizer.step()
"""


def run(folder: Path, tool: str, layers: int, *options: str) -> None:
    """Train the network under a tool."""
    words = ("-m", "amanda", "run", "-t", tool, "-o", str(folder), *options)
    text = _PROGRAM.format(layers=layers)
    command = [sys.executable, *words, "-c", text]
    subprocess.run(command, check=True, capture_output=True, cwd=folder.parent)


def simulate(part: Path, folder: Path, ranks: int, different: int, slow: int) -> None:
    """Write the parts of ranks with the rows of one real part.

    Args:
        part: the part, with its header beside it.
        folder: of the tool.
        ranks: how many ranks there will be.
        different: ranks with rows of their own; each of the others has those of one of them.
        slow: a rank with rows of its own, whose sums are 1.3 times as large.
    """
    header = read_json(part.with_name("header.json"))
    with duckdb.connect(config={"threads": 1}) as connection:
        for rank in range(ranks):
            path = folder / f"rank={rank}" / part.name
            path.parent.mkdir(parents=True)
            place = {"number": rank, "host": "h", "count": ranks, "mesh": {"pp": rank * 4 // ranks}}
            write_json(path.with_name("header.json"), {**header, "rank": place})
            if rank >= different and rank != slow:
                os.link(folder / f"rank={rank % different}" / part.name, path)
                continue
            factor = 1.3 if rank == slow else "(0.95 + 0.1 * random())"
            rows = f"SELECT * REPLACE (sum * {factor} AS sum) FROM read_parquet({quoted(part)})"
            connection.execute(copy_to(path, rows))


def measure(folder: Path, tool: str, figure: str) -> None:
    """Merge and ask the tables of a folder; print seconds of processor time, and memory."""
    reading.THREADS = 1
    total = time.process_time()
    for name in ("merge", *VIEWS):
        begin = time.process_time()
        if name == "merge":
            merge(str(folder))
        else:
            query(str(folder), f"SELECT count(*) FROM {name}('{tool}', '{figure}')")
        print(f"  {name:9} {time.process_time() - begin:6.2f} s")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"  in all    {time.process_time() - total:6.2f} s, {memory} MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the tools that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=["count", "profile", "stats"])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=130)
    parser.add_argument("--measure", nargs=2)
    given = parser.parse_args(arguments)
    if given.measure:
        measure(Path(given.measure[0]), given.tools[0], given.measure[1])
        return
    figures = {"profile": "seconds", "stats": "output0", "count": "executions"}
    for tool in given.tools:
        with tempfile.TemporaryDirectory() as temporary:
            one, all_ranks = Path(temporary, "one"), Path(temporary, "all")
            run(one, tool, given.layers)
            run(one, tool, given.layers, "--format", "parquet")
            part = one / tool / "rank=0" / "part-0.parquet"
            ratio = (one / f"{tool}.json").stat().st_size / part.stat().st_size
            rows, ops = query(str(one), f'SELECT count(*), count(DISTINCT op_id) FROM "{tool}"')[
                0
            ].rows[0]
            size = part.stat().st_size
            print(f"{tool}: {ops} operators, {rows} rows, {size} bytes, 1/{ratio:.1f} of JSON")
            simulate(part, all_ranks / tool, given.ranks, given.ranks, 0)
            words = (tool, "--measure", str(all_ranks), figures.get(tool, "executions"))
            module = ("-m", "tests.benchmarks.ranks")
            subprocess.run([sys.executable, *module, *words], check=True)


if __name__ == "__main__":
    main()
