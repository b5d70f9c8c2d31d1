"""The size of the pruning methods, beside the paper's (Table 4)."""

from __future__ import annotations

import pytest

from tests.benchmarks.lines import TABLE_4, Entry


@pytest.mark.parametrize("entry", TABLE_4, ids=lambda entry: entry.name)
def test_a_method_has_no_more_lines_than_the_papers(entry: Entry) -> None:
    """What all methods share (the tool, its options) is left out, as in the paper Amanda is."""
    assert entry.paper is not None
    assert 40 < entry.lines() <= entry.paper
