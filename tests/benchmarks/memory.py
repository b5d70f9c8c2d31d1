"""The largest resident memory of a process that trains, with and without a tool that watches.

    python -m tests.benchmarks.memory

The page of :mod:`tests.benchmarks.speed` has the same table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import amanda
from tests.benchmarks.cases_torch import WORKLOADS
from tests.benchmarks.watching import Watch

STEPS = 3
"""Steps of each process."""

PEAKS = ("resnet50-b8-32-train", "gpt2-12x64-train")
"""The workloads whose peaks are compared."""


def peak(workload: str, *, watched: bool) -> int:
    """The largest resident memory of a process that takes some steps, in bytes."""
    arguments = ["--peak-of", workload, *(["--watched"] if watched else [])]
    command = [sys.executable, "-m", __spec__.name, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1])


def _run_and_tell_peak(workload: str, *, watched: bool) -> None:
    torch.set_num_threads(1)
    _, step = WORKLOADS[workload].start()
    with amanda.apply(*([Watch(backward=True)] if watched else [])):
        for _ in range(STEPS):
            step()
    # Not getrusage(), which counts what the process was before it became this program, too.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    print(int(line.split()[1]) * 1024)


def peaks() -> str:
    """The peaks with and without a tool that watches, as a table in Markdown."""
    lines = [
        "Largest resident memory of a process that trains for a few steps, in MiB:",
        "",
        "| workload | vanilla | watched | ratio |",
        "|---|---|---|---|",
    ]
    for workload in PEAKS:
        vanilla, watched = (peak(workload, watched=watched) for watched in (False, True))
        mib = [f"{size / 1024**2:.1f}" for size in (vanilla, watched)]
        lines.append(f"| {workload} | {mib[0]} | {mib[1]} | {watched / vanilla:.3f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one peak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peak-of", choices=WORKLOADS, help="print the peak of one workload")
    parser.add_argument("--watched", action="store_true", help="with --peak-of: under a tool")
    options = parser.parse_args(arguments)
    if options.peak_of:
        _run_and_tell_peak(options.peak_of, watched=options.watched)
        return 0
    print(peaks())
    return 0


if __name__ == "__main__":
    sys.exit(main())
