"""Programs that use TensorFlow's profiler, of which there is one, under tools that use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.profiler.internal import _pywrap_profiler

import amanda
from amanda.errors import CoverageWarning
from amanda_tools._timelines.activities import MARK
from amanda_tools.kernels import KernelsTool
from amanda_tools.profile import ProfileTool
from amanda_tools.trace import TraceTool
from tests.running import run_python
from tests.tools.xplane_support import kinds_in
from tests.tutorial.documents import ROOT

tf1 = tf.compat.v1
profiler = tf.profiler.experimental
X = tf.ones((16, 16))

# Planes of TensorFlow are read with a file that its own reader leaves to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def kernels_in(folder: Path) -> dict[str, int]:
    """The kernels in profiles that a program has written; none of our marks may be there."""
    files = [file.read_bytes() for file in folder.rglob("*.xplane.pb")]
    assert files
    assert not any(MARK.encode() in file for file in files)
    return kinds_in(files)


def started_and_stopped(folder: Path) -> Any:
    run = tf.function(lambda x: tf.sinh(x @ x))
    run(X)
    profiler.start(str(folder))
    run(X)
    tf.cosh(X)
    profiler.stop()
    return kernels_in(folder), run(X).numpy().sum()


def in_contexts(folder: Path) -> Any:
    run = tf.function(lambda x: tf.sinh(x @ x))
    run(X)
    for part in ("a", "b"):
        with profiler.Profile(str(folder / part)):
            run(X)
        run(X)
    return [kernels_in(folder / part) for part in ("a", "b")]


def given_up(folder: Path) -> Any:
    """Not saved, so that nothing is asked of the profile at its end; then another one."""
    run = tf.function(lambda x: tf.sinh(x @ x))
    profiler.start(str(folder / "a"), profiler.ProfilerOptions(host_tracer_level=3))
    run(X)
    profiler.stop(save=False)
    assert not (folder / "a").exists()
    with profiler.Profile(str(folder / "b")):
        run(X)
    return kernels_in(folder / "b")


def mistaken(folder: Path) -> Any:
    """The program's own mistakes are told as they are without a tool."""
    run = tf.function(lambda x: tf.sinh(x @ x))
    run(X)
    with pytest.raises(tf.errors.UnavailableError) as stopped:
        profiler.stop()
    profiler.start(str(folder))
    with pytest.raises(tf.errors.AlreadyExistsError) as started:
        profiler.start(str(folder))
    run(X)
    profiler.stop()
    return str(stopped.value), str(started.value), kernels_in(folder)


def summarized(folder: Path) -> Any:
    run = tf.function(lambda x: tf.sinh(x @ x))
    with tf.summary.create_file_writer(str(folder)).as_default():
        tf.summary.trace_on(graph=True, profiler=True, profiler_outdir=str(folder))
        run(X)
        tf.summary.trace_export("run", step=0)
    return kernels_in(folder)


def of_keras(folder: Path) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watching = keras.callbacks.TensorBoard(str(folder), profile_batch=(2, 4))
    data = np.ones((32, 8), np.float32), np.ones((32, 1), np.float32)
    found = model.fit(*data, batch_size=4, verbose=0, callbacks=[watching])
    kernels = kernels_in(folder)
    products = {kind: count for kind, count in kernels.items() if "MatMul" in kind}
    return found.history, products


def of_sessions(folder: Path) -> Any:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (4, 4))
        weight = tf1.get_variable("w", initializer=tf.ones((4, 4)), use_resource=True)
        y = tf.sinh(x @ weight)
        update = tf1.assign_sub(weight, 0.01 * tf.gradients(y, weight)[0])
        initialize = tf1.global_variables_initializer()
    found = []
    with tf1.Session(graph=graph) as session:
        session.run(initialize)
        called = session.make_callable([y, update], [x], accept_options=True)
        for level in ("SOFTWARE_TRACE", "HARDWARE_TRACE", "FULL_TRACE"):
            options = tf1.RunOptions(trace_level=getattr(tf1.RunOptions, level))
            for run in (lambda data, **kw: session.run([y, update], {x: data}, **kw), called):
                told = tf1.RunMetadata()
                values = run(np.ones((4, 4), np.float32), options=options, run_metadata=told)
                nodes = [n.node_name for d in told.step_stats.dev_stats for n in d.node_stats]
                found.append((sorted(nodes), [value.sum() for value in values]))
    return found


def traced_callable(session: Any, fetch: Any, feed: Any) -> Any:
    """Runs of a session with options that were given before, as Keras 2 makes them."""
    options = config_pb2.CallableOptions(fetch=[fetch.name], feed=[feed.name])
    options.run_options.trace_level = tf1.RunOptions.FULL_TRACE
    return session._make_callable_from_options(options)  # noqa: SLF001 - has no public name


