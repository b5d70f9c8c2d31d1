"""The times of all ranks of a PyTorch program, through the store of its launcher.

Each rank writes the times of a window under a key of its own, and the first rank reads those that
are there: no rank waits for another one. A gather over a group of its own would be a collective,
which all ranks must enter in one order, from the creation of the group on: a rank that is killed,
or has no such tool (``amanda run --ranks``), would keep the others waiting. The store is the
``TCPStore`` at ``MASTER_ADDR`` and ``MASTER_PORT``, by which PyTorch's processes find each other; a
connection of its own keeps the exchange apart from the program's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from amanda_tools.stragglers.comparison import Key, Numbers

_TIMEOUT = timedelta(seconds=10)
"""After which a connection, or an answer, is given up."""

_PATIENCE = 1.0
"""Seconds after which ranks that have not written are left out, if the next window is there."""

_MOST_MISSES = 3
"""Windows that a rank has not written, one after the other, after which it is not waited for."""

_KEPT = 4
"""Windows of each rank that stay in the store."""

_DIGEST = 32
"""Bytes of the digest of the operators, before their times."""

_SCOPES = itertools.count()


class Exchange:
    """Writes and reads the times; its methods wait for the store, and are called in a thread.

    Args:
        distributed: the module ``torch.distributed``.

    Raises:
        LookupError: the launcher has set no address.
        RuntimeError: the store does not answer; by all methods.
    """

    def __init__(self, distributed: Any) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        address, port = map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))
        if not address or not port:
            raise LookupError("MASTER_ADDR and MASTER_PORT are not set")
        store = distributed.TCPStore(address, int(port), timeout=_TIMEOUT, wait_for_workers=False)
        # Scopes are told apart, and attempts by torchrun, which may keep the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"amanda/stragglers/{attempt}/{next(_SCOPES)}"
        self._store: Any = distributed.PrefixStore(prefix, store)
        self._names: dict[str, Sequence[Key]] = {}
        self._misses = [0] * self.size
        if self.rank == 0:
            self._store.set("reader", "")

    def has_reader(self) -> bool:
        """True if the first rank has the tool, and has come so far."""
        return bool(self._store.check(["reader"]))

    def write(self, window: int, keys: Sequence[Key], seconds: Numbers) -> None:
        """Write the times of this rank."""
        text = json.dumps(keys)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
        if digest not in self._names:
            # Ranks with equal operators write them under one key.
            self._store.set(digest, text)
            self._names[digest] = keys
        self._store.set(f"{window}/{self.rank}", digest.encode() + seconds.astype("<f4").tobytes())
        self._store.delete_key(f"{window - _KEPT}/{self.rank}")

    def read(
        self, window: int, hurries: Callable[[], bool]
    ) -> dict[int, tuple[Sequence[Key], Numbers]]:
        """Return the times of the ranks that have written them, or write them soon.

        Args:
            window: its number.
            hurries: whether there is something else to do.
        """
        keys = [f"{window}/{rank}" for rank in range(self.size)]
        began, pause = time.monotonic(), 0.02
        while True:
            ranks = [rank for rank, key in enumerate(keys) if self._store.check([key])]
            missing = {*range(self.size)}.difference(ranks)
            is_over = hurries() and time.monotonic() - began > _PATIENCE
            if is_over or all(self._misses[rank] >= _MOST_MISSES for rank in missing):
                break
            time.sleep(pause)
            pause = min(2 * pause, _PATIENCE)
        self._misses = [self._misses[r] + 1 if r in missing else 0 for r in range(self.size)]
        contents = self._store.multi_get([keys[rank] for rank in ranks])
        return dict(zip(ranks, map(self._read_times, contents), strict=True))

    def _read_times(self, content: bytes) -> tuple[Sequence[Key], Numbers]:
        digest = content[:_DIGEST].decode()
        if digest not in self._names:
            self._names[digest] = [tuple(key) for key in json.loads(self._store.get(digest))]
        return self._names[digest], np.frombuffer(content[_DIGEST:], "<f4").astype(np.float64)
