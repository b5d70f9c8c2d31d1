"""The modules of PyTorch: their tree, and a routine that reports their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amanda import deferrable
from amanda.interface.points import Point, PointContext
from amanda_tools._frameworks import is_keras
from amanda_tools._internals import is_in_backward, own_parts
from amanda_tools.summary.keras_layers import KerasModules
from amanda_tools.summary.recorder import (
    ModuleFact,
    ModuleSource,
    ParameterFact,
    Recorder,
    tensor_rows,
)


class TorchModules(ModuleSource):
    """Names and descriptions of modules of PyTorch."""

    separator = "."

    def name(self, root: nn.Module) -> str:
        return type(root).__name__

    def root_path(self, root: nn.Module) -> str:
        return ""

    def modules(self, root: nn.Module) -> Iterator[tuple[str, Any]]:
        # Not named_modules(): its nested generators cost time in proportion to the depth.
        walk, above = [iter([("", root)])], [0]
        while walk:
            path, module = next(walk[-1], ("", None))
            if module is None:
                walk.pop()
                above.pop()
            # A module may contain a module around it.
            elif id(module) not in above:
                yield path, module
                above.append(id(module))
                walk.append(_children(path, module))

    def local_name(self, module: nn.Module) -> str:
        return ""

    def describe(self, path: str, depth: int, module: nn.Module) -> ModuleFact:
        own = [
            ParameterFact(id(p), p.numel(), p.numel() * p.element_size(), p.requires_grad)
            for p in _parameters(module)
            # A parameter of a lazy module has no size before its first call.
            if not isinstance(p, nn.parameter.UninitializedParameter)
        ]
        # The operators of TorchScript run in C++.
        is_seen = not isinstance(module, torch.jit.ScriptModule)
        return ModuleFact(path, type(module).__name__, depth, own, is_seen=is_seen)

    def weights(self, module: nn.Module) -> dict[str, Any]:
        own = module.named_parameters(recurse=False)
        lazy = nn.parameter.UninitializedParameter
        return {name: list(p.shape) for name, p in own if not isinstance(p, lazy)}


def _children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return path and module of the children; a shared child has several paths."""
    prefix = f"{path}." if path else ""
    own, _ = own_parts(module)
    return ((f"{prefix}{name}", child) for name, child in own.items() if child is not None)


def _parameters(top: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module and of all modules in it, each once."""
    # Not parameters(), which is slow in deep trees: it would be called for each module.
    waiting, seen = [top], {id(top)}
    found: dict[int, nn.Parameter] = {}
    while waiting:
        modules, parameters = own_parts(waiting.pop())
        for parameter in parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
        for child in modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return list(found.values())


class TorchCalls:
    """Reports the calls of modules to a recorder.

    By a routine of the driver, not by hooks, which PyTorch's tracers would record.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._modules, self._layers = TorchModules(), KerasModules()

    @deferrable
    def passed(self, point: PointContext) -> None:
        """Instrumentation routine: a module is entered or left."""
        module = point.target
        if not isinstance(module, nn.Module):
            return
        if point.point is Point.MODULE_EXIT:
            self._recorder.leave(module, tensor_rows(point.outputs), point.inputs)
            return
        source = self._layers if is_keras(module) else self._modules
        # Recomputation in a checkpoint repeats calls of the forward pass.
        self._recorder.enter(source, module, is_hidden=is_in_backward())
