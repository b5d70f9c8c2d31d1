"""The last line of ``amanda run``: the operators that the run has seen, and the cost.

``last_line(scope.statistics, seconds)`` is ``amanda: 35 ops in 3 steps, all seen ...``.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping, Sequence

from amanda.python._internals import child_processes
from amanda.registry import drivers, plugins
from amanda.results import plural
from amanda.scope.inheritance import FORKS
from amanda.scope.scope import Statistics


def last_line(statistics: Statistics, seconds: float, stopped: str = "") -> str:
    """The last line of a run: operators seen, compiled code, reasons for unseen ones, the cost.

    Args:
        stopped: the reason for which a tool has ended the program; "" if none has.
    """
    compiled, unseen = explain_ways(statistics.compiled), explain_unseen(statistics)
    ops = plural(statistics.ops_seen + statistics.backward_ops_seen, "op")
    return (
        f"amanda: {f'stopped: {stopped}; ' if stopped else ''}{ops}{_steps(statistics)}"
        f"{_ALL_SEEN if unseen == _NOTHING else f'; not seen: {unseen}'}; "
        f"{f'compiled code ran {compiled}; ' if compiled else ''}"
        f"{describe_time(statistics, seconds)}"
    )


_ADVICE = "each of which needs an amanda run of its own"
_NOTHING = "nothing, as far as is known"
_ALL_SEEN = ", all seen as far as is known"


def _steps(statistics: Statistics) -> str:
    bound = "at least " if statistics.overlaps else ""
    return f" in {bound}{plural(statistics.steps, 'step')}" if statistics.steps else ""


def describe_ops(statistics: Statistics) -> str:
    """The numbers of operators that were seen and instrumented, and of steps.

    Drivers see backward operators only where a tool has routines there.
    """
    forward, backward = statistics.ops_seen, statistics.backward_ops_seen
    ways = f"{forward} forward, {backward} backward" if backward else f"{forward} forward"
    return (
        f"{plural(forward + backward, 'op')} seen ({ways}){_steps(statistics)}, "
        f"{statistics.ops_instrumented} instrumented"
    )


def explain_ways(parts: Mapping[str, str]) -> str:
    """Count how the named parts of a program ran, as text; "" without any."""
    ways = collections.Counter(parts.values())
    return ", ".join(f"{way}: {count}" for way, count in ways.most_common())


def explain_unseen(statistics: Statistics) -> str:
    """The reasons for which operators were not seen, with their numbers where they are known."""
    missing = {**statistics.not_seen, **uncovered_frameworks()}
    missing |= dict.fromkeys(plugins.explain_unseen(drivers.covered_frameworks()), 0)
    if count := child_processes() + len(FORKS):
        # The processes are not distinguished: if this process computes, they may only load its
        # data.
        about = "such as workers that load data" if statistics.ops_seen else _ADVICE
        missing[f"what child processes run, {about}"] = count
    if not missing and not any(e.cls.framework in sys.modules for e in drivers.drivers()):
        missing = {"no framework was imported": 0}
    reasons = (f"{reason} ({count})" if count else reason for reason, count in missing.items())
    return ", ".join(reasons) or _NOTHING


def describe_missing_driver(asked: Sequence[str]) -> str:
    """Why no driver was attached, and what to do.

    Args:
        asked: the drivers that the command line names.
    """
    if asked := asked or plugins.read_list("AMANDA_DRIVERS"):
        wanted = {name.rpartition("/")[2] for name in asked}
        named = [cls for cls, _ in drivers.registered_drivers() if cls.name in wanted]
        frameworks = " or ".join(dict.fromkeys(cls.framework for cls in named))
        return f"the program has not imported {frameworks} (asked for: {', '.join(asked)})"
    unseen = plugins.explain_unseen(drivers.covered_frameworks())
    if found := [*unseen, *uncovered_frameworks()]:
        return f"not seen: {', '.join(found)}"
    names = ", ".join(dict.fromkeys(e.cls.framework for e in drivers.drivers()))
    if not names:
        return f"no driver is installed; {plugins.suggest_driver()}"
    return (
        f"the program has not imported a framework that has a driver ({names}) in this process; "
        "a process that it starts needs an amanda run of its own"
    )


def describe_time(statistics: Statistics, seconds: float) -> str:
    """The time spent in the tools' routines and analyses, and its share of the run."""
    share = 100 * statistics.tool_seconds / seconds if seconds > 0 else 0.0
    return f"tools took {statistics.tool_seconds:.2f} s of {seconds:.2f} s ({share:.0f}%)"


def uncovered_frameworks() -> dict[str, int]:
    """A reason for the last line for each imported framework that no driver instruments."""
    usable = drivers.covered_frameworks()
    return {
        f"all of {framework}, which has no usable driver (see: amanda drivers)": 0
        for framework in drivers.known_frameworks()
        if framework in sys.modules and framework not in usable
    }
