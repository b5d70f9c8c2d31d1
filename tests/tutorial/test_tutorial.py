"""The documents' code runs as printed, and prints what they say."""

from __future__ import annotations

import re

import pytest

from tests import torchvision_ops  # noqa: F401 - the tutorial imports torchvision
from tests.tutorial import documents

DOCUMENTS = [
    "README.md",
    "amanda-core/README.md",
    "amanda-core/docs/tutorial.md",
    "amanda-core/docs/writing-a-tool.md",
    "amanda-core/docs/messages.md",
    "amanda-core/docs/writing-a-driver.md",
    "amanda-core/docs/contract-kit.md",
    "amanda-torch/docs/driver.md",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document(document: str) -> None:
    """Each block prints exactly its output block."""
    results = documents.run_document(document)
    assert results, "no Python block found"
    for block, printed in results:
        assert printed == block.output, f"output of the block at {block}"


LINKING = [
    "CONTRIBUTING.md",
    "amanda-core/docs/command-line.md",
    "amanda-core/docs/contract.md",
    "amanda-core/docs/notebooks.md",
    "amanda-core/docs/publishing.md",
    "amanda-core/docs/subgraph-rewriting.md",
    "amanda-torch/README.md",
]


@pytest.mark.parametrize("document", [*DOCUMENTS, *LINKING])
def test_links(document: str) -> None:
    """Links between documents lead to files that exist."""
    path = documents.ROOT / document
    prose = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert [link for link in links if not (path.parent / link).exists()] == []
