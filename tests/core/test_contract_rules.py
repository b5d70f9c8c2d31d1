"""The rules of the contract: their examples run, and what cites a rule cites one that exists."""

from __future__ import annotations

import re

from tests.tutorial import documents

DOCUMENT = "amanda-core/docs/contract.md"


def test_the_examples_run() -> None:
    """Each example of a rule prints exactly what stands below it."""
    for block, printed in documents.run_document(DOCUMENT):
        assert printed == block.output, f"output of the block at {block}"


def test_every_rule_has_an_example() -> None:
    """The rules are numbered from 1 to 15, and each has an example with its output."""
    text = (documents.ROOT / DOCUMENT).read_text(encoding="utf-8")
    _, *rules = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)
    assert [int(rule.partition(".")[0]) for rule in rules] == list(range(1, 16))
    assert [rule for rule in rules if "```python" not in rule or "```text" not in rule] == []


def test_citations_name_a_rule() -> None:
    """Where code, tests or documents cite the contract, there is a rule of that number."""
    cited: dict[str, set[int]] = {}
    for folder in ("amanda-*/src", "amanda-*/docs", "amanda-*/templates", "tests"):
        for file in documents.ROOT.glob(f"{folder}/**/*"):
            if file.suffix in (".py", ".md") and file.is_file():
                text = " ".join(file.read_text(encoding="utf-8").split()).lower()
                found = re.findall(r"contract rules? (\d+)(?: (?:to|and) (\d+))?", text)
                cited[str(file)] = {int(number) for pair in found for number in pair if number}
    assert any(cited.values())
    assert {file: rules for file, rules in cited.items() if rules - set(range(1, 16))} == {}
