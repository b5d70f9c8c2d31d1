"""The series of ``stats`` as CSV, and series and histograms for TensorBoard."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from amanda.files import replaced
from amanda_tools._bases.watching import Sample, WatchedTensor
from amanda_tools._output.csv_files import write_table

_TENSORBOARD = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)

FIGURES = ("mean", "std", "min", "max", "sparsity")
"""Figures of a :class:`Sample` that are written."""


def write_csv(path: Path, series: Iterable[Sample]) -> None:
    """Write a line per sample: step, key and figures.

    Raises:
        OSError: the file cannot be written.
    """
    write_table(path, ("step", "key", *FIGURES), map(attrs.astuple, series))


def require_tensorboard() -> None:
    """Import the parts of TensorBoard that writing needs.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        # All of them now: results may be written while Python ends, when modules that start threads
        # cannot be imported any more.
        for name in _TENSORBOARD:
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            "tensorboard=true needs TensorBoard; try: pip install 'amanda-tools[tensorboard]'"
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
    event_pb2, summary_pb2, writers = map(importlib.import_module, _TENSORBOARD)
    if folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "a link, which is not followed", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard recognizes event files by this name. Its own writer would start a thread.
    now, host = time.time(), socket.gethostname()
    path = folder / f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{time.monotonic_ns()}"

    with replaced(path, binary=True) as file:
        writer = writers.RecordWriter(file)
        head = event_pb2.Event(wall_time=now, file_version="brain.Event:2")
        writer.write(head.SerializeToString())

        def add(step: int, value: Any) -> None:
            summary = summary_pb2.Summary(value=[value])
            event = event_pb2.Event(wall_time=now, step=step, summary=summary)
            writer.write(event.SerializeToString())

        last = 0
        for look in series:
            last = max(last, look.step)
            tag = look.key.replace(" ", "/")
            for name in FIGURES:
                figure = getattr(look, name)
                if figure is not None:
                    value = summary_pb2.Summary.Value(tag=f"{tag}/{name}", simple_value=figure)
                    add(look.step, value)
        for entry in watched:
            histogram = _histogram(summary_pb2, entry)
            tag = entry.key.replace(" ", "/")
            add(last, summary_pb2.Summary.Value(tag=f"{tag}/histogram", histo=histogram))
    return path


def _histogram(summary_pb2: Any, watched: WatchedTensor) -> Any:
    """-"""
    moments, bins = watched.moments, watched.moments.histogram()
    count = sum(int(n) for _, _, n in bins)
    return summary_pb2.HistogramProto(
        min=moments.minimum,
        max=moments.maximum,
        num=count,
        sum=moments.mean * count,
        sum_squares=(moments.deviation**2 + moments.mean**2) * count if count else 0.0,
        bucket_limit=[high for _, high, _ in bins],
        bucket=[n for _, _, n in bins],
    )
