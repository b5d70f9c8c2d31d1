"""Series and histograms of ``stats`` as an event file of TensorBoard."""

from __future__ import annotations

import errno
import importlib
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from amanda.files import replaced
from amanda_tools._bases.watching import Sample, WatchedTensor

_PARTS = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)

_FIGURES = ("mean", "std", "min", "max", "sparsity")
"""Figures of a :class:`Sample` that become scalars."""


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
            "tensorboard=true needs TensorBoard; try: pip install 'tensorboard>=2.16'"
        ) from error


def write_tensorboard(
    folder: Path, series: Iterable[Sample], watched: Iterable[WatchedTensor]
) -> Path:
    """Write an event file with the scalars of each sample and a histogram of each tensor.

    Returns:
        Path of the file.

    Raises:
        OSError: the file cannot be written, or `folder` is a symbolic link.
    """
    event_pb2, summary_pb2, writers = map(importlib.import_module, _PARTS)
    if folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "a link, which is not followed", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard recognizes event files by this name. Its own writer would start a thread.
    now = time.time()
    end = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
    path = folder / f"events.out.tfevents.{int(now)}.{end}"
    with replaced(path, binary=True) as file:
        writer = writers.RecordWriter(file)
        for fields in ({"file_version": "brain.Event:2"}, *_events(series, watched, summary_pb2)):
            writer.write(event_pb2.Event(wall_time=now, **fields).SerializeToString())
    return path


def _events(
    series: Iterable[Sample], watched: Iterable[WatchedTensor], summary_pb2: Any
) -> Iterator[dict[str, Any]]:
    """Yield the fields of events: a scalar of each figure, then a histogram of each tensor."""

    def event(step: int, key: str, name: str, **value: Any) -> dict[str, Any]:
        tagged = summary_pb2.Summary.Value(tag=f"{key.replace(' ', '/')}/{name}", **value)
        return {"step": step, "summary": summary_pb2.Summary(value=[tagged])}

    last = 0
    for sample in series:
        last = max(last, sample.step)
        for name in _FIGURES:
            figure = getattr(sample, name)
            if figure is not None:
                yield event(sample.step, sample.key, name, simple_value=figure)
    for tensor in watched:
        yield event(last, tensor.key, "histogram", histo=_histogram(summary_pb2, tensor))


def _histogram(summary_pb2: Any, watched: WatchedTensor) -> Any:
    """Return the elements of a tensor over the whole run, as TensorBoard's message."""
    moments, bins = watched.moments, watched.moments.histogram()
    count = sum(int(n) for _, _, n in bins)
    size = math.hypot(moments.deviation, moments.mean)
    return summary_pb2.HistogramProto(
        min=moments.minimum,
        max=moments.maximum,
        num=count,
        sum=moments.mean * count,
        sum_squares=size * size * count if count else 0.0,
        bucket_limit=[high for _, high, _ in bins],
        bucket=[n for _, _, n in bins],
    )
