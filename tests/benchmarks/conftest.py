"""Benchmarks set PyTorch to one thread; their tests give the threads back."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    yield
    if torch:
        torch.set_num_threads(threads)
