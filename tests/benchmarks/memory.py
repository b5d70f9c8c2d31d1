"""Memory before, inside and after scopes of Amanda.

    python -m tests.benchmarks.memory

Prints live tensors and their bytes, bytes of Python objects (tracemalloc), and resident memory.
After scopes that have seen several steps, all are to be what they were before; the allocators' own
reserves make the last two columns inexact.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import nn

import amanda
from tests.benchmarks.cases_torch import WORKLOADS
from tests.benchmarks.timing import Step
from tests.benchmarks.watching import Watch

CASES = (
    "resnet50-b1-224-infer",
    "resnet50-b1-224-train",
    "resnet18-b1-32-infer",
    "gpt2-4x64-infer",
)
"""The workloads that are measured."""

STEPS = 3
"""Steps in each scope."""

SCOPES = 5
"""Scopes, one after the other, between "before" and "after"."""


@attrs.frozen
class Usage:
    """Memory at one moment.

    Attributes:
        tensors: live tensors.
        tensor_bytes: in their storages, each counted once.
        python_bytes: traced by tracemalloc.
        resident_bytes: of the process.
    """

    tensors: int
    tensor_bytes: int
    python_bytes: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Usage:
        """Measure, after a full garbage collection."""
        gc.collect()
        # Subclasses, such as the fake tensors of PyTorch's tracers, hold no memory of their own.
        # Nor do tensors of functorch's transforms, which Dynamo's graphs may keep.
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001
        kinds = torch.Tensor, nn.Parameter
        tensors = [o for o in gc.get_objects() if type(o) in kinds and not is_wrapped(o)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(
            tensors=len(tensors),
            tensor_bytes=sum(storages.values()),
            python_bytes=tracemalloc.get_traced_memory()[0],
            resident_bytes=pages * 4096,
        )

    def row(self, label: str) -> str:
        """A line of the table."""
        mib = 1024 * 1024
        return (
            f"  {label:22} {self.tensors:>8} {self.tensor_bytes / mib:>12.3f}"
            f" {self.python_bytes / mib:>12.3f} {self.resident_bytes / mib:>12.1f}"
        )


def _scope(model: nn.Module, step: Step) -> Usage:
    """Run some steps in a new scope; the memory in use before it ends."""
    with amanda.apply(Watch(backward=True)):
        for _ in range(STEPS):
            step()
        model.zero_grad(set_to_none=True)
        return Usage.now()


def measure(name: str) -> dict[str, Usage]:
    """Measure before, in and after several scopes over one workload; two more warm up."""
    model, step = WORKLOADS[name].start()
    for _ in range(2):
        _scope(model, step)
    usages = {"before": Usage.now()}
    for _ in range(SCOPES):
        usages["inside the last scope"] = _scope(model, step)
    usages["after"] = Usage.now()
    return usages


# -- peaks --------------------------------------------------------------------

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
    """Measure the cases, or one peak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peak-of", choices=WORKLOADS, help="print the peak of one workload")
    parser.add_argument("--watched", action="store_true", help="with --peak-of: under a tool")
    options = parser.parse_args(arguments)
    if options.peak_of:
        _run_and_tell_peak(options.peak_of, watched=options.watched)
        return 0
    torch.set_num_threads(1)
    tracemalloc.start()
    for name in CASES:
        print(f"{name:24} {'tensors':>8} {'tensor MiB':>12} {'Python MiB':>12} {'RSS MiB':>12}")
        for label, usage in measure(name).items():
            print(usage.row(label))
    print(peaks())
    return 0


if __name__ == "__main__":
    sys.exit(main())
