"""Python calls of Amanda's own functions in one run of the command on a small program.

    python -m tests.benchmarks.calls
    python -m tests.benchmarks.calls --tool nan --top 40
    python -m tests.benchmarks.calls --script train.py

The run is in the main thread of this process, from the import of ``amanda`` to the end. A generator
counts each time that it is resumed. The counts depend on the versions of Python and PyTorch, not on
the machine; :mod:`tests.benchmarks.frames` has the calls of steps that have been analysed.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType

from tests.counting import called

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch

model = torch.nn.Linear(4, 2)
loss = model(torch.ones(3, 4)).sum()
loss.backward()
print(round(loss.item(), 3))
"""
"""A network of one layer, forward and backward."""


def report(codes: Iterable[CodeType], top: int) -> None:
    """Print the number of calls, by file and by function.

    Args:
        codes: the code of each call.
        top: rows of each of the two tables.
    """
    calls = collections.Counter((_name_of(code), code.co_qualname) for code in codes)
    print(f"{calls.total():,} calls of Amanda's functions, {len(calls):,} functions")
    files: collections.Counter[str] = collections.Counter()
    for (file, _), number in calls.items():
        files[file] += number
    for file, number in files.most_common(top):
        print(f"{number:8,}  {file}")
    print()
    for (file, function), number in calls.most_common(top):
        print(f"{number:8,}  {file}: {function}")


def _name_of(code: CodeType) -> str:
    """The file of some code, relative to the package's ``src``."""
    return code.co_filename.rpartition("/src/")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and print the counts when the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", default="flops", help="argument of -t (default: flops)")
    parser.add_argument("--script", type=Path, help="a program; by default one layer of PyTorch")
    parser.add_argument("--top", type=int, default=15, help="rows of each table (default: 15)")
    given = parser.parse_args(arguments)
    folder = tempfile.TemporaryDirectory()
    script = given.script or Path(folder.name, "one_layer.py")
    if given.script is None:
        script.write_text(SCRIPT)
    counting = contextlib.ExitStack()
    codes = counting.enter_context(called((f"{ROOT}/amanda-",)))
    # The command writes its results in an exit function, which runs before these two.
    atexit.register(report, codes, given.top)
    atexit.register(counting.close)
    from amanda.cli import main as run_command

    return run_command(["run", "-t", given.tool, "-o", folder.name, "--", str(script)])


if __name__ == "__main__":
    sys.exit(main())
