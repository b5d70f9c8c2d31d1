"""The benchmark of accuracy runs, and the documented table is its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import accuracy

ROOT = Path(__file__).parents[2]


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
