"""``stragglers``: names the rank that is late, and in what, while a distributed program runs."""

from __future__ import annotations

import array
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from amanda import OpContext
from amanda.inline import Log
from amanda.interface.points import PointContext
from amanda.results import Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import ReportingTool
from amanda_tools._bases.ranks import current_rank, torch_group
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._timelines.memory import synchronize
from amanda_tools._timelines.timeline import timing_routines
from amanda_tools.stragglers import metrics
from amanda_tools.stragglers.comparison import FEWEST, Comparison, Names, median_of
from amanda_tools.stragglers.exchange import Exchange

__all__ = ["StragglersOptions", "StragglersTool"]

_MOST_NUMBERS = 4 << 20
"""Numbers of executions, four each, that are kept where no step ends."""

_PAUSE = 16_000_000
"""Nanoseconds between two looks at them."""

_WAITING = 4
"""Windows that may wait for the thread; further ones are dropped."""

_Window = tuple[int, "array.array[int]", Sequence[int], int]
"""Its number, the executions in it, how many of them had ended at the end of each step, and the
number of operators known."""


@attrs.frozen(kw_only=True)
class StragglersOptions:
    """The options of ``stragglers``.

    Attributes:
        every: steps in a window, whose medians ranks exchange.
        late: deviations (MAD) from which on a rank is late.
        windows: windows over which its lateness is averaged.
        sync: wait for CUDA devices before reading the clock, so that times are of their work and
            not of its launch; slower.
        otel: operators whose time is exported as OpenTelemetry metrics, those with the most.
    """

    every: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    late: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    windows: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    sync: bool = False
    otel: int = attrs.field(default=0, validator=attrs.validators.ge(0))


