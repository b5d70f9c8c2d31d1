"""Results of a fault-injection campaign, and the file from which it can be resumed.

The campaign itself is run by :meth:`amanda_tools.inject.InjectTool.campaign`::

    campaign = InjectTool(seed=1).campaign(lambda: model(batch), trials=1000, path="trials.jsonl")
    print(campaign.sdc_rate, campaign.sdc_interval)
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import amanda
from amanda.errors import FileError
from amanda.files import parse_json, plain_data, read_text, replaced
from amanda_tools._operators.running import run_model
from amanda_tools._values.tensors import Array, arithmetic_of

OUTCOMES = ("masked", "tolerable", "wrong", "not_finite", "error")
"""Possible outcomes of a trial.

``masked``: output equal bit by bit. ``tolerable``: another output, but no wrong answer. ``wrong``:
a wrong answer (silent data corruption). ``not_finite``: NaN or infinities where the run without
faults had none. ``error``: an exception.
"""


@attrs.frozen
class Trial:
    """One run with faults.

    Attributes:
        number: counted from 0.
        op, execution: id of the operator and number of its execution that got the faults.
        outcome: one of :data:`OUTCOMES`.
        faults: of each fault the ``position``, ``bit``, ``before`` and ``after``.
    """

    number: int
    op: str
    execution: int
    outcome: str
    faults: list[dict[str, Any]]


@attrs.frozen
class Campaign:
    """The trials of a campaign, and rates computed from them."""

    trials: list[Trial]

    def count(self, outcome: str) -> int:
        """Number of trials with this outcome."""
        return sum(trial.outcome == outcome for trial in self.trials)

    @property
    def sdc_rate(self) -> float:
        """Fraction of trials with silent data corruption: a wrong answer, finite and without an
        exception."""
        return self.count("wrong") / len(self.trials)

    @property
    def sdc_interval(self) -> tuple[float, float]:
        """95 % confidence interval of :attr:`sdc_rate` (Wilson score interval, 1927)."""
        n, p, z = len(self.trials), self.sdc_rate, 1.959964
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def to_dict(self) -> dict[str, Any]:
        """Return rates and the outcomes by operator and by bit, as plain data."""
        return {
            "trials": len(self.trials),
            "sdc_rate": self.sdc_rate,
            "sdc_interval": list(self.sdc_interval),
            "outcomes": {outcome: self.count(outcome) for outcome in OUTCOMES},
            "by_op": self._grouped(lambda trial: [trial.op]),
            "by_bit": self._grouped(lambda t: {str(f["bit"]) for f in t.faults}),
        }

    def _grouped(self, keys: Callable[[Trial], Iterable[str]]) -> dict[str, dict[str, int]]:
        groups: dict[str, dict[str, int]] = {}
        for trial in self.trials:
            for key in keys(trial):
                counts = groups.setdefault(key, collections.Counter())
                counts[trial.outcome] += 1
        return {key: dict(counts) for key, counts in groups.items()}


# -- outputs -------------------------------------------------------------------


def run_once(run: Callable[[], Any]) -> Any:
    """Run the program; return its output with NumPy arrays in place of tensors."""
    # Ids of operators outside of modules are counted from here.
    amanda.new_iteration()
    return _copied(run_model(run))


def _copied(output: Any) -> Any:
    """Convert an output: tensors to NumPy arrays, mappings and sequences element by element."""
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


def outcome_of(expected: Any, found: Any, is_wrong: Callable[[Any, Any], bool]) -> str:
    """Return the entry of :data:`OUTCOMES` for an output, compared with that of the run without
    faults."""
    if is_same(expected, found):
        return "masked"
    if _is_finite(expected) and not _is_finite(found):
        return "not_finite"
    return "wrong" if is_wrong(expected, found) else "tolerable"


def is_same(a: Any, b: Any) -> bool:
    """True if two outputs are equal bit by bit."""
    pairs = zip(_arrays(a), _arrays(b), strict=True)
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def _is_finite(output: Any) -> bool:
    return all(np.isfinite(array).all() for array in _arrays(output) if array.dtype.kind == "f")


def top_differs(expected: Any, found: Any) -> bool:
    """True if the argmax along the last axis differs, in the first array of the outputs.

    The default of ``is_wrong`` in a campaign: the predicted class of any input has changed.
    """
    a, b = next(_arrays(expected)), next(_arrays(found))
    return not np.array_equal(a.argmax(-1), b.argmax(-1)) if a.ndim else bool(a != b)


# -- file ------------------------------------------------------------------------


def read_trials(path: str | None, header: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of a campaign file; write a new file with `header` if there is none.

    Raises:
        FileError: the file is damaged or cannot be read or written, or its header differs: it
            belongs to another campaign.
    """
    if path is None:
        return []
    file = Path(path)
    try:
        if not file.exists():
            _write_lines(file, [json.dumps(header)])
            return []
        text = read_text(file)
        # Not splitlines(): names may hold the other characters that it takes for ends of lines.
        *lines, rest = text.split("\n")
        if not lines or parse_json(lines[0], file) != header:
            raise FileError(
                f"{path} is of a campaign with other options or another program; give another path"
            )
        trials = [_trial(line, number, file) for number, line in enumerate(lines[1:])]
        if rest:
            # The run was interrupted while it wrote its last line.
            _write_lines(file, lines)
        return trials
    except OSError as error:
        raise FileError(f"inject: {error}") from error


def _write_lines(file: Path, lines: Sequence[str]) -> None:
    with replaced(file) as new:
        new.writelines(f"{line}\n" for line in lines)


def _trial(line: str, number: int, file: Path) -> Trial:
    """Read a line of a campaign file.

    Raises:
        FileError: it is not a trial, or has another number.
    """
    found = parse_json(line, f"{file}, line {number + 2},")
    is_whole = (
        isinstance(found, dict)
        and found.keys() == {field.name for field in attrs.fields(Trial)}
        and isinstance(found["op"], str)
        and type(found["execution"]) is int
        and found["outcome"] in OUTCOMES
        and isinstance(found["faults"], list)
        and all(isinstance(fault, dict) and "bit" in fault for fault in found["faults"])
    )
    if not is_whole or found["number"] != number or type(found["number"]) is not int:
        raise FileError(
            f"{file}, line {number + 2}, is not the trial {number} of a campaign: the file is "
            "damaged; remove this line and those after it, and these trials run again"
        )
    return Trial(**found)


def append_trial(path: str, trial: Trial) -> None:
    """Append a trial to a campaign file.

    Raises:
        OSError: it cannot be written.
    """
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain_data(attrs.asdict(trial))) + "\n")
