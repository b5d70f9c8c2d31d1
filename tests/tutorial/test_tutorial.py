"""The documents' code runs as printed, and prints what they say."""

from __future__ import annotations

import pytest

from tests import torchvision_ops  # noqa: F401 - the tutorial imports torchvision
from tests.tutorial import documents

DOCUMENTS = [
    "amanda-core/docs/tutorial.md",
    "amanda-core/docs/writing-a-tool.md",
    "amanda-core/docs/messages.md",
    "amanda-core/docs/writing-a-driver.md",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document(document: str) -> None:
    """Each block prints exactly its output block."""
    results = documents.run_document(document)
    assert len(results) >= 5
    for block, printed in results:
        assert printed == block.output, f"output of the block at {block}"
