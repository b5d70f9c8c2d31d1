"""``stragglers``: the rule by simulation, the exchange by processes, the export of metrics."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools import stragglers
from amanda_tools.stragglers import StragglersOptions, StragglersTool, work
from amanda_tools.stragglers.comparison import Comparison, Numbers, Straggler
from amanda_tools.stragglers.exchange import Exchange
from amanda_tools.stragglers.work import Stopwatch
from tests.running import applied, run_python

# -- the rule, by simulation ------------------------------------------------------

LAYERS, EVERY = 3, 10
KEYS = [
    (f"net.{layer}.{part}/{way}", f"net.{layer}.{part}", way)
    for layer in range(LAYERS)
    for part in ("attn.q", "attn.o", "mlp.up", "mlp.down", "norm")
    for way in ("forward", "backward")
]


def times(
    random: np.random.Generator, windows: int, slow: Numbers, jitter: float, spread: float
) -> Iterator[Numbers]:
    """The times of operators by rank, of each window, as the tool takes them.

    Executions vary, and one of ten takes 20 times as long; ranks differ by 1 % for ever, and by 5 %
    in each window.
    """
    usual = random.lognormal(0, spread, len(KEYS))
    usual = usual * slow * (1 + 0.01 * random.normal(size=slow.shape))
    for _ in range(windows):
        of_steps = usual * np.exp(jitter * random.normal(size=(EVERY, *slow.shape)))
        of_steps[random.random(of_steps.shape) < 0.1] *= 20
        of_steps *= np.exp(0.05 * random.normal(size=(len(slow), 1)))
        yield np.sort(of_steps, axis=0)[: EVERY // 2].mean(axis=0)


def named(
    seed: int,
    ranks: int = 8,
    windows: int = 5,
    jitter: float = 0.1,
    spread: float = 1.0,
    **slow: Any,
) -> list[Straggler]:
    """What is named where a rank takes ``times`` as long in the operators of ``places``."""
    slowness = np.ones((ranks, len(KEYS)))
    if slow:
        slowness[slow["rank"], slow["places"]] = slow["times"]
    comparison, random = Comparison(ranks, StragglersOptions().late, 3), np.random.default_rng(seed)
    for i, table in enumerate(times(random, windows, slowness, jitter, spread)):
        comparison.compare(EVERY * i, {rank: (KEYS, row) for rank, row in enumerate(table)})
    return comparison.found


LONG = [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in ((8, 50, 0.1), (64, 5, 0.1), (3, 50, 0.05))
]


@pytest.mark.parametrize(("ranks", "runs", "jitter"), [(8, 8, 0.1), *LONG])
def test_no_false_alarms(ranks: int, runs: int, jitter: float) -> None:
    """In runs of 200 steps in which no rank is late."""
    assert [named(seed, ranks, 20, jitter) for seed in range(runs)] == [[]] * runs


def test_an_operator_is_named_within_fifty_steps() -> None:
    """The largest one, where it takes 30 % longer; a small one is not, whose time nobody misses."""
    sizes = [np.random.default_rng(seed).lognormal(0, 1.0, len(KEYS)) for seed in range(20)]
    for places, wanted in ((map(np.argmax, sizes), True), (map(np.argmin, sizes), False)):
        for seed, place in enumerate(places):
            found = named(seed, rank=5, places=place, times=1.3)
            told = [(of.rank, of.operator, of.direction) for of in found]
            op, _, direction = KEYS[place]
            assert told == [(5, op, direction)][: int(wanted)]
            assert all(f" MAD late in {op} {direction} (+" in str(of) for of in found)


def test_operators_of_a_module_are_named_in_one_line() -> None:
    places = np.array([key[1].startswith("net.1.mlp.") for key in KEYS])
    for seed in range(5):
        (found,) = named(seed, rank=2, places=places, times=1.6, jitter=0.02, spread=0.1)
        assert (found.rank, found.others, found.module) == (2, 3, "net.1.mlp")
        assert str(found).endswith("; and in 3 more operators of net.1.mlp)")


def test_a_rank_of_a_slow_processor_is_named_as_a_whole() -> None:
    places = np.ones(len(KEYS), bool)
    for seed in range(5):
        (found,) = named(seed, rank=2, places=places, times=1.5)
        assert (found.rank, found.operator, found.others) == (2, "", 0)
        assert " MAD late in all operators (+" in str(found)


def test_ranks_with_other_operators_and_missing_ones() -> None:
    """Stages of a pipeline are compared among themselves, and a rank that has died is left out."""
    stages = [KEYS[:15], KEYS[15:]]
    comparison = Comparison(9, 5.0, 2)
    for window in range(4):
        ranks = {rank: (stages[rank % 2], np.full(15, 1.0 + rank % 2)) for rank in range(8)}
        ranks[3][1][4] *= 1.5
        if window > 1:
            del ranks[0]
        comparison.compare(window, ranks)
    (found,) = comparison.found
    assert (found.rank, found.operator, found.step) == (3, KEYS[19][0], 1)
    assert comparison.operators[KEYS[19][0]] == {
        "median": 2.0,
        "mad": 0.0,
        "slowest": 3.0,
        "slowest_rank": 3,
    }


# -- the work of an operator --------------------------------------------------------


@pytest.mark.parametrize("is_told", [True, False])
def test_work_is_without_what_other_processes_take(
    is_told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread that sleeps works on, where the system tells; one that waits for a processor does
    not. For how long is not known of the first execution that waits."""
    clock, processor, delay = 0, 0, 0
    told = tmp_path / "schedstat"

    def run(seconds: int, worked: int, delayed: int) -> None:
        nonlocal clock, processor, delay
        clock, processor = clock + seconds, processor + worked
        delay += delayed
        if is_told:
            told.write_text(f"{processor} {delay} 1\n")

    run(0, 0, 0)
    monkeypatch.setattr("time.perf_counter_ns", lambda: clock)
    monkeypatch.setattr("time.thread_time_ns", lambda: processor)
    monkeypatch.setattr(work, "SCHEDSTAT", str(told))
    watch = Stopwatch(sync=False)
    start, stop = watch.routines(0, waits=False)
    ms = 10**6
    for runs, usual, without in (
        ([(1, 1, 0), (3, 3, 0)], 1, 1),
        ([(100, 2, 98)], np.nan, 2),
        ([(1, 1, 0), (100, 2, 98), (4, 4, 0)], 1.5, 1.5),
        ([(100, 1, 99), (100, 1, 99)], 1, 1),
        ([(7, 1, 0), (100, 1, 93), (7, 1, 0)], 7, 1),
        ([(7, 2, 6), (9, 2, 11)], 2, 2),
    ):
        for seconds, worked, delayed in runs:
            start()
            run(seconds * ms, worked * ms, delayed * ms)
            stop()
            run(50 * ms, 1 * ms, 49 * ms)
        watch.end_step()
        found = watch.take()[0]
        assert (found.calls, found.nanoseconds) == (len(runs), sum(r[0] for r in runs) * ms)
        assert found.usual == pytest.approx((usual if is_told else without) * ms, nan_ok=True)
    watch.close()


