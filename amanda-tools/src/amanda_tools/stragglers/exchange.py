"""The times of all ranks of a PyTorch program, through the store of its launcher.

Each rank writes the times of a window under a key of its own, and the first rank reads those that
are there: nobody waits for anybody. A gather over a group of its own would be a collective, which
all ranks must enter in one order, from the creation of the group on; a rank that is killed, or has
no such tool (``amanda run --ranks``), would keep the others waiting. The store is the ``TCPStore``
at ``MASTER_ADDR`` and ``MASTER_PORT``, by which PyTorch's processes find each other; a connection
of its own keeps the exchange apart from the program's. Four windows of each rank are kept there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from amanda_tools.stragglers.comparison import Names, Numbers

_TIMEOUT = timedelta(seconds=10)
"""After which a connection, or an answer, is given up."""

_KEPT = 4

_NUMBER, _DIGEST = 8, 32
"""Bytes of a window's number, and of the digest of the operators' names, before the times."""

_SCOPES = itertools.count()


class Exchange:
    """Writes and reads the times; its methods may wait for the store, and are called in a thread.

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
        self._written = ""
        self._names: dict[str, Names] = {}
        if self.rank == 0:
            self._store.set("reader", "")

    @property
    def has_reader(self) -> bool:
        """True if the first rank has the tool, and has come so far."""
        return bool(self._store.check(["reader"]))

    def is_first(self) -> bool:
        """True for one of the ranks that ask, once."""
        return bool(self._store.add("asked", 1) == 1)

    def write(self, window: int, names: Names, seconds: Numbers) -> None:
        """Write the times of this rank."""
        text = json.dumps(names.keys)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
        if digest != self._written:
            # Ranks with equal operators write them under one key.
            self._store.set(f"names/{digest}", text)
            self._written = digest
        head = window.to_bytes(_NUMBER, "little") + digest.encode()
        times = seconds.astype("<f4").tobytes()
        self._store.set(f"{self.rank}/{window % _KEPT}", head + times)

    def read(self, window: int) -> dict[int, tuple[Names, Numbers]]:
        """Return the times of the ranks that have written them."""
        return {rank: times for rank in range(self.size) for times in self._of_rank(rank, window)}

    def _of_rank(self, rank: int, window: int) -> Iterator[tuple[Names, Numbers]]:
        key = f"{rank}/{window % _KEPT}"
        if not self._store.check([key]):
            return
        content = self._store.get(key)
        if int.from_bytes(content[:_NUMBER], "little") != window:
            return
        digest, times = content[_NUMBER:][:_DIGEST].decode(), content[_NUMBER + _DIGEST :]
        if digest not in self._names:
            keys = json.loads(self._store.get(f"names/{digest}"))
            self._names[digest] = Names([(key[0], key[1], key[2]) for key in keys])
        yield self._names[digest], np.frombuffer(times, "<f4").astype(np.float64)
