"""Programs under ``amanda run`` behave as without it."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command

Script = Callable[..., Path]

ENVIRONMENT = """
    '''What the program says of itself.'''
    import os, pickle, sys
    class Thing:
        def __eq__(self, other):
            return type(other) is Thing
    main = sys.modules['__main__']
    print(__name__, __doc__, __package__, main.Thing is Thing, type(__builtins__).__name__)
    print(__file__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(globals().get('__annotations__'))
    print(sys.argv, sys.path[0])
    print(pickle.loads(pickle.dumps(Thing())) == Thing(), pickle.dumps(Thing()))
    print(sorted(name for name in globals() if name.startswith('__')))
    if __name__ == '__main__':
        print('main', file=sys.stderr)
"""

ENDINGS = {
    "number": "import sys; sys.exit(3)",
    "large number": "import sys; sys.exit(256 + 7)",
    "negative number": "import sys; sys.exit(-1)",
    "text": "import sys; print('out'); sys.exit('a last word')",
    "nothing": "import sys; sys.exit()",
    "zero": "raise SystemExit(0)",
    "object": "raise SystemExit([1, 2])",
    "status that cannot be read": (
        "class Exit(SystemExit):\n    @property\n    def code(self):\n        raise ValueError(2)\n"
        "raise Exit('what was asked for')"
    ),
    "text that cannot be printed": (
        "class Text:\n    def __str__(self):\n        raise ValueError(1)\nraise SystemExit(Text())"
    ),
    "text without standard error": "import sys\nsys.stderr = None\nsys.exit('a last word')",
    "error": "def f():\n    raise ValueError('x')\nf()",
    "error with a cause": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(2) from e",
    "error with a context": "try:\n    1 / 0\nexcept Exception:\n    [][1]",
    "group of errors": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax error": "def f(:\n    pass",
    "syntax error in another module": "import broken",
    "missing module": "import no_such_module",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print(a[:2])\n1 / 0",
    "broken excepthook": (
        "import sys\ndef hook(*a):\n    raise TypeError(1)\nsys.excepthook = hook\n1 / 0"
    ),
    "exit functions": "import atexit\natexit.register(print, 'bye')\nprint('end')",
    "excepthook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(6)\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "signal": (
        "import os, signal\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "print('no')"
    ),
    "own handler": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(5))\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    ),
    "interrupting signal": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('no')",
    "thread": (
        "import threading, time\ndef f():\n    time.sleep(0.1)\n    print('thread')\n"
        "threading.Thread(target=f).start()\nprint('end')"
    ),
    "error in a thread": (
        "import threading\ndef f():\n    raise ValueError('x')\n"
        "threading.Thread(target=f, name='worker').start()"
    ),
    "idle pool": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "print(pool.submit(int, '4').result())"
    ),
    "forked child": (
        "import os, sys\npid = os.fork()\nif pid:\n    print(os.waitpid(pid, 0)[1])\nelse:\n"
        "    sys.exit(3)"
    ),
    "closed stdout": "import sys\nsys.stdout.close()",
    "closed stderr": "import sys\nsys.stderr.close()\nsys.exit(2)",
    "standard input": "print(input())",
}


NO_TOOL = "amanda: no tool was given: try -t summary; amanda tools lists all\n"


def without_summary(text: str) -> str:
    """What the program itself has printed."""
    head, _, _ = text.partition("amanda: ")
    return head


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_without_us(
    ending: str, python: Command, amanda: Command, script: Script
) -> None:
    """Output, errors, tracebacks and the exit status are those of the program alone."""
    script("def f(:", "broken.py")
    path = str(script(ENDINGS[ending]))
    alone, under = python(path), amanda("run", path)
    assert under.returncode == alone.returncode
    assert without_summary(under.stdout) == alone.stdout
    assert without_summary(under.stderr.removeprefix(NO_TOOL)) == alone.stderr


def test_a_forked_child_has_the_status_of_its_own(amanda: Command, script: Script) -> None:
    """A child runs without the tools, and whether one of them had a driver is not its concern."""
    path = script(
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid:\n"
        "    print('child', os.waitpid(pid, 0)[1], flush=True)\n"
        "else:\n"
        "    sys.exit(0)\n"
    )
    run = amanda("run", "-t", "count", str(path))
    assert run.stdout.startswith("child 0\n")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("how", ["text", "input"])
def test_a_program_without_a_file_finds_the_world_as_without_us(
    how: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """``-c`` and ``-`` are those of Python: names, arguments, path, tracebacks, input."""
    text = (
        "import sys\n"
        "print(__name__, globals().get('__file__'), __spec__, __loader__, __package__)\n"
        "print(sys.argv, repr(sys.path[0]), sorted(globals()))\n"
        "print(repr(sys.stdin.read()))\n"
        "def f():\n    raise ValueError('x')\nf()\n"
    )
    words = ["-c", text] if how == "text" else ["-"]
    alone, under = (
        subprocess.run(
            [sys.executable, *command, *words, "-t", "x", "--"],
            cwd=tmp_path,
            env=environment,
            input="data" if how == "text" else text,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        for command in ([], ["-m", "amanda", "run"])
    )
    assert "ValueError: x" in alone.stderr
    assert without_summary(under.stdout) == alone.stdout
    assert (under.stderr, under.returncode) == (NO_TOOL + alone.stderr, alone.returncode)


@pytest.mark.parametrize(
    "text",
    ["\n  x = 1\n  if x:\n      print(x)\n  1 / 0\n", "x = 1\n1 / 0", "  x = 1", "def f(:"],
    ids=["indented", "not indented", "one line", "error"],
)
def test_the_text_of_a_program_is_read_as_by_python(
    text: str, python: Command, amanda: Command
) -> None:
    """Python 3.13 shows its lines in tracebacks, and 3.14 takes it indented."""
    alone, under = python("-c", text), amanda("run", "-c", text)
    assert without_summary(under.stdout) == alone.stdout
    assert (under.stderr, under.returncode) == (NO_TOOL + alone.stderr, alone.returncode)


@pytest.mark.parametrize("how", ["script", "bytecode", "module", "package", "folder", "archive"])
def test_a_program_finds_the_world_as_without_us(
    how: str, python: Command, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """``__main__``, ``sys.argv``, ``sys.path`` and pickles are those of the program alone."""
    text = "\n".join(line[4:] for line in ENVIRONMENT.splitlines())
    words = {
        "script": ["sub/program.py"],
        "bytecode": ["program.pyc"],
        "module": ["-m", "sub.program"],
        "package": ["-m", "sub"],
        "folder": ["sub"],
        "archive": ["sub.zip"],
    }[how]
    source = script(text, "sub/program.py")
    py_compile.compile(str(source), str(tmp_path / "program.pyc"))
    main = script(text, "sub/__main__.py")
    with zipfile.ZipFile(tmp_path / "sub.zip", "w") as archive:
        archive.write(main, "__main__.py")
    alone = python(*words, "-o", "--help", "-m", "x")
    under = amanda("run", "--", *words, "-o", "--help", "-m", "x")
    assert "main" in alone.stderr
    assert without_summary(under.stdout) == alone.stdout
    assert (under.stderr, under.returncode) == (NO_TOOL + alone.stderr, alone.returncode)


@pytest.mark.parametrize(
    "path",
    [
        "./program.py",
        "sub/../program.py",
        "sub//program.py",
        "{here}//./program.py",
        "./program.pyc",
        "./sub",
        "sub/",
        "sub/.",
        "./sub.zip",
    ],
)
def test_the_path_of_a_program_stays_as_it_was_given(
    path: str, python: Command, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """Python leaves dots and double slashes in ``__file__``, tracebacks and ``sys.path``."""
    text = "import sys\nprint(__file__, sys.argv, sys.path[0])\nraise ValueError\n"
    for name in ("program.py", "sub/program.py", "sub/__main__.py"):
        source = script(text, name)
    py_compile.compile(str(source), str(tmp_path / "program.pyc"))
    with zipfile.ZipFile(tmp_path / "sub.zip", "w") as archive:
        archive.write(source, "__main__.py")
    path = path.format(here=tmp_path)
    alone, under = python(path), amanda("run", path)
    assert path in alone.stdout
    assert without_summary(under.stdout) == alone.stdout
    # Python runs folders and archives by its module runpy, which amanda run does without.
    lines = alone.stderr.splitlines(keepends=True)
    said = "".join(line for line in lines if "<frozen runpy>" not in line)
    assert (under.stderr, under.returncode) == (NO_TOOL + said, alone.returncode)


def test_a_module_needs_no_double_dash(amanda: Command, script: Script) -> None:
    """Without ``--`` the program begins at ``-m`` or at the first word."""
    script("import sys; print(sys.argv[1:])")
    for words in (["-m", "program", "-t", "x"], ["program.py", "-t", "x"]):
        assert amanda("run", *words).stdout.startswith("['-t', 'x']\n")
    script("print('ran')", "sub/py.py")
    assert amanda("run", "-m", "sub.py").stdout.startswith("ran")


def test_processes_that_import_main_anew_find_it(
    python: Command, amanda: Command, script: Script
) -> None:
    """A spawned process gets the program's own ``__main__``, and runs vanilla."""
    path = script(
        "import multiprocessing as mp, sys\n"
        "class Thing: pass\n"
        "def f(thing):\n"
        "    return type(thing).__qualname__, 'amanda.cli.run' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(f, [Thing()]))\n"
    )
    alone, under = python(str(path)), amanda("run", str(path))
    assert alone.stdout == "('Thing', False)\n"
    assert (without_summary(under.stdout), under.stderr) == (alone.stdout, NO_TOOL)


@pytest.mark.parametrize("words", [["-m", "nothing_here"], ["-m", "os.nothing"], ["-m", "xml"]])
def test_a_module_that_cannot_be_run_is_an_error(words: list[str], amanda: Command) -> None:
    """The error names the module, the exit status is Python's, and no table shows zeros."""
    run = amanda("run", "-t", "count", *words)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("amanda: error: No module named ")


def test_unsafe_path_is_left_out_if_python_is_told_so(python: Command, script: Script) -> None:
    """With ``-P`` the program's folder is not importable, as in Python."""
    path = str(script("import sys; print(sys.path)"))
    alone, under = python("-P", path), python("-P", "-m", "amanda", "run", path)
    assert without_summary(under.stdout) == alone.stdout


def test_the_word_python_before_a_program_is_left_out(amanda: Command, script: Script) -> None:
    """It runs in the Python of the command; options of Python, or another Python, are an error."""
    script("import sys; print(sys.argv)")
    script("print('module')", "module.py")
    own = Path(sys.executable).parent
    for word in ("python", sys.executable, str(own / "python3")):
        run = amanda("run", word, "program.py", "-x", PATH=str(own))
        assert run.stdout.startswith("['program.py', '-x']"), run.stderr
    assert amanda("run", "--", "python", "-m", "module", PATH=str(own)).stdout.startswith("module")
    for words in (["python", "-u", "program.py"], ["/usr/bin/python3", "program.py"]):
        run = amanda("run", *words, PATH=str(own))
        assert (run.returncode, run.stdout) == (2, "")
        assert f"leave {words[0]!r} out" in run.stderr
    script("print('mine')", "python")
    assert amanda("run", "python").stdout.startswith("mine")


def test_a_run_without_a_tool_says_so(amanda: Command, script: Script) -> None:
    """Before the program begins, which may take long."""
    run = amanda("run", str(script("import sys\nprint('program', file=sys.stderr)")))
    assert run.stderr == f"{NO_TOOL}program\n"