@pytest.mark.skipif(not Path(work.SCHEDSTAT).exists(), reason="the system does not tell")
def test_each_thread_waits_for_itself() -> None:
    """Also one with the identifier of a thread that has ended; no file stays open."""
    watch = Stopwatch(sync=False)
    start, stop = watch.routines(0, waits=False)
    before = len(list(Path("/proc/self/fd").iterdir()))

    def sleep() -> None:
        for _ in range(2):
            start()
            time.sleep(0.005)
            stop()

    for _ in range(3):
        thread = threading.Thread(target=sleep)
        thread.start()
        thread.join()
    watch.end_step()
    found = watch.take()[0]
    assert (found.calls, len(found.times)) == (6, 5)
    assert min(found.times) > 4_900_000
    watch.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.skipif(not Path(work.SCHEDSTAT).exists(), reason="the system does not tell")
def test_files_that_the_program_has_closed_are_not_closed_again(tmp_path: Path) -> None:
    """Nor read: as daemons close all files, their numbers are then those of other files."""
    watch = Stopwatch(sync=False)
    start, stop = watch.routines(0, waits=False)

    def sleep() -> None:
        start()
        time.sleep(0.005)
        stop()

    sleep()
    files = Path("/proc/self/fd").iterdir()
    [own] = [int(path.name) for path in files if path.resolve().name == "schedstat"]
    with (tmp_path / "file").open("w+b") as file:
        os.dup2(file.fileno(), own)
    sleep()
    watch.close()
    assert os.write(own, b"it is open") == 10
    os.close(own)
    watch.end_step()
    assert watch.take()[0].calls == 2


