"""The pages about the optimization tools: their code runs and prints what they say."""

from __future__ import annotations

import pytest

from tests.tutorial import documents


@pytest.mark.parametrize(
    "page",
    [
        "amanda-core/docs/subgraph-rewriting.md",
        "amanda-tools/docs/inject.md",
        "amanda-tools/docs/quantize.md",
    ],
)
def test_the_examples_print_what_the_page_says(page: str) -> None:
    for block, printed in documents.run_document(page):
        assert printed == block.output, str(block)
