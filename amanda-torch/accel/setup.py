"""Builds the extension for the installed PyTorch.

AMANDA_TORCH_ACCEL_BUILD is attempt, skip, require or release, see README.md. PyTorch has to be
installed before, and to be visible: pip install --no-build-isolation
"""

import os
import subprocess
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.errors import BaseError

VERSION = "0.1.0"

mode = os.environ.get("AMANDA_TORCH_ACCEL_BUILD", "attempt")
if mode not in ("attempt", "skip", "require", "release"):
    raise SystemExit(f"AMANDA_TORCH_ACCEL_BUILD is {mode!r}, not attempt, skip, require or release")

SOURCES = Path("src/amanda_torch_accel")
BUILT_FOR = SOURCES / "built_for.py"
OPTIONS = ["-O2", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS", "-Wall", "-Wextra"]


def extensions():
    """The extension and how to build it, as arguments of setup()."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

    minor = ".".join(torch.__version__.split(".")[:2])

    class Build(BuildExtension):
        """Without a compiler the package is installed nevertheless, and says why it is not used."""

        def run(self):
            BUILT_FOR.unlink(missing_ok=True)
            try:
                super().run()
            except (BaseError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                if mode in ("require", "release"):
                    raise
                warnings.warn(f"the extension was not built: {error}", stacklevel=1)
                return
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
    # A wheel is for one minor version of PyTorch. What is built from a source distribution has to
    # have the version of that: pip checks it.
    released = {"version": f"{VERSION}+torch{minor}", "install_requires": [f"torch=={minor}.*"]}
    return {
        **(released if mode == "release" else {"version": VERSION}),
        "ext_modules": [gate],
        "cmdclass": {"build_ext": Build.with_options(use_ninja=False)},
    }


def found():
    """What there is to build; nothing but the version where PyTorch is not visible."""
    if mode == "skip":
        return {"version": VERSION}
    try:
        return extensions()
    except ImportError as error:
        if mode in ("require", "release"):
            raise SystemExit(
                f"{error}: install PyTorch first, and this with --no-build-isolation"
            ) from error
        return {"version": VERSION}


setup(**found())
