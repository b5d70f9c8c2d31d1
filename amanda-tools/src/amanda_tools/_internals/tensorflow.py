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
        begins: called before the program uses the profiler.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._patches = PatchSet()

    def watch(self) -> None:
        """Report uses that begin from now on; harmless when called twice."""
        if self._patches:
            return
        always, session = lambda *_: True, pywrap_tf_session
        self._report(_pywrap_profiler, "ProfilerSession", always)
        # A server lasts as long as the process, and its requests cannot be noticed.
        self._report(_pywrap_profiler, "start_server", always)
        self._report(session, "TF_SessionRun_wrapper", _profiles)
        self._report(session, "TF_SessionMakeCallable", _will_profile)

    def undo(self) -> None:
        """Report no further uses."""
        self._patches.undo()

    def _report(self, module: Any, name: str, is_use: Callable[..., bool]) -> None:
        def wrapper(vanilla: Callable[..., Any]) -> Callable[..., Any]:
            def told(*args: Any) -> Any:
                if is_use(*args):
                    self._begins()
                return vanilla(*args)

            return told

        self._patches.wrap(module, name, wrapper)


def _profiles(_: Any, options: Any, *__: Any) -> bool:
    """True if a run of a session with these options, a buffer of the runtime, is profiled."""
    return options is not None and _is_traced(config_pb2.RunOptions.FromString(_content(options)))


def _will_profile(_: Any, options: Any) -> bool:
    """True if the runs of what a session makes callable are profiled."""
    return _is_traced(config_pb2.CallableOptions.FromString(_content(options)).run_options)


def _is_traced(options: Any) -> bool:
    return bool(options.trace_level >= _LEAST_LEVEL)


def _content(buffer: Any) -> bytes:
    """Return the bytes of a buffer of the runtime."""
    return bytes(pywrap_tf_session.TF_GetBuffer(buffer))
