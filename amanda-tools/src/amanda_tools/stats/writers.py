"""The series of ``stats`` as CSV, and series and histograms for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from amanda_tools._bases.watching import Sample, WatchedTensor
from amanda_tools._output.csv_files import write_table
from amanda_tools._output.event_files import event_file, messages

FIGURES = ("mean", "std", "min", "max", "sparsity")
"""Figures of a :class:`Sample` that are written."""


def write_csv(path: Path, series: Iterable[Sample]) -> None:
    """Write a line per sample: step, key and figures.

    Raises:
        OSError: the file cannot be written.
    """
    write_table(path, ("step", "key", *FIGURES), map(attrs.astuple, series))


def write_tensorboard(
    folder: Path, series: Iterable[Sample], watched: Iterable[WatchedTensor]
) -> Path:
    """Write an event file with the scalars of each sample and a histogram of each tensor.

    Returns:
        Path of the file.

    Raises:
        OSError: the file cannot be written, or `folder` is a symbolic link.
    """
    _, summary_pb2 = messages()
    with event_file(folder) as events:

        def add(step: int, value: Any) -> None:
            events.write(step=step, summary=summary_pb2.Summary(value=[value]))

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
    return events.path


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
