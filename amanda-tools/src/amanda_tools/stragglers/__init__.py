"""``stragglers``: names the rank that is late, and in what, while a distributed program runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda import OpContext
from amanda.interface.points import PointContext
from amanda.results import Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import ReportingTool
from amanda_tools._bases.ranks import current_rank, tell, torch_group
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools.stragglers import metrics
from amanda_tools.stragglers.comparison import FEWEST, Comparison, Key, Numbers
from amanda_tools.stragglers.exchange import Exchange
from amanda_tools.stragglers.work import Stopwatch, Work

__all__ = ["StragglersOptions", "StragglersTool"]

_WAITING = 4
"""Windows that may wait for the thread; further ones are dropped."""

_SECONDS = 3.0
"""Seconds in which the store has to answer at the end."""

_FEWEST_WINDOWS = 2

_Window = tuple[int, Sequence[Key], Numbers]
"""Its number, from 1, the operators known, and the seconds of each in a step."""


@attrs.frozen(kw_only=True)
class StragglersOptions:
    """The options of ``stragglers``.

    Attributes:
        every: steps in a window, after which ranks exchange their times.
        late: deviations (MAD) from which on a rank is late.
        windows: consecutive windows in which it has to be late; the first one never counts.
        sync: wait for CUDA devices before reading the clock, so that times are of their work and
            not of its launch; slower.
        otel: operators whose time is exported as OpenTelemetry metrics, those with the most.
    """

    every: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    late: float = attrs.field(default=4.0, validator=attrs.validators.gt(0))
    windows: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    sync: bool = False
    otel: int = attrs.field(default=0, validator=attrs.validators.ge(0))


class StragglersTool(ReportingTool[StragglersOptions]):
    """Names the rank that is late, and in which operator.

    Example: ``amanda run -t stragglers -o out -- train.py``, under ``torchrun``

    Attributes:
        comparison: of the ranks, on the first one; None on others and before the first window.
    """

    name = "stragglers"
    group = "find"
    Options = StragglersOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options.otel:
            metrics.check()
        self.comparison: Comparison | None = None
        self._stopwatch = Stopwatch(sync=self.options.sync)
        self._ops: list[OpDescription] = []
        self._numbers: dict[str, int] = {}
        self._keys: Sequence[Key] = []
        self._seconds: Numbers = np.zeros(0)
        self._sums: dict[int, Work] = {}
        self._windows = self._dropped = 0
        self._sharing: _Sharing | None = None
        self.depends_on(MappingTool.standard())
        for is_backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=is_backward)
        self.add_inst_for_iteration(self._begin_window)
        self.add_inst_for_iteration(self._end_window, end=True)

    def exit_scope(self) -> None:
        """Close the files of the stopwatch, compare what is there, and end the thread."""
        self._stopwatch.close()
        if self._sharing is not None:
            self._sharing.close()

    # -- recording --------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        if not context.runs_at_once:
            return
        op = describe(context)
        number = self._numbers.setdefault(op.id, len(self._ops))
        if number == len(self._ops):
            self._ops.append(op)
        waits = "waits" in row_of(op.type).traits
        start, stop = self._stopwatch.routines(number, waits=waits)
        insert_before(context, start)
        insert_after(context, stop)

    def _begin_window(self, point: PointContext) -> None:
        if not point.follows:
            # Evaluations between steps.
            self._stopwatch.drop()
        if point.iteration == 0:
            # Those before training, which begins to count anew.
            self._stopwatch.take()

    def _end_window(self, point: PointContext) -> None:
        self._stopwatch.end_step()
        window, rest = divmod(point.iteration + 1, self.options.every)
        if rest:
            return
        self._sum_up(self._stopwatch.take())
        self._windows += 1
        if self._windows == 1 and self.options.otel:
            self._export()
        # Frameworks allocate and compile in the first one.
        if window == 1 or (distributed := torch_group()) is None:
            return
        if self._sharing is None or self._sharing.is_closing:
            self._sharing = _Sharing(self, distributed)
            self._sharing.start()
        try:
            self._sharing.windows.put_nowait((window, self._keys, self._seconds))
        except queue.Full:
            self._dropped += 1

    def _sum_up(self, window: Mapping[int, Work]) -> None:
        """Compute the time of each operator in a step of this window, by its usual execution."""
        self._keys = [(op.id, op.module, op.direction) for op in self._ops]
        self._seconds = np.full(len(self._keys), np.nan)
        for number, work in window.items():
            total = self._sums.setdefault(number, Work())
            total.calls += work.calls
            total.nanoseconds += work.nanoseconds
            if number not in self._stopwatch.waiting:
                calls = work.calls / self.options.every
                self._seconds[number] = work.usual / 1e9 * calls

    def _export(self) -> None:
        # OpenTelemetry keeps what it reads, which therefore is not the tool.
        sums = self._sums
        most = sorted(sums, key=lambda number: -sums[number].nanoseconds)

        def read(number: int) -> tuple[float, int]:
            return sums[number].nanoseconds / 1e9, sums[number].calls

        ops = {number: self._ops[number] for number in most[: self.options.otel]}
        if not metrics.export(ops, current_rank()[0], read):
            tell("stragglers: otel: the program has set no provider of metrics until now")

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that was timed, with its ``seconds`` in a step of the last window,
        null if it did not run. On the first of several ranks also the ``median``, the ``mad``, the
        ``slowest`` and the ``slowest_rank`` of the ranks.
        """
        compared = self.comparison.operators if self.comparison else {}
        return [
            {**op.row(), "seconds": None if np.isnan(each) else each, **compared.get(op.id, {})}
            for op, each in zip(self._ops, self._seconds.tolist(), strict=False)
            if self._numbers[op.id] not in self._stopwatch.waiting
        ]

    def summary(self) -> dict[str, Any]:
        """The ``windows``, those ``dropped``, ``not_compared``, the reason for which ranks were
        not compared or "", and the ``stragglers``."""
        found = self.comparison.found if self.comparison else []
        return {
            "windows": self._windows,
            "dropped": self._dropped,
            "not_compared": self._not_compared(),
            "stragglers": [attrs.asdict(of) for of in found],
        }

    def _not_compared(self) -> str:
        if self._sharing is None:
            if any(op.namespace.startswith("tensorflow") for op in self._ops):
                return "TensorFlow's workers have no public channel beside their collectives"
            is_short = self._windows < _FEWEST_WINDOWS
            no_group = "PyTorch has no group of processes"
            return "fewer than two windows have ended" if is_short else no_group
        if not self._sharing.lost and self.comparison and not self.comparison.operators:
            return f"no operator ran on {FEWEST} ranks"
        return self._sharing.lost

    def tables(self) -> Iterable[Table]:
        """The stragglers."""
        found = self.comparison.found if self.comparison else []
        if reason := self._not_compared():
            yield Table(f"stragglers: ranks were not compared: {reason}", (), ())
        if found or not reason:
            ranks = plural(len({of.rank for of in found}), "rank")
            windows = f"{plural(self._windows, 'window')} of {plural(self.options.every, 'step')}"
            lines = [(of.step, str(of)) for of in found]
            yield Table(f"stragglers: {ranks} late, in {windows}", ("step", "late"), lines)


