"""Scopes and switches of coroutines, generators and async generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import amanda
from amanda.state import STATE, find_active
from amanda.testing import loopback as lb

SWITCHES: list[tuple[Callable[[], AbstractContextManager[Any]], str]] = [
    (amanda.disabled, "enabled"),
    (amanda.cache_disabled, "cache"),
    (amanda.ad_enabled, "ad"),
    (amanda.ad_disabled, "ad"),
]
each_switch = pytest.mark.parametrize(
    ("switch", "name"), SWITCHES, ids=[switch.__name__ for switch, _ in SWITCHES]
)


class Marker(amanda.Tool):
    """Notes which code runs an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(lambda context: context.insert_before_op(self.note))

    def note(self, *tensors: Any) -> None:
        """Note one execution."""
        self.seen.append(RUNNING[0])


RUNNING = [""]


def work(who: str) -> None:
    """Run one op."""
    RUNNING[0] = who
    lb.add(lb.tensor(1.0), 2.0)


def current(name: str) -> Any:
    """A switch as the code that runs now sees it."""
    find_active(vars(STATE))
    return getattr(STATE, name)


@each_switch
def test_a_suspended_generator_keeps_its_switch_to_itself(
    switch: Callable[[], AbstractContextManager[Any]], name: str
) -> None:
    """Its caller does not see it, nor does another generator, in whichever order they end."""
    normal = current(name)
    seen: list[Any] = []

    def generator() -> Iterator[None]:
        with switch():
            while True:
                seen.append(current(name))
                yield

    first, second = generator(), generator()
    next(first)
    assert current(name) == normal
    next(second)
    first.close()
    assert current(name) == normal
    next(second)
    second.close()
    assert len(set(seen)) == 1
    assert seen[0] != normal
    assert current(name) == normal
    assert not STATE.held


def test_an_abandoned_generator_switches_nothing_off() -> None:
    """A generator that is never resumed leaves other code instrumented, also when it dies."""
    tool = Marker()

    def generator() -> Iterator[None]:
        with amanda.disabled():
            work("generator")
            yield

    with amanda.apply(tool):
        running = generator()
        next(running)
        work("caller")
        del running
        work("caller")
    assert tool.seen == ["caller", "caller"]


def test_an_async_generator_keeps_its_switch_to_itself() -> None:
    """The code that iterates over it does not see it, nor do other tasks."""
    tool = Marker()

    async def generator() -> AsyncIterator[None]:
        with amanda.disabled():
            for _ in range(2):
                work("generator")
                await asyncio.sleep(0)
                yield

    async def other() -> None:
        for _ in range(2):
            work("other")
            await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.ensure_future(other())
        async for _ in generator():
            work("consumer")
        await task

    with amanda.apply(tool):
        asyncio.run(main())
    assert sorted(tool.seen) == ["consumer", "consumer", "other", "other"]


def test_tasks_started_inside_a_scope_are_covered() -> None:
    """A task has the scopes and switches of the code that starts it, as a thread has."""
    tool = Marker()

    async def child(who: str) -> None:
        work(who)
        await asyncio.sleep(0)
        work(who)

    async def main() -> None:
        with amanda.apply(tool):
            with amanda.disabled():
                off = asyncio.ensure_future(child("off"))
                await asyncio.sleep(0)
            await asyncio.gather(child("one"), child("two"), off)
            late = asyncio.ensure_future(child("late"))
            await asyncio.sleep(0)
        await late

    asyncio.run(main())
    assert sorted(tool.seen) == ["late", "off", "one", "one", "two", "two"]


def test_a_coroutine_driven_by_hand_keeps_its_switch_to_itself() -> None:
    """Also without an event loop."""

    class Pause:
        def __await__(self) -> Iterator[None]:
            yield

    async def coroutine() -> None:
        with amanda.disabled():
            assert current("enabled") is False
            await Pause()
            assert current("enabled") is False

    running = coroutine()
    running.send(None)
    assert current("enabled") is True
    with pytest.raises(StopIteration):
        running.send(None)
    assert current("enabled") is True


def test_switches_left_in_another_order() -> None:
    """Of switches that are entered by hand, those that are open hold, the last one first."""
    off, on = amanda.disabled(), amanda.enabled()
    off.__enter__()
    on.__enter__()
    off.__exit__(None, None, None)
    assert STATE.enabled is True
    off.__enter__()
    assert STATE.enabled is False
    on.__exit__(None, None, None)
    assert STATE.enabled is False
    off.__exit__(None, None, None)
    assert STATE.enabled is True


def test_switches_refuse_to_decorate_coroutines() -> None:
    """A decorator would cover only the call, not the body."""

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match=r"`with amanda.disabled\(...\):` in the body"):
        amanda.disabled()(coroutine)
