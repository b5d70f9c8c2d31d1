"""The pages about the optimization tools: their code runs and prints what they say."""

from __future__ import annotations

import pytest

from tests.tutorial import documents


@pytest.mark.parametrize("page", ["inject", "prune", "quantize"])
def test_the_examples_print_what_the_page_says(page: str) -> None:
    for block, printed in documents.run_document(f"amanda-tools/docs/{page}.md"):
        assert printed == block.output, str(block)
