"""The screens of the documents: what tools print of programs of real shape, at 100 and 80 columns.

    python -m tests.screens             # all of them, some ten minutes
    python -m tests.screens vit unet    # these

A program is a file of `amanda-tools/examples/screens`, its screens are written to
`amanda-tools/docs/screens`. The command fails if a line is wider than the terminal, or if the
screen of a tool has more than 40 lines; messages of the command itself, whose lines begin with
`amanda:`, have any length.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "amanda-tools/examples/screens"
SCREENS = ROOT / "amanda-tools/docs/screens"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
TOOLS = "summary,flops,profile,stats,nan"
MORE = dict.fromkeys(("keras_fit", "nanogpt"), ",trace,count,kernels,coverage,sparsity")
WIDTHS = (100, 80)
MOST_LINES = 40


def take(name: str, width: int) -> str:
    """What a run prints on stdout, with its command above."""
    words = ["amanda", "run", "-t", TOOLS + MORE.get(name, ""), "--", f"{name}.py"]
    with tempfile.TemporaryDirectory() as folder:
        if name != "keras_fit":
            # A torchvision that is built for CUDA does not load beside a CPU build of PyTorch.
            (Path(folder) / "sitecustomize.py").write_text("import tests.torchvision_ops")
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"COLUMNS": str(width), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", *words]
        run = subprocess.run(
            command, cwd=SCRIPTS, env={**os.environ, **own}, stdout=subprocess.PIPE, check=True
        )
    return f"$ {' '.join(words)}\n{run.stdout.decode()}"


def complaints(screen: str, width: int) -> list[str]:
    """What is wrong with the screens of a run, which begin after the output of the program."""
    found, counts, tool = [], collections.Counter[str](), ""
    for line in screen.splitlines():
        tool = (re.match(r"[a-z]+(?=:| of | by )", line) or [tool])[0]
        counts[tool] += tool not in ("", "amanda")
        if counts[tool] and len(line) > width:
            found.append(f"wider than {width}: {line}")
    return found + [f"{n} lines of {tool}" for tool, n in counts.items() if n > MOST_LINES]


def main(names: list[str]) -> None:
    """Take the screens of these programs, or of all."""
    found = []
    for name in names or NAMES:
        for width in WIDTHS:
            screen = take(name, width)
            (SCREENS / f"{name}-{width}.txt").write_text(screen)
            found += [f"{name}-{width}: {text}" for text in complaints(screen, width)]
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main(sys.argv[1:])
