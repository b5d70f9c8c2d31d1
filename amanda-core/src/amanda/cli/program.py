"""Runs a script or module in this process as Python itself would.

``parse(["train.py", "--epochs", "3"]).run()`` is ``python train.py --epochs 3``.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda.python._internals import register_source

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?t?)?(\.exe)?")
"""File names of Python itself."""


class ProgramError(Exception):
    """The program cannot be found; nothing of it has run.

    Attributes:
        status: the exit status of Python in this case.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@attrs.frozen
class GivenProgram:
    """A program and its arguments.

    Attributes:
        target: path of a script, folder or archive, name of a module, or the program itself.
        arguments: its own arguments.
        kind: what `target` is; with ``"input"`` the program is read from standard input.
    """

    target: str
    arguments: tuple[str, ...]
    kind: Literal["file", "module", "text", "input"] = "file"

    def check(self) -> None:
        """Check that a script can be opened; a module is looked for when it is run.

        Raises:
            ProgramError: it cannot, or it is not a program.
        """
        if self.kind == "module" and (meant := self._meant_by_path()):
            raise ProgramError(f"No module named {self.target}; did you mean {meant}?", 2)
        if self.kind == "input" and sys.stdin is None:
            raise ProgramError("standard input is closed, and no program can be read from it", 2)
        if self.kind != "file":
            return
        try:
            if not Path(self.target).is_dir():
                io.open_code(str(Path(self.target).absolute())).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProgramError(f"can't open file {self.target!r}: {reason}", 2) from None
        if self.target.endswith(".ipynb"):
            raise ProgramError(
                f"{self.target} is a notebook; write %load_ext amanda and %%amanda -t ... into its "
                f"cells, or make a script of it: jupyter nbconvert --to script {self.target}",
                2,
            )

    def _meant_by_path(self) -> str:
        """The right form of ``-m train.py`` and ``-m folder/train.py``; "" of a module's name."""
        path = Path(self.target)
        if len(path.parts) == 1 and path.suffix == ".py":
            path = Path(*path.stem.split(".")).with_suffix(".py")
        elif len(path.parts) == 1:
            return ""
        if not path.is_file():
            return f"{self.target} without -m" if len(path.parts) > 1 else ""
        name = ".".join(path.with_suffix("").parts)
        return f"-m {name}" if path.suffix == ".py" and not path.is_absolute() else f"{path}"

    def run(self) -> None:
        """Run it as the module ``__main__``.

        The module stays in ``sys.modules``: threads, exit functions and pickles refer to it.

        Raises:
            ProgramError: there is no such module, or it has no code to run.
            BaseException: the program raises it.
        """
        if self.kind == "module":
            code, module = self._from_module()
        elif self.kind != "file":
            code, module = self._from_text()
        elif importer := self._importer():
            code, module = self._from_importer(importer)
        else:
            code, module = self._from_file()
        exec(code, vars(module))

    def _path(self) -> str:
        """The path of a script, folder or archive, made absolute as Python does it: ``/a/./b.py``.

        Not :meth:`Path.absolute`, which leaves out dots and double slashes: programs and tracebacks
        show ``__file__``.
        """
        if Path(self.target).is_absolute():
            return self.target  # wherever the current folder is: it may be gone
        return os.path.join(Path.cwd(), self.target)

    def _from_file(self) -> tuple[Any, types.ModuleType]:
        path = self._path()
        self._begin(self.target, str(Path(path).resolve().parent))
        if path.endswith(".pyc"):
            bytecode = SourcelessFileLoader("__main__", path)
            return bytecode.get_code("__main__"), _create_main_module(None, bytecode, path)
        module = _create_main_module(None, SourceFileLoader("__main__", path), path)
        with io.open_code(path) as file:
            source = file.read()
        try:
            # dont_inherit: the `from __future__` imports of this module are not the program's.
            return compile(source, path, "exec", dont_inherit=True), module
        except (SyntaxError, ValueError):
            if reason := _no_python(source):
                raise ProgramError(f"{self.target} is not a Python script: {reason}", 2) from None
            raise

    def _from_text(self) -> tuple[Any, types.ModuleType]:
        is_input = self.kind == "input"
        name, file = ("-", "<stdin>") if is_input else ("-c", "<string>")
        self._begin(name, "")
        module = _create_main_module(None, BuiltinImporter, file)
        if is_input:
            return compile(sys.stdin.buffer.read(), file, "exec", dont_inherit=True), module
        del module.__file__, module.__cached__
        source = self.target
        if sys.version_info >= (3, 14):  # which takes a text that is indented
            source = textwrap.dedent(source)
        code = compile(source, file, "exec", dont_inherit=True)
        register_source(code, source, file)
        return code, module

    def _importer(self) -> Any:
        """The path entry finder of a folder or an archive; None for a plain file."""
        importer = pkgutil.get_importer(self._path())
        return importer if hasattr(importer, "find_spec") else None

    def _from_importer(self, importer: Any) -> tuple[Any, types.ModuleType]:
        self._begin(self.target, self._path(), is_searched=True)
        spec = importer.find_spec("__main__")
        if spec is None:
            raise ProgramError(f"can't find '__main__' module in {self.target!r}", 1)
        return _load(spec)

    def _from_module(self) -> tuple[Any, types.ModuleType]:
        # As in Python, sys.argv[0] is "-m" while the module is looked for, which may run code of
        # its parent packages, and the path of its file afterwards.
        self._begin("-m", str(Path.cwd()))
        spec = self._spec(self.target)
        if spec.submodule_search_locations is not None:
            spec = self._spec(f"{self.target}.__main__")
        code, module = _load(spec)
        sys.argv[0] = str(spec.origin)
        return code, module

    def _spec(self, name: str) -> ModuleSpec:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            # A parent package is missing; any other missing module is an error of the program.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            spec = None
        if spec is None or (spec.loader is None and not spec.submodule_search_locations):
            is_package = name == f"{self.target}.__main__"
            why = f"; {self.target} is a package, and cannot be run" if is_package else ""
            raise ProgramError(f"No module named {name}{why}", 1)
        return spec

    def _begin(self, name: str, folder: str, is_searched: bool = False) -> None:
        sys.argv[:] = [name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):
            # `python -m amanda` and the script `amanda` have put their own folder there.
            sys.path[0] = folder
        elif is_searched:
            sys.path.insert(0, folder)


