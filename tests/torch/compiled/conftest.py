"""Each test compiles anew, and leaves nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _compiler_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PyTorch's compilers call deprecated functions of PyTorch, and ask for gradients of tensors
    that are no leaves."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for said in (
                ".torch.jit:DeprecationWarning",
                ".*script_method:DeprecationWarning",
                "The .grad attribute of a Tensor that is not a leaf:UserWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{said}"), append=False)
