"""Builds the C extension, or does without: AMANDA_TENSORFLOW_ACCEL_BUILD=attempt|skip|require."""

import os
from pathlib import Path

from setuptools import Extension, setup

mode = os.environ.get("AMANDA_TENSORFLOW_ACCEL_BUILD", "attempt")
if mode not in ("attempt", "skip", "require"):
    raise SystemExit(f"AMANDA_TENSORFLOW_ACCEL_BUILD is {mode!r}, not attempt, skip or require")

SOURCES = Path("src/amanda_tensorflow_accel")

fast_path = Extension(
    "amanda_tensorflow_accel.fast_path",
    [str(SOURCES / "fast_path.c")],
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    # TensorFlow's functions are called from here. Its code is read anew at each operator, and that
    # of the procedure linkage table with it: an eager step of twelve layers that is watched takes
    # 1.05 of vanilla without the table, 1.06 with it (processor time, medians of 30).
    extra_compile_args=["-fexceptions", "-O2", "-fno-plt"],
    # Without a C compiler the package is installed nevertheless, and says why it cannot be used.
    optional=mode == "attempt",
)
setup(ext_modules=[] if mode == "skip" else [fast_path])
