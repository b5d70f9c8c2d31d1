"""Contract rule 10: threads and processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from amanda.inline import Counter
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.state import ATTACHED
from amanda.testing.contract.base import ContractTests, W, X, inserting, product
from amanda.testing.framework import Probe, Program, requires
from amanda.tool import cache_disabled, disabled, new_iteration, vanilla

_PATIENCE = 30.0


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    """A started thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


class ThreadTests(ContractTests):
    """Which threads and processes a scope covers."""

    def thread_counter(self) -> Probe:
        """A tool that notes the thread of each execution of a product."""

        def note(*tensors: Any) -> None:
            self.noted.append(threading.current_thread().name)

        return self.probe("mul", before=inserting(before_op=note))

    @requires(Capability.THREADS)
    def test_thread_started_inside(self) -> None:
        """A thread that is started inside a scope is covered by it, and one that it starts."""
        with self.apply(self.thread_counter()):
            in_thread(lambda: in_thread(self.program.run).join()).join()
            assert len(self.noted) == 1
            self.noted.clear()
            thread = in_thread(self.program.run)
            thread.join()
        assert len(self.noted) == 1
        if Capability.STATIC_GRAPH not in self.driver_cls.capabilities:
            # A graph runs on threads of its own.
            assert self.noted == [thread.name]

    @requires(Capability.THREADS)
    def test_thread_inherits_switches(self) -> None:
        """A thread that is started under disabled() runs uninstrumented."""
        with self.apply(self.thread_counter()):
            with disabled():
                thread = threading.Thread(target=self.program.run)
                thread.start()
            thread.join()
        assert self.noted == []

    def test_thread_started_before(self) -> None:
        """A thread that was there before a scope is not touched by it."""
        self.in_another_thread(self.program.run, lambda: self.apply(self.thread_counter()))
        assert self.noted == []

    @requires(Capability.THREADS)
    def test_thread_that_outlives_the_scope(self) -> None:
        """A thread that outlives the scope runs vanilla from then on."""
        results: list[Any] = []
        started, left = threading.Event(), threading.Event()

        def work() -> None:
            self.program.run()
            started.set()
            assert left.wait(_PATIENCE)
            results.append(self.program.run())

        with self.apply(self.thread_counter()):
            thread = in_thread(work)
            assert started.wait(_PATIENCE)
        left.set()
        thread.join()
        assert len(self.noted) == 1
        assert results == [[product(X, W)]]

    @requires(Capability.BACKWARD)
    def test_backward_in_another_thread(self) -> None:
        """A backward op follows its forward op, whichever thread runs it."""
        self.needs_separate_backward()
        backward: list[Callable[[], Any]] = []
        tool = self.probe(
            "mul",
            before=inserting(before_backward_op=lambda g: self.noted.append(1)),
            before_backward=inserting(before_backward_op=lambda *g: self.noted.append(2)),
        )

        @contextmanager
        def forward() -> Iterator[None]:
            with self.apply(tool):
                backward.append(self.program.forward())
                yield

        def work() -> Any:
            return backward[0]()

        assert self.in_another_thread(work, forward) == [W, X]
        assert set(self.noted) == {1, 2}

    @requires(Capability.THREADS)
    def test_ids_of_a_thread(self) -> None:
        """Each thread counts its operators on its own; runs of other threads do not matter."""
        seen: dict[str, list[str]] = {}

        def note(context: OpContext) -> None:
            seen.setdefault(thread_name[0], []).append(context.get_op_id())

        thread_name = ["main"]
        with self.apply(self.probe("mul", before=note)), cache_disabled():
            self.program.run()
            for thread_name[0] in ("one", "two"):
                in_thread(self.program.run).join()
            thread_name[0] = "main"
            self.program.run()
        assert seen["one"] == seen["two"] == seen["main"][:1]
        assert len(seen["main"]) == 2

    @requires(Capability.THREADS, Capability.BACKWARD)
    def test_ids_across_a_backward_of_another_thread(self) -> None:
        """A backward pass ends the iteration of its own thread and of no other."""
        self.needs_separate_backward()

        def note(context: OpContext) -> None:
            if threading.current_thread() is threading.main_thread():
                self.noted.append(context.get_op_id())

        program, other = self.multiplication(), self.multiplication()
        with self.apply(self.probe("mul", before=note)), cache_disabled():
            for interrupted in (False, True):
                new_iteration()
                program.run()
                if interrupted:
                    in_thread(other.train).join()
                program.run()
        assert len(set(self.noted[:2])) == 2
        assert self.noted[2:] == self.noted[:2]

    @requires(Capability.THREADS)
    def test_each_thread_is_vanilla_on_its_own(self) -> None:
        """While one thread runs vanilla, the operators of another are instrumented."""
        with self.apply(self.thread_counter()):
            result = self.in_another_thread(self.program.run, vanilla)
        assert result == [product(X, W)]
        assert len(self.noted) == 1

    @requires(Capability.THREADS, Capability.BACKWARD)
    def test_each_thread_is_isolated_on_its_own(self) -> None:
        """While one thread runs isolated from AD, another one computes gradients."""
        with self.apply(self.thread_counter()):
            driver = ATTACHED[self.driver_cls]
            result = self.in_another_thread(self.program.train, driver.ad_isolated)
        assert result.gradients == [W, X]

    def in_another_thread(
        self, work: Callable[[], Any], meanwhile: Callable[[], AbstractContextManager[Any]]
    ) -> Any:
        """The result of `work`, run in a thread while this thread is in a with-block."""
        results: list[Any] = []
        entered, finished = threading.Event(), threading.Event()

        def run() -> None:
            assert entered.wait(_PATIENCE)
            try:
                results.append(work())
            finally:
                finished.set()

        thread = in_thread(run)
        with meanwhile():
            entered.set()
            assert finished.wait(_PATIENCE)
        thread.join()
        return results[0]

    @requires(Capability.THREADS)
    def test_tools_never_run_concurrently(self) -> None:
        """Routines and analyses of one tool never run in two threads at once."""
        overlaps: list[int] = []

        def slow(*tensors: Any) -> None:
            self.noted.append(1)
            if len(self.noted) > 1:
                overlaps.append(1)
            time.sleep(0.002)
            self.noted.pop()

        def analyse(context: OpContext) -> None:
            slow()
            context.insert_before_op(slow)

        programs = [self.multiplication() for _ in range(3)]
        with self.apply(self.probe("mul", before=analyse)), cache_disabled():
            threads = [in_thread(lambda p=p: [p.run() for _ in range(4)]) for p in programs]  # type: ignore[misc]
            for thread in threads:
                thread.join()
        assert overlaps == []

    def test_scopes_of_threads_at_once(self) -> None:
        """Threads that enter and leave scopes at once count their own operators, and no others."""
        programs = [self.multiplication() for _ in range(3)]
        for program in programs:
            program.run()

        def work(program: Program) -> None:
            for _ in range(3):
                counter = Counter()
                with self.apply(self.probe("mul", before=inserting([], before_op=counter))):
                    program.run()
                self.noted.append(counter.count)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [in_thread(lambda p=p: work(p)) for p in programs]  # type: ignore[misc]
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert self.noted == [1] * 9
        assert not ATTACHED

    def test_scope_left_in_another_thread(self) -> None:
        """A scope that another thread ends leaves nothing, and the next one acts as ever."""
        before = self.fw.global_state()
        block = self.apply(self.thread_counter())
        block.__enter__()
        self.program.run()
        in_thread(lambda: block.__exit__(None, None, None)).join()
        assert not ATTACHED
        assert self.program.run() == [product(X, W)]
        assert len(self.noted) == 1
        self.run(self.program, self.thread_counter())
        assert len(self.noted) == 2
        assert self.fw.global_state() == before

    def needs_fork(self) -> None:
        """Skip where no forked child works."""
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        if not self.fw.forks:
            pytest.skip("the framework itself does not work in a forked child")

    def test_forked_child(self) -> None:
        """A forked child runs vanilla."""
        self.needs_fork()
        with self.apply(self.thread_counter()):
            self.program.run()
            child = _fork(lambda: self.program.run() == [product(X, W)] and len(self.noted) == 1)
            assert child == 0
            self.program.run()
        assert len(self.noted) == 2

    def test_a_fork_inside_a_routine(self) -> None:
        """A fork inside a routine gives a vanilla child, and the parent goes on as ever."""
        self.needs_fork()
        forking = inserting([], before_op=lambda: self.noted.append(_fork(lambda: not ATTACHED)))
        with self.apply(self.probe("mul", before=forking)):
            for runs in 1, 2:
                assert self.program.run() == [product(X, W)]
                assert self.noted == [0] * runs


def _fork(check: Callable[[], bool]) -> int:
    """The exit code of a forked child that runs a check."""
    import warnings

    with warnings.catch_warnings():
        # pytest or the framework may have threads of their own.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + _PATIENCE
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
