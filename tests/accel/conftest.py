"""The gate and the toy library, compiled for the Python that runs the tests."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
GATE = HERE.parents[1] / "amanda-torch" / "accel" / "src" / "amanda_torch_accel" / "gate.c"
WARNINGS = "-Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers"


def compiled(source: Path, folder: Path) -> ModuleType:
    """The extension module of one C file."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip("there is no C compiler")
    target = folder / (source.stem + sysconfig.get_config_var("EXT_SUFFIX"))
    include = sysconfig.get_paths()["include"]
    options = [*WARNINGS.split(), "-Wno-cast-function-type", "-O2", "-fPIC", "-shared"]
    subprocess.run(
        [*compiler, *options, f"-I{include}", str(source), "-o", str(target)], check=True
    )
    spec = importlib.util.spec_from_file_location(source.stem, target)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The gate and the toy; configure() is called once per process."""
    folder = tmp_path_factory.mktemp("accel")
    return compiled(GATE, folder), compiled(HERE / "toy.c", folder)
