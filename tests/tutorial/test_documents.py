"""The documents' code runs as printed and prints what they say, and so do their commands."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from tests import torchvision_ops  # noqa: F401 - transformers imports torchvision if it is there
from tests.running import run_python
from tests.tutorial import documents

DOCUMENTS = [
    "README.md",
    "amanda-core/docs/tutorial.md",
    "amanda-core/docs/writing-a-tool.md",
    "amanda-core/docs/writing-a-driver.md",
    "amanda-core/docs/contract-kit.md",
]

FOLDER = documents.ROOT / "amanda-tools/docs"
OWN = "flops", "path", "../README"
"""Documents of the analysis tools, and of the package, that have Python blocks."""

TASKS = sorted(f"tasks/{path.stem}" for path in FOLDER.glob("tasks/*.md"))

ALL = [*("../../README", *OWN), *sorted({path.stem for path in FOLDER.glob("*.md")} - {*OWN})]

_CONSOLE = re.compile(
    r"^```console\n\$ (?P<command>.*?)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL
)


def consoles() -> list[tuple[str, str, str]]:
    """Each command of a document, and what it prints."""
    return [
        (name, match["command"], match["output"])
        for name in ALL
        for match in _CONSOLE.finditer((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    ]


def pattern_of(output: str) -> re.Pattern[str]:
    """A line ``...`` stands for any lines, ``...`` in a line for any text, times for any time."""
    lines = []
    for line in output.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        text = r".*?".join(re.escape(part) for part in line.split("..."))
        lines.append(text + r" *\n")
    return re.compile("".join(lines))


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *(f"amanda-tools/docs/{name}.md" for name in (*OWN, *TASKS))]
)
def test_blocks(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block prints exactly its output block."""
    monkeypatch.chdir(tmp_path)
    results = documents.run_document(document)
    assert results, "no Python block found"
    for block, printed in results:
        assert printed == block.output, f"output of the block at {block}"


@pytest.mark.parametrize(("name", "command", "output"), consoles())
def test_commands(name: str, command: str, output: str, tmp_path: Path) -> None:
    """Each command prints what the document shows of it."""
    words = shlex.split(command)
    assert words[0] == "amanda"
    for program in (documents.ROOT / "amanda-tools/examples").iterdir():
        if program.is_file():
            (tmp_path / program.name).write_bytes(program.read_bytes())
    done = run_python("-m", *words, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    found = pattern_of(output).match(done.stdout)
    shown = itertools.islice(done.stdout.splitlines(), 60)
    assert found, "\n".join(shown) + done.stderr
