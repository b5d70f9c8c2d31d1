"""The private symbols of PyTorch that amanda-tools reads."""

from __future__ import annotations

import importlib

import pytest
import torch

from amanda_tools import _internals


def test_no_symbol_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the supported versions all are there; without one there is less."""
    places = [path.rpartition(".") for path in _internals.SYMBOLS]
    owners = [(importlib.import_module(module), name) for module, _, name in places]
    owners += [(torch.ones(1), "_version"), (torch.ones(1), "_values")]
    owners += [(torch.nn.Module(), name) for name in ("_modules", "_parameters")]
    assert [name for owner, name in owners if not hasattr(owner, name)] == []
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
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
