"""The benchmark of memory: scopes keep none."""

from __future__ import annotations

import pytest

from tests.benchmarks import memory


@pytest.mark.parametrize("case", ["resnet18-b1-32-infer", "gpt2-4x64-train"])
def test_no_tensor_outlives_its_scope(case: str) -> None:
    """Memory after the scope equals memory before, to the tensor and to the byte."""
    usages = memory.measure(case)
    before, after = usages["before"], usages["after"]
    assert (after.tensors, after.tensor_bytes) == (before.tensors, before.tensor_bytes)
