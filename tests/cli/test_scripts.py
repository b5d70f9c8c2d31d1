"""Programs as people have them, under ``amanda run`` and untouched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import Command

Script = Callable[..., Path]

TOY = "import toyframework as toy\na = toy.Number(2)\nb = toy.mul(toy.add(a, a), a)\n"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def complete(path: Path) -> list[dict[str, Any]]:
    """The complete events of a timeline: operators, and no modules."""
    events = read(path)["traceEvents"]
    return [e for e in events if e["ph"] == "X" and e["cat"] != "module"]


# -- files that tools keep while a program runs -------------------------------


def test_what_a_tool_has_streamed_to_disk_is_there_at_the_end(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """Python's exit removes temporary files after the results, and a forked child never."""
    path = script(
        "import amanda, os, sys, torch\n"
        "for i in range(4200):\n"
        "    if i == 4150:\n"
        "        os.fork() or sys.exit()\n"
        "        os.wait()\n"
        "    torch.relu(torch.ones(2))\n"
        "    amanda.new_iteration()\n"
    )
    run = amanda(
        "run", "-t", "trace:memory=false", "-t", "dump:shard=1000", "--ops", "relu", "-o", "out",
        str(path),
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    events = complete(tmp_path / "out/trace.timeline.json")
    assert {event["name"] for event in events} == {"relu"}
    assert len(events) == 4200
    shards = list((tmp_path / "out").glob("dump-*.safetensors"))
    assert sum(path.stat().st_size for path in shards) > 4200 * 8
