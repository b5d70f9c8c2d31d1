"""Makes torchvision importable beside a CPU build of PyTorch.

The wheel of torchvision on the package index is linked against CUDA, so that its
C operators do not load beside a CPU build, and its import fails where it attaches
meta functions to them. The models need none of these operators: it is enough that
their names exist. Import this module before torchvision, timm or transformers.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_NAME = re.compile(r'register_meta\("(\w+)"\)|"torchvision::(\w+)"')


def _define_missing_operators() -> torch.library.Library | None:
    """Define the names that torchvision expects, unless its own library loads.

    Returns:
        What keeps the definitions alive; None where nothing had to be defined.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    try:
        torch.ops.load_library(next(package.glob("_C*.so")))
    except (OSError, StopIteration):
        pass
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")
    source = (package / "_meta_registrations.py").read_text(encoding="utf-8")
    for match in _NAME.finditer(source):
        library.define(f"{match[1] or match[2]}(Tensor x) -> Tensor")
    return library


LIBRARY = _define_missing_operators()
