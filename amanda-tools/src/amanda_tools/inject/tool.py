"""The tool ``inject``: changes elements of tensors in a run, or in each run of a campaign.

::

    with amanda.apply(InjectTool(rate=1e-6)):
        model(x)                # elements of activations are drawn (``faults``) and changed
"""

from __future__ import annotations

import collections
import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError, AmandaWarning
from amanda.files import plain_data
from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda_tools._bases.targeting import TargetingTool
from amanda_tools._operators.weights import weight_of
from amanda_tools._values.shapes import size_of
from amanda_tools._values.tensors import arithmetic_of
from amanda_tools.inject.campaign import (
    Campaign,
    Trial,
    append_trial,
    is_same,
    outcome_of,
    read_trials,
    run_once,
    top_differs,
)
from amanda_tools.inject.faults import (
    Fault,
    draw_execution,
    draw_positions,
    inject_faults,
    make_generator,
)
from amanda_tools.inject.options import InjectOptions


class InjectTool(TargetingTool[InjectOptions]):
    """Injects faults and noise into activations, weights and gradients.

    Which elements are hit depends on the seed, the operator's id and the number of its execution
    alone, not on the order of operators, the framework's random numbers or other operators. A
    gradient passes a faulty value unchanged.

    Example: ``amanda run -t inject:fault=bitflip,ops=conv2d+linear,rate=1e-6 -o out -- train.py``

    Attributes:
        faults: injected faults in order, up to the option ``limit``.
    """

    name = "inject"
    Options = InjectOptions
    finds_products = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._executions: collections.Counter[str] = collections.Counter()
        self._injected: collections.Counter[str] = collections.Counter()
        self._sizes: dict[tuple[str, int], int] = {}
        self._only: tuple[str, int] | None = None
        self._is_armed = True
        self._trial = 0
        self.faults: list[Fault] = []

    def treat(self, context: OpContext, op: OpDescription) -> None:
        if self.options.target == "outputs":
            context.insert_after_op(self._inject, op_id=op.id)
        elif self.options.target == "gradients":
            context.insert_before_backward_op(self._inject, op_id=op.id)
        else:
            place = [weight_of(context).index]
            context.insert_before_op(self._inject, inputs=place, op_id=op.id)

    def _inject(self, *tensors: Any, op_id: str) -> Any:
        """Instrumentation routine: put faults into the first tensor that is present."""
        place = next((i for i, tensor in enumerate(tensors) if tensor is not None), None)
        if place is None or not self._can_change(tensors[place], op_id):
            return None
        execution = self._executions[op_id]
        self._executions[op_id] += 1
        self._sizes[op_id, execution] = size_of(tensors[place])
        if not self._is_armed or self._only not in (None, (op_id, execution)):
            return None
        changed = self._changed(tensors[place], op_id, execution)
        return [changed if i == place else None for i in range(len(tensors))]

    def _can_change(self, tensor: Any, op_id: str) -> bool:
        try:
            # No positions: this only asks whether the element type is supported.
            arithmetic_of(tensor).bits(tensor, np.zeros(0, int))
        except TypeError as error:
            self.targets.skip(self.ops[op_id], str(error))
            return False
        return size_of(tensor) > 0

    def _changed(self, tensor: Any, op_id: str, execution: int) -> Any:
        options = self.options
        when = 0 if options.is_permanent else execution
        random = make_generator(options.seed, self._trial, op_id, when)
        positions = draw_positions(options, size_of(tensor), random)
        changed, changes = inject_faults(options, tensor, positions, random)
        self._injected[op_id] += len(changes)
        remaining = max(0, options.limit - len(self.faults))
        self.faults += [Fault(op_id, execution, *change) for change in changes[:remaining]]
        return changed

    def _restart(self, trial: int = 0) -> None:
        """Forget executions and faults; the same trial number gives the same faults again."""
        self._trial = trial
        for found in (self._executions, self._injected, self._sizes):
            found.clear()
        self.faults = []

    # -- campaign ---------------------------------------------------------

    def campaign(
        self,
        run: Callable[[], Any],
        trials: int,
        *,
        is_wrong: Callable[[Any, Any], bool] | None = None,
        path: str | None = None,
        progress: Callable[[int, int], Any] | None = None,
    ) -> Campaign:
        """Run a program many times, each time with faults in one execution; return all trials.

        An execution is drawn with a probability proportional to its number of elements:
        ``count=1`` makes every element equally likely. A trial depends on seed and number alone.

        Args:
            run: runs the program, deterministically, and returns its output: arrays, tensors, or
                lists, tuples and mappings of them.
            trials: number of trials in the end, those in the file included.
            is_wrong: True for a wrong answer, from the output without faults and the one with them;
                by default one whose argmax along the last axis differs.
            path: a file that gets one line of JSON per trial; trials in it are not run again.
            progress: called with the number of trials done and the number of all.

        Raises:
            ValueError: `trials` is not positive.
            AmandaError: a file of another campaign, no operator met, or `run` not deterministic.
        """
        if trials < 1:
            raise ValueError(f"inject: trials={trials} is not positive")
        expected, places = self._run_without_faults(run)
        done = read_trials(path, self._header(places))[:trials]
        with amanda.apply(self), contextlib.ExitStack() as undo:
            undo.callback(self._aim, None)
            for number in range(len(done), trials):
                trial = self._run_trial(run, number, places, expected, is_wrong or top_differs)
                path = _kept(path, trial)
                done.append(trial)
                if progress is not None:
                    progress(number + 1, trials)
        return Campaign(done)

    def _header(self, places: Mapping[tuple[str, int], int]) -> dict[str, Any]:
        """Return the header of the file, which is refused if any of this differs."""
        return {
            "campaign": "amanda-inject",
            "options": json.loads(json.dumps(plain_data(attrs.asdict(self.options)))),
            "elements": sum(places.values()),
        }

    def _run_without_faults(self, run: Callable[[], Any]) -> tuple[Any, dict[tuple[str, int], int]]:
        """Return the output without faults, and the number of elements of each execution."""
        self._aim(None, armed=False)
        self._restart()
        try:
            with amanda.apply(self):
                expected = run_once(run)
                places = dict(self._sizes)
                again = run_once(run)
        finally:
            self._aim(None)
        if not places:
            types = ", ".join(self.options.ops)
            raise AmandaError(f"inject: run() has met no operator of the types {types}")
        if not is_same(expected, again):
            raise AmandaError(
                "inject: run() gives another output when it runs again without any fault; "
                "seed it, and put layers such as dropout into inference mode"
            )
        return expected, places

    def _run_trial(
        self,
        run: Callable[[], Any],
        number: int,
        places: Mapping[tuple[str, int], int],
        expected: Any,
        is_wrong: Callable[[Any, Any], bool],
    ) -> Trial:
        """Run the program with the faults of one trial."""
        target = draw_execution(places, make_generator(self.options.seed, number, "place"))
        self._restart(number)
        self._aim(target)
        try:
            found = run_once(run)
        except Exception as error:
            # An exception that a fault causes is an outcome; without a fault it is the program's
            # own.
            outcome = "error"
            if not self.faults:
                raise error
        else:
            outcome = outcome_of(expected, found, is_wrong)
        if target not in self._sizes:
            raise AmandaError(
                f"inject: trial {number} has not met execution {target[1]} of op {target[0]}, "
                "which the run without faults had: run() must be deterministic"
            )
        return Trial(number, *target, outcome, [_plain(fault) for fault in self.faults])

    def _aim(self, target: tuple[str, int] | None, *, armed: bool = True) -> None:
        """Restrict faults to one execution of one operator; None for all; not `armed`: inject
        nowhere."""
        self._only, self._is_armed = target, armed

    # -- result -----------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the common form, and the ``faults``."""
        return {**super().result(), "faults": [attrs.asdict(fault) for fault in self.faults]}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator, with its ``executions`` and ``faults``."""
        return [
            {**op.row(), "executions": self._executions[op.id], "faults": self._injected[op.id]}
            for op in self.ops.values()
        ]

    def summary(self) -> dict[str, Any]:
        """Number of faults; operators left alone, with reasons."""
        return {
            **super().summary(),
            "faults": sum(self._injected.values()),
            "faults_listed": len(self.faults),
        }

    def tables(self) -> Iterable[Table]:
        """Faults by operator; operators left alone."""
        options = self.options
        rows = [(row["id"], row["executions"], row["faults"]) for row in self.op_rows()]
        title = f"inject: {sum(self._injected.values())} x {options.fault} in {options.target}"
        yield Table(title, ("op", "executions", "faults"), rows)
        yield from self.targets.tables("inject")


def _kept(path: str | None, trial: Trial) -> str | None:
    """Append a trial to the file, if there is one; return the file for the next one."""
    if path is None:
        return None
    try:
        append_trial(path, trial)
    except OSError as error:
        # The trials that follow must not stand behind a gap.
        warnings.warn(
            f"inject: {path} cannot be written: {error.strerror}; the campaign continues, and the "
            f"file ends with trial {trial.number - 1}",
            AmandaWarning,
            stacklevel=3,
        )
        return None
    return path


def _plain(fault: Fault) -> dict[str, Any]:
    """Convert a fault to a row of the campaign file; JSON has no infinities."""
    row = attrs.asdict(fault, filter=lambda field, _: field.name not in ("op", "execution"))
    return {key: plain_data(value) for key, value in row.items()}
