"""An operator of the user's own, compiled from ``custom_op.cc`` and loaded."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

TYPE = "AmandaTwice"
_SOURCE = Path(__file__).with_name("custom_op.cc")


@tf.RegisterGradient(TYPE)
def _gradient(op: Any, gradient: Any) -> Any:
    return gradient + gradient


@functools.cache
def twice() -> Any:
    """The operator's function: twice its input, in double precision."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for a custom operator")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "custom_op.so"
        flags = ["-shared", "-fPIC", f"-I{tf.sysconfig.get_include()}", "-o", str(library)]
        subprocess.run([compiler, *flags, str(_SOURCE), *tf.sysconfig.get_link_flags()], check=True)
        return tf.load_op_library(str(library)).amanda_twice