class StragglersTool(ReportingTool[StragglersOptions]):
    """Names the rank that is late, and in which operator or module.

    Example: ``torchrun --nproc-per-node 8 -m amanda run -t stragglers -o out -- train.py``

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
        self._log = _Log()
        self._ops: dict[str, OpDescription] = {}
        self._numbers: dict[str, int] = {}
        self._marks: list[int] = []
        self._window = self._dropped = 0
        self._queue: queue.Queue[_Window | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        # What follows is written in the thread.
        self._exchange: Exchange | None = None
        self._lost = ""
        self._compared = 0
        self._names = Names([])
        self._seconds = self._sums = np.zeros(0)
        self._calls = np.zeros(0, np.int64)
        self.depends_on(MappingTool.standard())
        for is_backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=is_backward)
        self.add_inst_for_iteration(self._begin)
        self.add_inst_for_iteration(self._end, end=True)

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
        op = describe(context)
        if not context.runs_at_once or "waits" in row_of(op.type).traits:
            return
        self._ops.setdefault(op.id, op)
        number = self._numbers.setdefault(op.id, len(self._numbers))
        wait = synchronize if self.options.sync else None
        start, stop = timing_routines(self._log, number, wait)
        insert_before(context, start)
        insert_after(context, stop)

    def _begin(self, point: PointContext) -> None:
        if not point.follows:
            # Evaluations between steps.
            del self._log.numbers[4 * self._marks[-1] if self._marks else 0 :]

    def _end(self, _: PointContext) -> None:
        numbers = self._log.numbers
        if self._marks and len(numbers) < 4 * self._marks[-1]:
            self._marks.clear()  # the log has become too long
        self._marks.append(len(numbers) // 4)
        if len(self._marks) < self.options.every:
            return
        self._window += 1
        window = self._window, numbers[:], self._marks, len(self._numbers)
        del numbers[:]
        self._marks = []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="amanda stragglers", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(window)
        except queue.Full:
            self._dropped += 1

    # -- in the thread ----------------------------------------------------

    def _run(self) -> None:
        last = 0
        while (window := self._queue.get()) is not None:
            last = window[0]
            self._guarded(self._work, *window)
        self._guarded(self._compare, last)

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Do something; give the exchange up if it fails, as where the store does not answer."""
        try:
            act(*args)
        # Whatever happens here, the program goes on; it may end before the tool.
        except Exception as error:
            if not (self._is_closing or self._lost):
                self._lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                _tell(f"the ranks' times are no longer exchanged: {self._lost}")

    def _work(self, window: int, *records: Any) -> None:
        self._sum_up(*records)
        if self.options.otel and window == 1:
            self._export()
        if not self._lost:
            self._share(window)

    def _sum_up(self, numbers: array.array[int], marks: Sequence[int], ops: int) -> None:
        """Compute the median over steps of each operator's time in a step."""
        records = np.frombuffer(numbers, np.int64).reshape(-1, 4)[: marks[-1]]
        steps = np.searchsorted(marks, np.arange(len(records)), side="right")
        places = steps, records[:, 0]
        sums, calls = np.zeros((len(marks), ops)), np.zeros((len(marks), ops), np.int64)
        np.add.at(sums, places, (records[:, 2] - records[:, 1]) / 1e9)
        np.add.at(calls, places, 1)
        self._seconds = median_of(np.where(calls, sums, np.nan))
        if more := ops - len(self._names.keys):
            found = [self._ops[op_id] for op_id in list(self._numbers)[:ops]]
            self._names = Names([(op.id, op.module, op.direction) for op in found])
            self._sums, self._calls = np.pad(self._sums, (0, more)), np.pad(self._calls, (0, more))
        self._sums, self._calls = self._sums + sums.sum(axis=0), self._calls + calls.sum(axis=0)

    def _share(self, window: int) -> None:
        if (distributed := torch_group()) is None:
            return
        if self._exchange is None:
            self._exchange = Exchange(distributed)
            if self._exchange.rank == 0:
                size, options = self._exchange.size, self.options
                self.comparison = Comparison(size, options.late, options.windows)
        exchange = self._exchange
        exchange.write(window, self._names, self._seconds)
        # The other ranks have written the window before.
        self._compare(window - 1)
        is_told = window != _WAITING or exchange.rank == 0 or exchange.has_reader
        if not is_told and exchange.is_first():
            _tell("the first rank has no such tool and compares nothing: --ranks needs 0")

    def _compare(self, window: int) -> None:
        exchange, comparison = self._exchange, self.comparison
        is_new = window > self._compared and not self._lost
        if exchange is not None and comparison is not None and is_new:
            self._compared = window
            for straggler in comparison.compare(window, exchange.read(window)):
                _tell(f"step {window * self.options.every}: {straggler}")

    def _export(self) -> None:
        most = np.argsort(-np.nan_to_num(self._seconds))[: self.options.otel]
        places = {self._names.keys[i][0]: i for i in most.tolist()}
        ops = [self._ops[op_id] for op_id in places]

        def read(op_id: str) -> tuple[float, int]:
            return float(self._sums[places[op_id]]), int(self._calls[places[op_id]])

        if not metrics.export(ops, current_rank()[0], read):
            _tell("otel: the program has set no provider of metrics until now")

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that was timed, with its ``seconds`` in a step: the median of the
        last window, null if it did not run. On the first of several ranks also the ``median``, the
        ``mad``, the ``slowest`` and the ``slowest_rank`` of the ranks.
        """
        compared = self.comparison.operators if self.comparison else {}
        seconds = [None if np.isnan(each) else float(each) for each in self._seconds]
        return [
            {**self._ops[key[0]].row(), "seconds": each, **compared.get(key[0], {})}
            for key, each in zip(self._names.keys, seconds, strict=False)
        ]

    def summary(self) -> dict[str, Any]:
        """The ``windows``, those ``dropped``, ``not_compared``, the reason for which ranks were
        not compared or "", and the ``stragglers``."""
        found = self.comparison.found if self.comparison else []
        return {
            "windows": self._window,
            "dropped": self._dropped,
            "not_compared": self._not_compared(),
            "stragglers": [of.row(self.options.every) for of in found],
        }

    def _not_compared(self) -> str:
        if self._lost or self._exchange is not None:
            is_few = self._exchange is not None and self._exchange.size < FEWEST
            return self._lost or (f"there are fewer than {FEWEST}" if is_few else "")
        if any(op.namespace.startswith("tensorflow") for op in self._ops.values()):
            return "TensorFlow's workers have no public channel beside their collectives"
        return "PyTorch has no group of processes" if self._window else "no window has ended"

    def tables(self) -> Iterable[Table]:
        """The stragglers."""
        found = self.comparison.found if self.comparison else []
        windows = f"{plural(self._window, 'window')} of {plural(self.options.every, 'step')}"
        if reason := self._not_compared():
            yield Table(f"stragglers: ranks were not compared: {reason}", (), ())
        lines = [(str(of), of.window * self.options.every) for of in found]
        if found or not reason:
            ranks = plural(len({of.rank for of in found}), "rank")
            yield Table(f"stragglers: {ranks} late, in {windows}", ("late", "last step"), lines)


class _Log(Log):
    """Executions since the last window; they are dropped where no step ends."""

    def __init__(self) -> None:
        super().__init__(due=0)

    def look(self, now: int) -> None:
        self.due = now + _PAUSE
        if len(self.numbers) > _MOST_NUMBERS:
            del self.numbers[:]


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"amanda: stragglers: {text}", file=sys.stderr, flush=True)