def test_operators_that_wait_are_left_out() -> None:
    """With those around them, and not those that have raised before."""
    watch = Stopwatch(sync=False)
    routines = [watch.routines(number, waits=number == 2) for number in range(4)]
    routines[3][0]()  # it raises
    watch.end_step()
    for number in (0, 1):
        routines[number][0]()
    routines[1][1]()
    routines[2][0]()
    routines[2][1]()
    routines[0][1]()
    assert watch.waiting == {0, 2}
    watch.end_step()
    assert {number: of.calls for number, of in watch.take().items()} == {0: 1, 1: 1, 2: 1}


# -- processes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes tells, see :mod:`tests.tools.straggler_ranks`."""
    folder = tmp_path_factory.mktemp("ranks")
    words = ("-m", "tests.tools.straggler_ranks", str(folder))
    done = run_python(*words, env={"OMP_NUM_THREADS": "1"}, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(4)]


def test_a_rank_is_named_while_it_runs(ranks: list[dict[str, Any]]) -> None:
    """By the first rank: the operator in which it sleeps, and not those that wait for it."""
    told, summary = ranks[0]["late"]["stderr"], ranks[0]["late"]["summary"]
    assert "rank 3 is" in told
    assert "late in Net.slow/Sleeping:0 forward" in told
    row = next(row for row in summary["stragglers"] if row["rank"] == 3)
    assert (row["operator"], row["direction"]) == ("Net.slow/Sleeping:0", "forward")
    assert row["seconds"] > 0.05
    assert not any("all_reduce" in of for of in ranks[0]["late"]["types"])
    assert (summary["not_compared"], ranks[1]["late"]["summary"]["stragglers"]) == ("", [])
    ops = {row["id"]: row for row in ranks[0]["late"]["ops"]}
    assert ops["Net.slow/Sleeping:0"]["slowest_rank"] == 3


def test_gradients_stay_bit_identical(ranks: list[dict[str, Any]]) -> None:
    assert [len({of["plain"]["bits"], of["late"]["bits"]}) for of in ranks] == [1] * 4


def test_the_first_rank_without_the_tool(ranks: list[dict[str, Any]]) -> None:
    """Nobody waits, and the results of the others say so."""
    found = [of["partly"].get("not_compared") for of in ranks]
    assert found == [None, *["the first rank has no such tool (--ranks needs 0)"] * 3]


def test_a_store_that_is_gone(ranks: list[dict[str, Any]]) -> None:
    """The exchange is given up with one line on each rank."""
    for of in ranks:
        assert of["gone"]["stderr"].count("\n") == 1
        assert (
            "no longer exchanged: LookupError: MASTER_ADDR and MASTER_PORT are not set"
            in of["gone"]["stderr"]
        )
        assert of["gone"]["bits"] == of["plain"]["bits"]


def test_a_nan_of_one_rank_is_told_before_the_exchange(ranks: list[dict[str, Any]]) -> None:
    """With rank, step and operator, before the gradients are summed up; by this rank only."""
    told = [of["nan"]["before"] for of in ranks]
    assert told[1].startswith("amanda: nan: rank 1, step 1: log produced NaN")
    assert [told[rank] for rank in (0, 2, 3)] == ["", "", ""]


# -- a store that misbehaves -------------------------------------------------------


class Store:
    """What :class:`Exchange` asks of PyTorch's stores."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def set(self, key: str, value: Any) -> None:
        self.may_answer.wait()
        self.held[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.held for key in keys)

    def get(self, key: str) -> Any:
        return self.held[key]

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        return [self.held[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        return self.held.pop(key, None) is not None


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ``torch.distributed`` of three ranks, of which this one is the first."""
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = Store()
    module = SimpleNamespace(
        store=store,
        get_rank=lambda: 0,
        get_world_size=lambda: 3,
        TCPStore=lambda *args, **options: store,
        PrefixStore=lambda prefix, store: store,
    )
    monkeypatch.setattr(stragglers, "torch_group", lambda: module)
    return module


