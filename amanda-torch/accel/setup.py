"""Builds the extension for the installed PyTorch: AMANDA_TORCH_ACCEL_BUILD=attempt|skip|require.

PyTorch has to be installed before, and to be visible: pip install --no-build-isolation
"""

import os
import subprocess
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.errors import BaseError

mode = os.environ.get("AMANDA_TORCH_ACCEL_BUILD", "attempt")
if mode not in ("attempt", "skip", "require"):
    raise SystemExit(f"AMANDA_TORCH_ACCEL_BUILD is {mode!r}, not attempt, skip or require")

SOURCES = Path("src/amanda_torch_accel")
BUILT_FOR = SOURCES / "built_for.py"
OPTIONS = ["-O2", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS", "-Wall", "-Wextra"]


def extensions():
    """The extension and how to build it, as arguments of setup()."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

    class Build(BuildExtension):
        """Without a compiler the package is installed nevertheless, and says why it is not used."""

        def run(self):
            BUILT_FOR.unlink(missing_ok=True)
            try:
                super().run()
            except (BaseError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                if mode == "require":
                    raise
                warnings.warn(f"the extension was not built: {error}", stacklevel=1)
                return
            minor = ".".join(torch.__version__.split(".")[:2])
            for folder in (SOURCES, Path(self.build_lib, "amanda_torch_accel")):
                folder.mkdir(parents=True, exist_ok=True)
                text = f'"""The PyTorch that the extension was built for."""\n\nTORCH = "{minor}"\n'
                (folder / BUILT_FOR.name).write_text(text)

    gate = CppExtension(
        "amanda_torch_accel.gate",
        sorted(map(str, SOURCES.glob("*.cc"))),
        depends=sorted(map(str, SOURCES.glob("*.h"))),
        # Warnings are about the sources here, not about PyTorch's headers.
        extra_compile_args={"cxx": [*OPTIONS, *(f"-isystem{path}" for path in include_paths())]},
    )
    return {
        "ext_modules": [gate],
        "cmdclass": {"build_ext": Build.with_options(use_ninja=False)},
    }


def found():
    """What there is to build; nothing where PyTorch is not visible."""
    if mode == "skip":
        return {}
    try:
        return extensions()
    except ImportError as error:
        if mode == "require":
            raise SystemExit(
                f"{error}: install PyTorch first, and this with --no-build-isolation"
            ) from error
        return {}


setup(**found())
