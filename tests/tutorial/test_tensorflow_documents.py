"""The documents of amanda-tensorflow: their code, their tables, and the example's run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.running import run_python
from tests.tutorial import documents, tensorflow_contract

DOCUMENTS = ["amanda-tensorflow/README.md", "amanda-tensorflow/docs/driver.md"]
EXAMPLE = "amanda-tensorflow/examples/resnet50.py"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document(document: str) -> None:
    """Each block prints exactly its output block."""
    results = documents.run_document(document)
    assert results, "no Python block found"
    for block, printed in results:
        assert printed == block.output, f"output of the block at {block}"


@pytest.mark.slow
def test_skipped_contract_tests() -> None:
    """The README lists exactly the contract tests that are skipped, with the reason of each."""
    assert tensorflow_contract.in_readme() == tensorflow_contract.generated()


def run(*arguments: str) -> list[str]:
    """What a Python process prints."""
    done = run_python(*arguments, cwd=documents.ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_example_knows_nothing_of_amanda() -> None:
    """It is a plain program, without a word about instrumentation."""
    code = (documents.ROOT / EXAMPLE).read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code
    assert "amanda" not in code.lower()


@pytest.mark.slow
def test_example_under_count_and_trace(tmp_path: Path) -> None:
    """It trains as it would without us; the files hold the convolutions of both passes."""
    vanilla = run(EXAMPLE)
    assert len(vanilla) == 2
    printed = run("-m", "amanda", "run", "-t", "count,trace", "-o", str(tmp_path), "--", EXAMPLE)
    # Routines between operators that the graph optimizer would have fused cost the fusion, and so
    # the last bits (contract rule 11): on an AMD EPYC 3.0127 was printed for 3.0126.
    loss, shape = vanilla
    assert printed[1] == shape
    assert printed[0].rpartition(" ")[0] == loss.rpartition(" ")[0]
    told, expected = (float(line.rpartition(" ")[2]) for line in (printed[0], loss))
    assert told == pytest.approx(expected, abs=2e-4)
    executions: Counter[str] = Counter()
    for row in json.loads((tmp_path / "count.json").read_text(encoding="utf-8"))["ops"]:
        executions[row["type"]] += row["executions"]
    # One step of training and one prediction. The images' gradient is not wanted.
    assert executions["conv2d"] == 2 * 53
    assert executions["conv2d_backward"] in (53 + 52, 53 + 53)
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["tool"] == "trace"
