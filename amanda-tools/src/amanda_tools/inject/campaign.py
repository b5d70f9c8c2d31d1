"""Campaigns of fault injection: many runs with one fault each, and what came of them."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import amanda
from amanda.errors import AmandaError
from amanda.results import Table
from amanda_tools._values.arithmetic import arithmetic_of
from amanda_tools.inject.faults import Fault, generator

if TYPE_CHECKING:
    from amanda_tools.inject.tool import InjectTool

Array = np.ndarray[Any, Any]

OUTCOMES = ("masked", "tolerable", "wrong", "not_finite", "error")
"""What a trial can end in: the same output bit by bit; another one, but no wrong answer; a
wrong answer (silent data corruption); infinities or NaN where there were none; an exception."""


@attrs.frozen
class Trial:
    """One run with faults.

    Attributes:
        number: from 0.
        op, execution: where the faults were.
        outcome: one of :data:`OUTCOMES`.
        faults: position, bit, value before and after of each.
    """

    number: int
    op: str
    execution: int
    outcome: str
    faults: list[dict[str, Any]]


@attrs.frozen
class Campaign:
    """What came of the trials."""

    trials: list[Trial]

    def count(self, outcome: str) -> int:
        """How many trials ended so."""
        return sum(trial.outcome == outcome for trial in self.trials)

    @property
    def sdc_rate(self) -> float:
        """The share of trials with a wrong answer that nothing gave away."""
        return self.count("wrong") / len(self.trials)

    @property
    def sdc_interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the rate (Wilson, 1927)."""
        n, p, z = len(self.trials), self.sdc_rate, 1.959964
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: rates, and counts by operator and by bit."""
        return {
            "trials": len(self.trials),
            "sdc_rate": self.sdc_rate,
            "sdc_interval": list(self.sdc_interval),
            "outcomes": {outcome: self.count(outcome) for outcome in OUTCOMES},
            "by_op": self._grouped(lambda trial: [trial.op]),
            "by_bit": self._grouped(lambda t: {str(f["bit"]) for f in t.faults}),
        }

    def tables(self) -> Iterable[Table]:
        """The rate, and outcomes by operator."""
        low, high = self.sdc_interval
        title = f"inject: {self.sdc_rate:.2%} of {len(self.trials)} trials wrong without notice"
        rows = [(outcome, self.count(outcome)) for outcome in OUTCOMES]
        yield Table(f"{title} (95%: {low:.2%} to {high:.2%})", ("outcome", "trials"), rows)
        by_op = self._grouped(lambda trial: [trial.op])
        order = sorted(by_op, key=lambda op: -by_op[op].get("wrong", 0))
        rows_by_op = [(op, *(by_op[op].get(o, 0) for o in OUTCOMES)) for op in order]
        yield Table("inject: trials by op", ("op", *OUTCOMES), rows_by_op)

    def _grouped(self, keys: Callable[[Trial], Iterable[str]]) -> dict[str, dict[str, int]]:
        groups: dict[str, dict[str, int]] = {}
        for trial in self.trials:
            for key in keys(trial):
                counts = groups.setdefault(key, collections.Counter())
                counts[trial.outcome] += 1
        return {key: dict(counts) for key, counts in groups.items()}


def run_campaign(
    tool: InjectTool,
    run: Callable[[], Any],
    trials: int,
    is_wrong: Callable[[Any, Any], bool] | None,
    path: str | None,
    progress: Callable[[int, int], Any] | None,
) -> Campaign:
    """See :meth:`InjectTool.campaign`."""
    expected, places = _golden(tool, run)
    header = {
        "campaign": "amanda-inject",
        "options": json.loads(json.dumps(attrs.asdict(tool.options))),
        "elements": sum(places.values()),
    }
    done = _read(path, header)[:trials]
    is_wrong = is_wrong or top_differs
    try:
        with amanda.apply(tool):
            for number in range(len(done), trials):
                trial = _trial(tool, run, number, places, expected, is_wrong)
                done.append(trial)
                _append(path, trial)
                if progress is not None:
                    progress(number + 1, trials)
    finally:
        tool.aim(None)
    return Campaign(done)


def _golden(tool: InjectTool, run: Callable[[], Any]) -> tuple[Any, dict[tuple[str, int], int]]:
    """The output without faults, and where faults can be."""
    tool.aim(None, armed=False)
    tool.restart()
    try:
        with amanda.apply(tool):
            expected = _output(run)
            places = tool.observe()
            again = _output(run)
    finally:
        tool.aim(None)
    if not places:
        raise AmandaError(
            f"inject: run() has met no operator of the types {', '.join(tool.options.ops)}"
        )
    if not _same(expected, again):
        raise AmandaError(
            "inject: run() gives another output when it runs again without any fault; "
            "seed it, and put layers such as dropout into inference mode"
        )
    return expected, places


def _trial(
    tool: InjectTool,
    run: Callable[[], Any],
    number: int,
    places: Mapping[tuple[str, int], int],
    expected: Any,
    is_wrong: Callable[[Any, Any], bool],
) -> Trial:
    target = _drawn(places, generator(tool.options.seed, number, "place"))
    tool.restart(number)
    tool.aim(target)
    try:
        found = _output(run)
    except Exception as error:
        # Whatever a fault makes the program raise is an outcome, not a failure of the campaign.
        outcome = "error"
        if not tool.faults:
            raise error
    else:
        outcome = _outcome(expected, found, is_wrong)
    if target not in tool.observe():
        raise AmandaError(
            f"inject: trial {number} has not met execution {target[1]} of op {target[0]}, which "
            "the run without faults had: run() must be deterministic"
        )
    return Trial(number, *target, outcome, [_plain(fault) for fault in tool.faults])


def _plain(fault: Fault) -> dict[str, Any]:
    """A fault as the file has it, which has no infinities."""
    row = attrs.asdict(fault, filter=lambda field, _: field.name not in ("op", "execution"))
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }


def _drawn(places: Mapping[tuple[str, int], int], random: np.random.Generator) -> tuple[str, int]:
    """An execution of an operator, the more likely the more elements it has."""
    ends = np.cumsum(list(places.values()))
    chosen = np.searchsorted(ends, random.integers(0, ends[-1]), side="right")
    return list(places)[int(chosen)]


# -- outputs -------------------------------------------------------------------


def _output(run: Callable[[], Any]) -> Any:
    # Code outside of modules has no iterations of its own.
    amanda.new_iteration()
    return _copied(run())


def _copied(output: Any) -> Any:
    """An output with numpy arrays for its tensors."""
    if isinstance(output, Mapping):
        return {str(key): _copied(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [_copied(value) for value in output]
    if output is None or isinstance(output, (bool, int, float, str)):
        return np.array(output)
    if isinstance(output, (np.ndarray, np.generic)):
        return np.array(output)
    return arithmetic_of(output).numpy(output)


def _arrays(output: Any) -> Iterator[Array]:
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list):
        for value in output:
            yield from _arrays(value)
    else:
        yield output


def _outcome(expected: Any, found: Any, is_wrong: Callable[[Any, Any], bool]) -> str:
    if _same(expected, found):
        return "masked"
    if _is_finite(expected) and not _is_finite(found):
        return "not_finite"
    return "wrong" if is_wrong(expected, found) else "tolerable"


def _same(a: Any, b: Any) -> bool:
    pairs = zip(_arrays(a), _arrays(b), strict=True)
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def _is_finite(output: Any) -> bool:
    return all(np.isfinite(array).all() for array in _arrays(output) if array.dtype.kind == "f")


def top_differs(expected: Any, found: Any) -> bool:
    """Whether the largest along the last axis is another one, in the first output that has one."""
    a, b = next(_arrays(expected)), next(_arrays(found))
    return not np.array_equal(a.argmax(-1), b.argmax(-1)) if a.ndim else bool(a != b)


# -- file ------------------------------------------------------------------------


def _read(path: str | None, header: Mapping[str, Any]) -> list[Trial]:
    """The trials of a file, which is made if it is not there."""
    if path is None:
        return []
    file = Path(path)
    if not file.exists():
        file.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return []
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    if not lines or json.loads(lines[0]) != header:
        raise AmandaError(
            f"inject: {path} is of a campaign with other options or another program; "
            "give another path"
        )
    if not text.endswith("\n"):
        # The last trial was interrupted while it was written.
        lines.pop()
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [Trial(**json.loads(line)) for line in lines[1:]]


def _append(path: str | None, trial: Trial) -> None:
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(attrs.asdict(trial)) + "\n")
