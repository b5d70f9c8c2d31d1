"""The series of ``stats`` as CSV, and series and histograms for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from amanda_tools._bases.watching import Sample, WatchedTensor
from amanda_tools._output.csv_files import write_table
from amanda_tools._output.event_files import event_file

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
    last = 0
    with event_file(folder) as events:
        summary_pb2 = events.summary_pb2

        def write(step: int, key: str, name: str, **value: Any) -> None:
            tag = f"{key.replace(' ', '/')}/{name}"
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, **value)])
            events.write(step=step, summary=summary)

        for sample in series:
            last = max(last, sample.step)
            for name in FIGURES:
                figure = getattr(sample, name)
                if figure is not None:
                    write(sample.step, sample.key, name, simple_value=figure)
        for tensor in watched:
            write(last, tensor.key, "histogram", histo=_histogram(summary_pb2, tensor))
    return events.path


def _histogram(summary_pb2: Any, watched: WatchedTensor) -> Any:
    """The elements of a tensor over the whole run, as TensorBoard's message."""
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
