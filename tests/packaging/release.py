"""The steps of a release: ``python -m tests.packaging.release TOOLS STEP ...``.

TOOLS is the folder of the programs that ``tests/constraints/release.txt`` pins. ``nox -s release``
takes the steps ``build`` and ``try``; before a tag is published, ``check`` is taken, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging import environments
from tests.packaging.environments import DRIVER_TEMPLATE, ROOT, TOOL_TEMPLATE

PURE = ("amanda-core", "amanda-torch", "amanda-tensorflow", "amanda-tools")
EXAMPLES = (TOOL_TEMPLATE, DRIVER_TEMPLATE, ROOT / "tests/packaging/autograd_driver")
DIST, SBOM = ROOT / "dist", ROOT / "build" / "sbom.cdx.json"
FIT = """
import keras, numpy
from amanda_tools.keras import Callback
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
tools = Callback("flops,nan", output="fit", html=True)
model.fit(numpy.zeros((8, 4)), numpy.zeros((8, 2)), callbacks=[tools], verbose=0)
"""
NEEDED = "attrs importlib-metadata pluggy torch tensorflow-cpu jinja2 safetensors xxhash autograd"


def build(tools: Path) -> None:
    """Build ``dist``: of the extension the sources alone, which are for any PyTorch."""
    shutil.rmtree(DIST, ignore_errors=True)
    command = [tools / "python", "-m", "build", "--no-isolation", "--outdir", DIST]
    for name in PURE:
        subprocess.run([*command, ROOT / name], check=True)
    skip = {**os.environ, "AMANDA_TORCH_ACCEL_BUILD": "skip"}
    subprocess.run([*command, "--sdist", ROOT / "amanda-torch/accel"], check=True, env=skip)
    subprocess.run([tools / "twine", "check", "--strict", *DIST.iterdir()], check=True)


def try_out(tools: Path) -> None:
    """Go a stranger's way where only wheels are installed, with what the README says: the install
    line, the first command, a tool of one's own; Keras' callback, the doctor. Write the SBOM."""
    readme = (ROOT / "README.md").read_text()
    names = re.search(r"pip install --find-links FOLDER ([\w -]+)`", readme)[1].split()
    commands = [text.split() for text in re.findall(r"\b(amanda run .* train\.py)\b", readme)]
    assert len(commands) == 2
    sources = (*DIST.glob("amanda_torch_accel-*.tar.gz"), *EXAMPLES)
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name) / "wheels"
        environments.wheel(wheels, *sources, AMANDA_TORCH_ACCEL_BUILD="release")
        fresh = environments.created(Path(name) / "fresh", NEEDED.split())
        others = [path.name.partition("-")[0] for path in wheels.iterdir()]
        environments.install(fresh, f"-f{DIST}", *names)
        environments.install(fresh, f"-f{DIST}", f"-f{wheels}", *PURE, *others)
        shutil.copy(ROOT / "amanda-tools/examples/train.py", fresh.folder)
        own = re.search(r"```python\n(.*?)\n\n\nmodel =", readme, re.DOTALL)[1]
        (fresh.folder / "mytools.py").write_text(own)
        (fresh.folder / "fit.py").write_text(FIT)
        for words in (*commands, ["python", "fit.py"], ["amanda", "doctor"]):
            run = fresh.run(*words)
            print(run.stdout, run.stderr)
            assert run.returncode == 0, words
        assert {"flops.json", "nan.json", "report.html"} <= set(os.listdir(fresh.folder / "fit"))
        for check in (
            "torch-eager: self_test",
            "tensorflow-graph: self_test",
            "autograd-eager: attach",
        ):
            assert f"{check} passed" in run.stdout
        assert "amanda-torch-accel 0.1.0+torch" in run.stdout
        SBOM.parent.mkdir(exist_ok=True)
        program = (tools / "cyclonedx-py", "environment", fresh.folder / "bin/python")
        subprocess.run([*program, "--output-file", SBOM], check=True)


def check(tools: Path) -> None:
    """See that all in ``dist`` has the version of the tag, and changelogs have its date."""
    version = os.environ["GITHUB_REF_NAME"].removeprefix("v")
    dated = re.compile(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)
    wrong = [path for path in DIST.iterdir() if f"-{version}" not in path.name]
    for path in ROOT.glob("amanda-*/CHANGELOG.md"):
        wrong += [] if dated.search(path.read_text()) else [path]
    if wrong:
        raise SystemExit(f"not ready for {version}: {', '.join(map(str, wrong))}")


if __name__ == "__main__":
    for step in sys.argv[2:]:
        {"build": build, "try": try_out, "check": check}[step](Path(sys.argv[1]))
