"""The place of this process among the ranks of the program, as it is now, and its messages."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from amanda.cli.rank import Rank


def torch_group() -> Any:
    """Return ``torch.distributed`` if the program has made a group of processes; else None."""
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    is_there = distributed is not None and distributed.is_available()
    return distributed if is_there and distributed.is_initialized() else None


def current_rank() -> tuple[int, int | None]:
    """Return the rank of this process and the number of ranks, None if that is not known: those of
    PyTorch's group, and without one what the launcher has told."""
    if (distributed := torch_group()) is not None:
        return distributed.get_rank(), distributed.get_world_size()
    rank = Rank.of_environment()
    return rank.number, rank.count


def tell(message: str) -> None:
    """Print a message to stderr while the program runs, which goes on if that is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"amanda: {message}", file=sys.stderr, flush=True)
