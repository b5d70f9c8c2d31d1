"""The benchmarks of the optimization tools run; times are asserted nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import accuracy, cache, lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("framework", "model", "methods"),
    [
        ("torch", "residual net", ("channels", "qat")),
        ("torch", "transformer", ("attention", "dynamic")),
        ("tensorflow", "transformer", ("magnitude",)),
    ],
)
def test_accuracy(framework: str, model: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    """A row for each method, in both files; what is trained is better than a guess."""
    pytest.importorskip(framework)
    wanted = [word for method in methods for word in ("--method", method)]
    where = ["--framework", framework, "--model", model, "--output", str(tmp_path / "table")]
    assert accuracy.main([*where, *wanted, "--epochs", "3", "--tuning", "1"]) == 0
    rows = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))["results"]
    table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    names = [row["method"] for row in rows]
    assert names[0] == "dense"
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == names
    assert len(names) == 1 + len(methods)
    assert all(any(part in name for part in methods) for name in names[1:])
    assert all(row["ops"] > 0 for row in rows[1:])
    assert rows[0]["after"] > 0.3
    assert all(row["after"] > 0.15 for row in rows[1:])


def test_the_page_has_the_table() -> None:
    """The documented table has all methods, with both accuracies of each network."""
    page = (ROOT / "amanda-tools/docs/accuracy.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["dense", *[m.name for m in accuracy.METHODS]]
    for row, method in zip(rows[3:], accuracy.METHODS, strict=True):
        assert sum("→" in cell for cell in row) == 2 * len(method.models)


@pytest.mark.parametrize("mode", cache.MODES)
def test_cache(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each tool, with the times that its ratio is made of."""
    pytest.importorskip({"eager": "torch", "function": "tensorflow"}[mode])
    arguments = ["--mode", mode, "--tool", "count", "--tool", "prune", "--rounds", "1"]
    assert cache.main([*arguments, "--runs", "1"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if " ms" in line}
    assert list(rows) == ["count", "prune"]
    assert all(float(number) > 0 for row in rows.values() for number in row if number != "ms")
    assert "on average" in printed


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row of the paper's Table 4, and whole tools, with at least one line each."""
    assert lines.main() == 0
    printed = capsys.readouterr().out
    for entry in (*lines.TABLE_4, *lines.OTHERS):
        assert entry.name in printed
        assert all(lines.files_of(name) for name in entry.modules)
        assert entry.lines() > 0


def test_only_code_is_counted(tmp_path: Path) -> None:
    """Documentation, comments and empty lines are no code; a call over two lines is two."""
    path = tmp_path / "example.py"
    path.write_text('"""Says."""\n\n# Why.\nx = max(\n    1, 2)  # both\n"""More."""\n')
    assert lines.code_lines(path) == 2
