"""``stragglers``: names the rank that is late, and in what, while a distributed program runs."""

from __future__ import annotations

import contextlib
import queue
import sys
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
from amanda_tools._bases.ranks import current_rank, torch_group
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools.stragglers import metrics
from amanda_tools.stragglers.comparison import FEWEST, Comparison, Key, Numbers
from amanda_tools.stragglers.exchange import Exchange
from amanda_tools.stragglers.work import Stopwatch, Work

__all__ = ["StragglersOptions", "StragglersTool"]

_WAITING = 4
"""Windows that may wait for the thread; further ones are dropped."""

_Window = tuple[int, Sequence[Key], Numbers]
"""Its number, from 0, the operators known, and the seconds of each in a step."""


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
    late: float = attrs.field(default=5.0, validator=attrs.validators.gt(0))
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
        self._ended = self._window = self._dropped = 0
        self._queue: queue.Queue[_Window | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        # The thread writes these.
        self._exchange: Exchange | None = None
        self._lost = ""
        self.depends_on(MappingTool.standard())
        for is_backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=is_backward)
        self.add_inst_for_iteration(self._begin_window)
        self.add_inst_for_iteration(self._end_window, end=True)

    def exit_scope(self) -> None:
        """Compare what is there, and end the thread; the store has seconds to answer."""
        # In a forked child it does not run.
        if self._thread is not None and self._thread.is_alive():
            self._is_closing = True
            self._queue.put(None)
            self._thread.join()
        self._thread, self._is_closing = None, False

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

    def _end_window(self, _: PointContext) -> None:
        self._stopwatch.end_step()
        self._ended += 1
        if self._ended % self.options.every:
            return
        self._sum_up(self._stopwatch.take())
        window, self._window = self._window, self._window + 1
        if window == 0 and self.options.otel:
            self._export()
        # Frameworks allocate and compile in the first one.
        if window == 0 or torch_group() is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="amanda stragglers", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((window, self._keys, self._seconds))
        except queue.Full:
            self._dropped += 1

    def _sum_up(self, window: Mapping[int, Work]) -> None:
        """Compute the time of each operator in a step of this window, by its usual execution."""
        self._keys = [(op.id, op.module, op.direction) for op in self._ops]
        self._seconds = np.full(len(self._keys), np.nan)
        for number, work in window.items():
            self._sums.setdefault(number, Work()).add(Work(work.calls, work.nanoseconds))
            if number not in self._stopwatch.waiting:
                calls = work.calls / self.options.every
                self._seconds[number] = work.usual / 1e9 * calls

    def _export(self) -> None:
        most = sorted(self._sums, key=lambda number: -self._sums[number].nanoseconds)

        def read(number: int) -> tuple[float, int]:
            work = self._sums[number]
            return work.nanoseconds / 1e9, work.calls

        ops = {number: self._ops[number] for number in most[: self.options.otel]}
        if not metrics.export(ops, current_rank()[0], read):
            _tell("otel: the program has set no provider of metrics until now")

    # -- in the thread ----------------------------------------------------

    def _run(self) -> None:
        while (window := self._queue.get()) is not None:
            try:
                if not self._lost:
                    self._share(*window)
            # Whatever happens here, the program goes on; it may end before the tool.
            except Exception as error:
                if not self._is_closing:
                    self._lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    _tell(f"the ranks' times are no longer exchanged: {self._lost}")
        with contextlib.suppress(RuntimeError):
            if self._exchange is not None and not self._exchange.has_reader():
                self._lost = "the first rank has no such tool (--ranks needs 0)"

    def _share(self, window: int, keys: Sequence[Key], seconds: Numbers) -> None:
        if self._exchange is None:
            self._exchange = Exchange(torch_group())
            if self._exchange.rank == 0:
                size, options = self._exchange.size, self.options
                self.comparison = Comparison(size, options.late, options.windows)
        self._exchange.write(window, keys, seconds)
        if self.comparison is not None:
            step = (window + 1) * self.options.every
            for straggler in self.comparison.compare(step, self._exchange.read(window)):
                _tell(f"step {step}: {straggler}")

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
            "windows": self._window,
            "dropped": self._dropped,
            "not_compared": self._not_compared(),
            "stragglers": [attrs.asdict(of) for of in found],
        }

    def _not_compared(self) -> str:
        if self._lost:
            return self._lost
        if self._exchange is not None:
            is_few = self._exchange.size < FEWEST
            return f"there are fewer than {FEWEST}" if is_few else ""
        if any(op.namespace.startswith("tensorflow") for op in self._ops):
            return "TensorFlow's workers have no public channel beside their collectives"
        if self._window < 2:
            return "fewer than two windows have ended"
        return "PyTorch has no group of processes"

    def tables(self) -> Iterable[Table]:
        """The stragglers."""
        found = self.comparison.found if self.comparison else []
        if reason := self._not_compared():
            yield Table(f"stragglers: ranks were not compared: {reason}", (), ())
        if found or not reason:
            ranks = plural(len({of.rank for of in found}), "rank")
            windows = f"{plural(self._window, 'window')} of {plural(self.options.every, 'step')}"
            lines = [(of.step, str(of)) for of in found]
            yield Table(f"stragglers: {ranks} late, in {windows}", ("step", "late"), lines)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"amanda: stragglers: {text}", file=sys.stderr, flush=True)
