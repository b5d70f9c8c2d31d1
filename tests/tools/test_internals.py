"""The private symbols of PyTorch that amanda-tools reads."""

from __future__ import annotations

import pytest
import torch

from amanda_tools import _internals


def test_no_symbol_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the supported versions all are there; one that goes is named."""
    assert _internals.missing() == []
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    assert _internals.missing() == ["torch.autograd._profiler_enabled"]
    enabled = _internals._profiler_enabled  # noqa: SLF001 - looked up once in a process
    enabled.cache_clear()
    assert not _internals.is_profiling()
    enabled.cache_clear()


def test_saved_tensors_are_not_unpacked() -> None:
    """Neither the program's hooks nor a finished backward pass stand in the way."""
    unpacked = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = x.exp()
    assert len(list(_internals.raw_saved_tensors(y.grad_fn))) == 1
    assert unpacked == []
    y.sum().backward()
    assert unpacked
    list(_internals.raw_saved_tensors(y.grad_fn))