class _Sharing(threading.Thread):
    """Writes the windows of a scope, and compares those of all ranks on the first one.

    Args:
        tool: the tool.
        distributed: the module ``torch.distributed``.

    Attributes:
        windows: those that are to be written; None ends the thread.
        lost: why they are not compared, or "".
        is_closing: True from the end of the scope on.
    """

    def __init__(self, tool: StragglersTool, distributed: Any) -> None:
        super().__init__(name="amanda stragglers", daemon=True)
        self.windows: queue.Queue[_Window | None] = queue.Queue(_WAITING)
        self.lost = ""
        self.is_closing = False
        self._tool, self._distributed = tool, distributed

    def run(self) -> None:
        """Share windows until the scope ends or the store fails."""
        try:
            exchange = Exchange(self._distributed)
            while (window := self.windows.get()) is not None:
                self._share(exchange, *window)
        # Whatever happens here, the program goes on; it may end before the tool.
        except Exception as error:
            self.lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if not self.is_closing:
                tell(f"stragglers: the ranks' times are no longer exchanged: {self.lost}")

    def _share(
        self, exchange: Exchange, window: int, keys: Sequence[Key], seconds: Numbers
    ) -> None:
        exchange.write(window, keys, seconds)
        if exchange.rank:
            is_read = window <= _FEWEST_WINDOWS or exchange.has_reader()
            self.lost = "" if is_read else "the first rank has no such tool (--ranks needs 0)"
            return
        tool, options = self._tool, self._tool.options
        tool.comparison = tool.comparison or Comparison(
            exchange.size, options.late, options.windows
        )
        ranks = exchange.read(window, lambda: not self.windows.empty())
        step = window * options.every
        for straggler in tool.comparison.compare(step, ranks):
            tell(f"stragglers: step {step}: {straggler}")

    def close(self) -> None:
        """End the thread, unless the store does not answer."""
        self.is_closing = True
        # In a forked child it does not run.
        if self.is_alive():
            with contextlib.suppress(queue.Full):
                self.windows.put(None, timeout=_SECONDS)
                self.join(_SECONDS)
