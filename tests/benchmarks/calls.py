"""Python calls of Amanda's own functions in one run of the command on a small program.

    python -m tests.benchmarks.calls
    python -m tests.benchmarks.calls --tool nan --top 40
    python -m tests.benchmarks.calls --script train.py

The run is in this process, under ``sys.setprofile``, from the import of ``amanda`` to the end. A
call counts if its function's file is in one of Amanda's packages; a generator counts each time that
it is resumed. The counts depend on the versions of Python and PyTorch, not on the machine.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch

model = torch.nn.Linear(4, 2)
loss = model(torch.ones(3, 4)).sum()
loss.backward()
print(round(loss.item(), 3))
"""
"""A network of one layer, forward and backward."""


class Counter:
    """Counts calls by file and function from its installation to the end of the process.

    Attributes:
        calls: number of calls, by (file relative to the package's ``src``, qualified name).
    """

    def __init__(self) -> None:
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    def install(self) -> None:
        """Count in this thread and in those that start from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def remove(self) -> None:
        """Count no longer."""
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call; the function for ``sys.setprofile``."""
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _name_of(code.co_filename, code.co_qualname)
        if name := self._names[code]:
            self.calls[name] += 1

    def report(self, top: int) -> None:
        """Print the number of calls, by file and by function.

        Args:
            top: rows of each of the two tables.
        """
        self.remove()
        print(f"{self.calls.total():,} calls of Amanda's functions, {len(self.calls):,} functions")
        files: collections.Counter[str] = collections.Counter()
        for (file, _), number in self.calls.items():
            files[file] += number
        for file, number in files.most_common(top):
            print(f"{number:8,}  {file}")
        print()
        for (file, function), number in self.calls.most_common(top):
            print(f"{number:8,}  {file}: {function}")


def _name_of(file: str, function: str) -> tuple[str, str] | None:
    """File and function if they are Amanda's; else None."""
    name = file.rpartition("/src/")[2]
    if not file.startswith(f"{ROOT}/amanda-") or not name.startswith("amanda"):
        return None
    return name, function


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
    counter = Counter()
    # The command writes its results in an exit function, which runs before this one.
    atexit.register(counter.report, given.top)
    counter.install()
    from amanda.cli import main as run_command

    return run_command(["run", "-t", given.tool, "-o", folder.name, "--", str(script)])


if __name__ == "__main__":
    sys.exit(main())
