"""Private symbols of TensorFlow that this package uses: the functions that use its profiler.

To be imported where TensorFlow is. The runtime has one profiler. Whatever begins to use it while
another part of the process does gets an ``AlreadyExistsError`` (2.16 to 2.21): the public functions
and Keras at the begin, a session at the end of its run, and a request to a profiler server fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.profiler.internal import _pywrap_profiler

from amanda.python.patching import PatchSet

ProfilerSession: Any = _pywrap_profiler.ProfilerSession
"""One use of the profiler, which the public functions keep in a variable of theirs. It lasts until
its results are taken, or until it is deleted."""

_LEAST_LEVEL = config_pb2.RunOptions.HARDWARE_TRACE
"""Level from which on a run of a session uses the profiler."""


class ProfilerUses:
    """Reports each use of the profiler by the program, from :meth:`watch` to :meth:`undo`.

    Args:
        begin: called before the program uses the profiler.
        end: called after it does, once for each call of `begin`.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._patches = PatchSet()
        # By `id` of a session and handle of what it has made callable: whether runs are profiled.
        self._callables: dict[tuple[int, Any], bool] = {}

    def watch(self) -> None:
        """Report uses that begin from now on; harmless when called twice."""
        if self._patches:
            return
        session = _told_of(self._begin, self._end)
        self._patches.set(_pywrap_profiler, "ProfilerSession", session)
        self._patches.wrap(_pywrap_profiler, "start_server", self._serving)
        self._patches.wrap(pywrap_tf_session, "TF_SessionRun_wrapper", self._running)
        self._patches.wrap(pywrap_tf_session, "TF_SessionMakeCallable", self._making)
        self._patches.wrap(pywrap_tf_session, "TF_SessionRunCallable", self._calling)

    def undo(self) -> None:
        """Report no further uses, only the end of uses that have begun."""
        self._patches.undo()
        self._callables.clear()

    def _serving(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """A server lasts as long as the process, and its requests cannot be noticed."""

        def start_server(*args: Any) -> Any:
            result = vanilla(*args)
            self._begin()
            return result

        return start_server

    def _running(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that runs a session with options of that run."""

        def run(session: Any, options: Any, *args: Any) -> Any:
            if options is None or not _profiles(options):
                return vanilla(session, options, *args)
            return self._within(vanilla, session, options, *args)

        return run

    def _making(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that prepares runs of a session with fixed options."""

        def make(session: Any, options: Any) -> Any:
            handle = vanilla(session, options)
            given = config_pb2.CallableOptions.FromString(_content(options))
            self._callables[id(session), handle] = given.run_options.trace_level >= _LEAST_LEVEL
            return handle

        return make

    def _calling(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that runs what :meth:`_making` has prepared."""

        def call(session: Any, handle: Any, values: Any, run_metadata: Any) -> Any:
            profiles = self._callables.get((id(session), handle))
            if profiles is None:
                return self._first(vanilla, session, handle, values, run_metadata)
            if not profiles:
                return vanilla(session, handle, values, run_metadata)
            return self._within(vanilla, session, handle, values, run_metadata)

        return call

    def _first(
        self, vanilla: Callable[..., Any], session: Any, handle: Any, values: Any, metadata: Any
    ) -> Any:
        """Run an older callable for the first time; its options are not known.

        Its metadata show whether it is traced.
        """
        own = pywrap_tf_session.TF_NewBuffer() if metadata is None else metadata
        try:
            result = self._within(vanilla, session, handle, values, own)
            told = config_pb2.RunMetadata.FromString(_content(own))
            self._callables[id(session), handle] = bool(told.step_stats.dev_stats)
        finally:
            if metadata is None:
                pywrap_tf_session.TF_DeleteBuffer(own)
        return result

    def _within(self, vanilla: Callable[..., Any], *args: Any) -> Any:
        self._begin()
        try:
            return vanilla(*args)
        finally:
            self._end()


def _profiles(options: Any) -> bool:
    """True if a run of a session with these options, a buffer of the runtime, is profiled."""
    given = config_pb2.RunOptions.FromString(_content(options))
    return bool(given.trace_level >= _LEAST_LEVEL)


def _content(buffer: Any) -> bytes:
    """Return the bytes of a buffer of the runtime."""
    return bytes(pywrap_tf_session.TF_GetBuffer(buffer))


def _told_of(begin: Callable[[], None], end: Callable[[], None]) -> type:
    """Return a class that replaces ``ProfilerSession`` in the program, and reports its uses."""

    class Told:
        def __init__(self) -> None:
            self._session = ProfilerSession()
            self._runs = False

        def start(self, *args: Any) -> None:
            begin()
            self._runs = True
            try:
                self._session.start(*args)
            except BaseException:
                self._finish()
                raise

        def export_to_tb(self) -> None:
            try:
                self._session.export_to_tb()
            finally:
                self._finish()

        def stop(self) -> Any:
            try:
                return self._session.stop()
            finally:
                self._finish()

        def _finish(self) -> None:
            self._session = None
            if self._runs:
                self._runs = False
                end()

        def __del__(self) -> None:
            # The profiler is free once the session is deleted, which is after this by itself.
            self._finish()

    return Told