def split(arguments: Sequence[str], with_value: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into options of ``amanda run`` and the program with its arguments.

    The program begins at the first argument that is not an option, at ``-m``, ``-c`` or ``-``, or
    after ``--``.

    Args:
        arguments: the arguments of ``amanda run``.
        with_value: the options of ``amanda run`` whose value is the next argument.
    """
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        if argument == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if argument.startswith("-m") or argument in ("-c", "-") or not argument.startswith("-"):
            break
        i += 2 if argument in with_value else 1
    return list(arguments[:i]), list(arguments[i:])


def parse(words: Sequence[str]) -> GivenProgram:
    """Parse the part of a command line that names the program.

    Raises:
        ProgramError: it is empty.
    """
    words = _without_interpreter(words)
    kind: Literal["file", "module", "text", "input"] = "file"
    if words and words[0].startswith("-m"):
        words = [words[0][2:], *words[1:]] if len(words[0]) > 2 else words[1:]
        kind = "module"
    elif words and words[0] == "-c":
        words, kind = words[1:], "text"
    elif words and words[0] == "-":
        kind = "input"
    if not words or not words[0]:
        after = {"module": "-m needs the name of a module", "text": "-c needs the program's text"}
        raise ProgramError(
            after.get(kind) or "no program is given: a script, or -m and a module", 2
        )
    return GivenProgram(words[0], tuple(words[1:]), kind)


def _without_interpreter(words: Sequence[str]) -> Sequence[str]:
    """Leave out the word ``python`` before a program: it runs in this process.

    Raises:
        ProgramError: options of Python follow it, or it is another Python.
    """
    if not words or not _INTERPRETER.fullmatch(Path(words[0]).name) or _is_script(words[0]):
        return words
    found = shutil.which(words[0])
    own = Path(sys.executable).parent
    is_own = found is None or Path(found).parent.absolute() == own.absolute()
    option = words[1] if len(words) > 1 else ""
    has_option = option.startswith("-") and option not in ("-c", "-") and option[:2] != "-m"
    if is_own and not has_option:
        return words[1:]
    reason = "to pass options to Python" if is_own else f"to run it in {found}"
    raise ProgramError(
        f"leave {words[0]!r} out: the program runs in this Python, {sys.executable}; {reason}: "
        f"{words[0]} ... -m amanda run ...",
        2,
    )


def _is_script(name: str) -> bool:
    """True if a file of this name exists and is not a binary program."""
    try:
        with open(name, "rb") as file:
            return b"\0" not in file.read(1000)
    except OSError:
        return False


def _no_python(source: bytes) -> str:
    """Why a file that does not compile is none of Python; "" if it may be one with an error."""
    first = source[:200].partition(b"\n")[0].decode(errors="replace")
    if b"\0" in source[:1000]:
        return "it is a binary file"
    if first.startswith("#!") and "python" not in first:
        return f"it begins with {first.strip()}; name the script that it starts"
    return ""


def _create_main_module(spec: ModuleSpec | None, loader: Any, file: str | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module).update(
        __builtins__=builtins,
        __cached__=spec.cached if spec is not None else None,
        __file__=file,
        __loader__=loader,
        __package__=spec.parent if spec is not None else None,
        __spec__=spec,
    )
    # From 3.14 on, modules have no __annotations__ before they are asked for (PEP 649).
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    return module


def _load(spec: ModuleSpec) -> tuple[Any, types.ModuleType]:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        raise ProgramError(f"No code object available for {spec.name}", 1)
    code = loader.get_code(spec.name)
    if code is None:
        raise ProgramError(f"No code object available for {spec.name}", 1)
    return code, _create_main_module(spec, loader, spec.origin)