def of_callables(folder: Path) -> Any:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (4, 4))
        y = tf.sinh(x @ x)
    with tf1.Session(graph=graph) as session:
        call = traced_callable(session, y, x)
        told = tf1.RunMetadata()
        values = [session.run([y], {x: np.eye(4)})]
        values += [call(np.ones((4, 4), np.float32)), call(np.eye(4, dtype=np.float32))]
        values.append(call(np.ones((4, 4), np.float32), run_metadata=told))
        nodes = [n.node_name for d in told.step_stats.dev_stats for n in d.node_stats]
    return sorted(nodes), [[array.tolist() for array in value] for value in values]


USES = [
    started_and_stopped, in_contexts, given_up, mistaken, summarized, of_keras, of_sessions,
    of_callables,
]  # fmt: skip
TOOLS = [(ProfileTool,), (KernelsTool,), (TraceTool, ProfileTool, KernelsTool)]


@pytest.mark.parametrize("tools", TOOLS, ids=lambda tools: "+".join(t.name for t in tools))
@pytest.mark.parametrize("use", USES)
def test_the_programs_profile_is_its_own(use: Any, tools: Any, tmp_path: Path) -> None:
    """Profiles, results and errors of a program that profiles itself are those without a tool, and
    the tool says why its figures have a gap."""
    expected = use(tmp_path / "vanilla")
    used = [tool() for tool in tools]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with amanda.apply(*used):
            found = use(tmp_path / "watched")
    assert found == expected
    gaps = [str(w.message) for w in said if issubclass(w.category, CoverageWarning)]
    gaps += [text for t in used if isinstance(t, KernelsTool) for text in t.summary()["problems"]]
    assert len(gaps) == len(tools)
    assert all("after the program had begun to use it" in text for text in gaps)


def test_what_runs_before_the_programs_profile_is_recorded(tmp_path: Path) -> None:
    """Operators have their times; from the program's profile on the program has them."""
    run = tf.function(lambda x: tf.sinh(x))

    def program() -> None:
        run(X)
        with profiler.Profile(str(tmp_path)):
            for _ in range(5):
                run(X)
        run(X)

    profile, kernels = ProfileTool(), KernelsTool()
    with pytest.warns(CoverageWarning, match="begun to use it"), amanda.apply(profile, kernels):
        program()
    assert profile.summary()["by_type"]["sinh"]["calls"] == 1
    assert sum(a.name == "Sinh" for a in kernels.recording.activities) == 1
    assert kernels_in(tmp_path)["Sinh"] == 5


@pytest.mark.parametrize("tools", TOOLS, ids=lambda tools: "+".join(t.name for t in tools))
def test_a_profile_may_be_longer_than_the_scope(tools: Any, tmp_path: Path) -> None:
    """One that the program has begun before it, and one that it ends after it, are whole."""
    run = tf.function(lambda x: tf.sinh(x))
    run(X)

    def in_scope(body: Callable[[], Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CoverageWarning)
            with amanda.apply(*(tool() for tool in tools)):
                body()

    profiler.start(str(tmp_path / "a"))
    in_scope(lambda: run(X))
    run(X)
    profiler.stop()
    in_scope(lambda: (run(X), profiler.start(str(tmp_path / "b")), run(X)))
    in_scope(lambda: run(X))
    profiler.stop()
    assert [kernels_in(tmp_path / part)["Sinh"] for part in ("a", "b")] == [2, 2]
    used = [tool() for tool in tools]
    with amanda.apply(*used):
        run(X)
    assert not any(t.summary()["problems"] for t in used if isinstance(t, KernelsTool))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """After the scope TensorFlow's profiler is what it was, also where a scope ends within another
    one, and where the program's profile outlives both."""

    def parts() -> list[Any]:
        runs = (pywrap_tf_session.TF_SessionRun_wrapper, pywrap_tf_session.TF_SessionMakeCallable)
        return [_pywrap_profiler.ProfilerSession, _pywrap_profiler.start_server, *runs]

    before, run = parts(), tf.function(lambda x: tf.sinh(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        with amanda.apply(ProfileTool()):
            with amanda.apply(KernelsTool()):
                run(X)
                profiler.start(str(tmp_path))
            assert parts() != before
    assert parts() == before
    profiler.stop()
    assert parts() == before


SERVED = """
import socket, sys, threading
import tensorflow as tf
import amanda
from tests.tools.test_profiler_of_the_program import X, kernels_in
from pathlib import Path

run, ended, folder = tf.function(lambda x: tf.sinh(x)), threading.Event(), sys.argv[1]
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
tools = [amanda.tools.load(name)() for name in ("trace", "profile", "kernels")]
with amanda.apply(*tools):
    if "late" in sys.argv:
        run(X)
    tf.profiler.experimental.server.start(port)
    def work():
        while not ended.wait(0.005):
            run(X)
    with amanda.disabled():
        thread = threading.Thread(target=work)
        thread.start()
        tf.profiler.experimental.client.trace(f"localhost:{port}", folder, 400)
        ended.set()
        thread.join()
    run(X)
print(kernels_in(Path(folder))["Sinh"] > 0)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_profiler_server_has_the_profiler(when: str, tmp_path: Path) -> None:
    """Requests come unannounced: from the start of a server in the scope, no tool uses it."""
    done = run_python("-c", SERVED, str(tmp_path), when, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
    assert "after the program had begun to use it" in done.stderr
