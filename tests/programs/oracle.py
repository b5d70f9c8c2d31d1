"""Figures of a script by PyTorch's own means: ``python -m tests.programs.oracle script.py``.

The last line is JSON: ``flops`` by the formulas of torch.utils.flop_counter, and ``producers``, the
operators of ATen that give a NaN or an infinity for finite inputs, by a dispatch mode; ``nodes``,
backward operators that the engine has run, by the profiler; ``anomaly``, what anomaly mode raises.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Watch(TorchDispatchMode):
    """Adds up the operations of all operators of ATen, and notes those that produce a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.is_complete = False
        self.producers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls not in (torch.Tensor, torch.nn.Parameter) for cls in types):
            # A class of tensors runs its operators unseen.
            return func(*args, **(kwargs or {}))
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet not in flop_registry:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        was_finite = all(map(_is_finite, tree_leaves((args, kwargs))))
        result = func(*args, **kwargs)
        # Those that change their inputs in place may return nothing.
        is_made = was_finite and not packet.__name__.startswith(("empty", "new_empty"))
        if is_made and not all(map(_is_finite, tree_leaves((result, args)))):
            self.producers.append(packet.__name__)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        return result


def _is_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_nested or value.is_meta:
        return True
    # The engine's zeros have no storage.
    if value._is_zerotensor() or not (value.is_floating_point() or value.is_complex()):  # noqa: SLF001
        return True
    return bool(value.to_dense().isfinite().all())


def main(script: str) -> None:
    """Run the script for each figure, and print them."""
    sys.path.insert(0, str(Path(script).parent))
    warnings.simplefilter("ignore")
    # First: TorchScript runs one operator by one until it has compiled.
    with torch.profiler.profile() as profiler:
        runpy.run_path(script)
    watch = Watch()
    # Some operators of nested tensors fail under dispatch modes (2.13): FLOPs are null then.
    with contextlib.suppress(RuntimeError), watch:
        runpy.run_path(script)
        watch.is_complete = True
    nodes = [event.name for event in profiler.events() if event.scope == 1]
    anomaly = ""
    try:
        with torch.autograd.detect_anomaly():
            runpy.run_path(script)
    except RuntimeError as error:
        anomaly = str(error)
    flops = watch.flops if watch.is_complete else None
    figures = {"flops": flops, "producers": watch.producers, "nodes": len(nodes)}
    print(json.dumps({**figures, "anomaly": anomaly}))


if __name__ == "__main__":
    main(sys.argv[1])