def test_a_rank_that_is_late_is_waited_for_again(distributed: Any) -> None:
    """One that has missed windows counts as soon as it writes, and is not waited for until then."""
    first, keys, seconds = Exchange(distributed), KEYS[:2], np.ones(2)
    others = [Exchange(distributed), Exchange(distributed)]
    others[0].rank, others[1].rank = 1, 2
    for window in range(6):
        for exchange in (first, others[0], *others[1:][: window > 4]):
            exchange.write(window, keys, seconds)
        found = first.read(window, lambda: True)
        assert found.keys() == ({0, 1, 2} if window > 4 else {0, 1})
        assert all(each[0] == keys for each in found.values())


def test_the_program_ends_where_the_store_does_not_answer(
    distributed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stragglers, "_SECONDS", 0.1)
    store = distributed.store
    store.may_answer.clear()
    tool = applied(StragglersTool(every=1), train, nn.Linear(4, 4), 9)
    assert tool.summary()["dropped"] > 0
    store.may_answer.set()
    monkeypatch.setattr(stragglers, "_SECONDS", 60)
    # The next scope has a thread of its own.
    with amanda.apply(tool):
        train(nn.Linear(4, 4), 3)
    assert tool.summary()["not_compared"] == "no operator ran on 3 ranks"


def test_steps_count_anew_after_evaluations(distributed: Any) -> None:
    """Ranks agree on windows where one of them evaluates before it trains."""
    tool, model = StragglersTool(every=2), nn.Linear(4, 4)
    with amanda.apply(tool):
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, 4))
        train(model, 4)
    assert {key for key in distributed.store.held if key.endswith("/0")} == {"2/0"}


# -- one process ------------------------------------------------------------------


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def test_one_process_has_nothing_to_compare() -> None:
    tool = applied(StragglersTool(every=2), train, nn.Linear(4, 4), 5)
    result = tool.result()
    assert result["summary"]["windows"] == 2
    assert result["summary"]["not_compared"] == "PyTorch has no group of processes"
    assert any(row["seconds"] > 0 for row in result["ops"])


def test_evaluations_are_no_part_of_a_step() -> None:
    """What runs between steps is dropped, and a log in which no step ends does not grow."""
    model, tool = nn.Linear(4, 4), StragglersTool(every=2)
    with amanda.apply(tool):
        for _ in range(2):
            train(model, 1)
            with torch.no_grad():
                for _ in range(50):
                    model(torch.ones(2, 4))
    # Of the two steps, one execution each.
    assert max(work.calls for work in tool._sums.values()) == 2  # noqa: SLF001


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators with the most time, as sums, by op_id, type and rank."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: provider)
    monkeypatch.setattr("opentelemetry.metrics.get_meter", provider.get_meter)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    with amanda.apply(tool := StragglersTool(every=1, otel=3)):
        train(model, 4)
    found = {of.name: of for of in _metrics_of(reader.get_metrics_data())}
    assert {name: of.unit for name, of in found.items()} == {
        "amanda.operator.time": "s",
        "amanda.operator.calls": "{call}",
    }
    points = found["amanda.operator.time"].data.data_points
    assert len({point.attributes["op_id"] for point in points}) == 3
    assert all(point.value > 0 and point.attributes["rank"] == 0 for point in points)
    types = {op.id: op.type for op in tool._ops}  # noqa: SLF001
    assert all(types[p.attributes["op_id"]] == p.attributes["type"] for p in points)
    assert {p.value for p in found["amanda.operator.calls"].data.data_points} <= {3, 4}
    kept = weakref.ref(tool)
    del tool
    gc.collect()
    assert kept() is None


def _metrics_of(data: Any) -> Iterator[Any]:
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def test_metrics_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(AmandaError, match=r"pip install 'amanda-tools\[otel\]'"):
        StragglersTool(otel=3)
