"""The documents' code runs as printed, and prints what they say."""

from __future__ import annotations

import pytest

from tests import torchvision_ops  # noqa: F401 - transformers imports torchvision if it is there
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
