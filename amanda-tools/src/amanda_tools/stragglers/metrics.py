"""The operators with the most time as OpenTelemetry metrics, by the provider that the program has.

The provider is set by the program, or by ``opentelemetry-instrument`` from the variables
``OTEL_METRICS_EXPORTER`` and ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.description import OpDescription


def check() -> None:
    """Check that OpenTelemetry is installed.

    Raises:
        AmandaError: it is not.
    """
    try:
        import opentelemetry.sdk.metrics  # noqa: F401
    except ImportError as error:
        raise AmandaError(
            f"stragglers: otel needs OpenTelemetry ({error}): pip install 'amanda-tools[otel]'"
        ) from None


def export(
    ops: Mapping[int, OpDescription], rank: int, read: Callable[[int], tuple[float, int]]
) -> bool:
    """Export the sums of the time and the calls of operators from now on.

    Series have the attributes ``op_id``, ``type`` and ``rank``, and are these for ever: there are
    no more of them than operators.

    Args:
        ops: the operators by their numbers.
        rank: the number of this process.
        read: gives the seconds and the calls of an operator so far, by its number.

    Returns:
        False if the program has no provider until now.
    """
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    labels: dict[int, Mapping[str, Any]] = {
        number: {"op_id": op.id, "type": op.type, "rank": rank} for number, op in ops.items()
    }

    def observe(i: int) -> Iterable[metrics.Observation]:
        return [metrics.Observation(read(number)[i], of) for number, of in labels.items()]

    meter = metrics.get_meter("amanda")
    for i, (name, unit) in enumerate((("time", "s"), ("calls", "{call}"))):
        callback = lambda _, i=i: observe(i)  # noqa: E731
        meter.create_observable_counter(f"amanda.operator.{name}", [callback], unit)
    return isinstance(metrics.get_meter_provider(), MeterProvider)
