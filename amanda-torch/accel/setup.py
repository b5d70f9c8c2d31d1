"""Builds the C extension, or does without it: AMANDA_TORCH_ACCEL_BUILD=attempt|skip|require."""

import os
from pathlib import Path

from setuptools import Extension, setup

mode = os.environ.get("AMANDA_TORCH_ACCEL_BUILD", "attempt")
if mode not in ("attempt", "skip", "require"):
    raise SystemExit(f"AMANDA_TORCH_ACCEL_BUILD is {mode!r}, not attempt, skip or require")

SOURCES = Path("src/amanda_torch_accel")

gate = Extension(
    "amanda_torch_accel.gate",
    [str(SOURCES / "gate.c")],
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    # Exceptions of hooks pass through functions of the gate that call PyTorch's. Its code is read
    # anew at each operator: shorter is faster.
    extra_compile_args=["-fexceptions", "-O2"],
    # Without a C compiler the package is installed nevertheless, and says why it cannot be used.
    optional=mode == "attempt",
)
setup(ext_modules=[] if mode == "skip" else [gate])
