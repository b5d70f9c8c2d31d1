"""Event files of TensorBoard: scalars and histograms.

::

    require_tensorboard()
    with event_file(folder) as events:
        events.write(step=3, summary=...)
    events.path
"""

from __future__ import annotations

import errno
import importlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from amanda.files import replaced

_PARTS = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)


def require_tensorboard() -> None:
    """Import the parts of TensorBoard that writing needs.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        # All of them now: results may be written while Python ends, when modules that start threads
        # cannot be imported any more.
        for name in _PARTS:
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            "tensorboard=true needs TensorBoard; try: pip install 'amanda-tools[tensorboard]'"
        ) from error


@attrs.define
class Events:
    """An event file open for writing.

    Attributes:
        path: path of the file.
        summary_pb2: TensorBoard's messages about summaries.
    """

    path: Path
    summary_pb2: Any
    _event_pb2: Any
    _writer: Any
    _now: float

    def write(self, **fields: Any) -> None:
        """Write an event with these fields of its message."""
        event = self._event_pb2.Event(wall_time=self._now, **fields)
        self._writer.write(event.SerializeToString())


@contextmanager
def event_file(folder: Path) -> Iterator[Events]:
    """Create a folder and an event file in it, which is open within the ``with`` block.

    Raises:
        OSError: the file cannot be written, or `folder` is a symbolic link.
    """
    event_pb2, summary_pb2, writers = map(importlib.import_module, _PARTS)
    if folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "a link, which is not followed", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard recognizes event files by this name. Its own writer would start a thread.
    host = socket.gethostname()
    now = time.time()
    name = f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{time.monotonic_ns()}"
    with replaced(folder / name, binary=True) as file:
        events = Events(folder / name, summary_pb2, event_pb2, writers.RecordWriter(file), now)
        events.write(file_version="brain.Event:2")
        yield events
