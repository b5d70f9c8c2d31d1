"""Files of results and files that users name: complete files or none, checks of what is read.

``write_json(folder / "count.json", result)`` writes plain data; :func:`replaced` opens any other
file in the same way. ``read_json(path)`` reads JSON that anybody may have written,
``read_result(path)`` what ``write_json`` has written of a tool.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from amanda.errors import FileError
from amanda.python.nested import converted

_CLOSED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""The file is not a link, and is closed in programs that this one starts."""

LARGEST_TEXT = 4_000_000_000
"""Bytes of a text file that is read; more is refused before anything of it is in memory."""

ERRORS = "errors.txt"
"""What a run of a sweep has printed as errors, in its folder."""

_RESULT = re.compile(r"(?P<stem>.+?)(-rank(?P<rank>[0-9]{1,9}))?(?P<rest>(\.timeline)?\.json)")


class TemporaryFolder:
    """A folder that is removed with this object or when the process ends, unless it is killed.

    A forked child does not remove it.

    Args:
        use: a part of its name, ``amanda-<use>-*``.

    Attributes:
        path: path of the folder.
        remove: removes the folder; harmless when called twice.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, use: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"amanda-{use}-"))
        self.remove = weakref.finalize(self, _remove_folder, self.path, os.getpid())
        _FOLDERS.add(self)


_FOLDERS = weakref.WeakSet[TemporaryFolder]()


def remove_temporary_folders() -> None:
    """Remove all temporary folders; called when a run has written its results."""
    for folder in list(_FOLDERS):
        folder.remove()


def _remove_folder(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON so that the file is either complete or not there.

    Args:
        path: the file, which is replaced if it exists.
        data: the data. Values for which JSON has no form, infinities and NaN included, are written
            as text, sets as lists.

    Raises:
        OSError: the file cannot be written; an earlier one is as it was.
    """
    try:
        text = json.dumps(data, indent=1, allow_nan=False, default=_json_form)
    except (TypeError, ValueError):
        # json calls the hook neither for keys that are not text, nor for NaN, nor for cycles.
        text = json.dumps(plain_data(data), indent=1, allow_nan=False)
    with replaced(path) as file:
        file.write(text)


@contextlib.contextmanager
def replaced(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file for writing text or bytes that replaces `path` when the with-block ends.

    If the block raises, nothing of it is left, and an earlier file is as it was. A symbolic link
    at `path` is replaced, not followed. Characters that UTF-8 lacks (lone surrogates, which stand
    for the undecodable bytes of a file name) are written out as in a Python string.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, partial = _create_beside(path)
    # Through the descriptor: where others may write, the name might lead elsewhere by now.
    with _put_in_place(partial, path), _open(descriptor, binary) as file:
        yield file


def _open(descriptor: int, binary: bool) -> IO[Any]:
    if binary:
        return os.fdopen(descriptor, "wb")
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="")


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Create an empty file in the folder of `path`, which it replaces when the with-block ends.

    For writers that take a path; :func:`replaced` opens the file. If the block raises, nothing of
    it is left, and an earlier file is as it was.

    Raises:
        OSError: the file cannot be created, or `path` cannot be replaced.
    """
    descriptor, partial = _create_beside(path)
    os.close(descriptor)
    with _put_in_place(partial, path):
        yield partial


def check_place(path: Path, names: Sequence[str] = ()) -> None:
    """Check that nothing is at a path but what :func:`put_beside` may replace.

    Args:
        path: the path.
        names: of a folder that will be put there, what such a folder can hold, first what it always
            holds. An earlier one, or an empty folder, can be replaced; none for a file.

    Raises:
        OSError: there is another folder, or a file in place of a folder.
    """
    found = {each.name for each in path.iterdir()} if path.is_dir() else set()
    if found and not (found <= {*names} and names[0] in found):
        raise FileExistsError(errno.EEXIST, "another folder is there", os.fspath(path))
    if names and path.is_file():
        raise FileExistsError(errno.EEXIST, "a file is there", os.fspath(path))


@contextlib.contextmanager
def put_beside(path: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """Give a path of the same name in a new folder beside `path`, which the file or folder that is
    made there replaces when the with-block ends.

    If the block raises, nothing of it is left, and an earlier file or folder is as it was.

    Args:
        path: the file or folder.
        names: as for :func:`check_place`.

    Raises:
        OSError: it cannot be made, or what is there may not be replaced.
    """
    check_place(path, names)
    try:
        held = tempfile.TemporaryDirectory(prefix=".amanda-", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    with held as folder:
        partial, earlier = Path(folder, path.name), Path(folder, f"{path.name}.earlier")
        yield partial
        if path.is_dir():
            os.replace(path, earlier)
        try:
            os.replace(partial, path)
        except OSError:
            if earlier.is_dir():
                os.replace(earlier, path)
            raise


def _create_beside(path: Path) -> tuple[int, Path]:
    """Create a file in the folder of `path`, which os.replace() needs; its descriptor and path."""
    # The name is random, and the file must be new: others with access to the folder cannot have put
    # a file or a link there.
    partial = path.with_name(f".amanda-{secrets.token_hex(8)}.partial")
    try:
        return os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED, 0o666), partial
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def _put_in_place(partial: Path, path: Path) -> Iterator[None]:
    """Rename `partial` to `path` after the with-block, or remove it if something fails."""
    try:
        yield
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        # An error of a copy also names the source: our own file is then the second one.
        if (
            isinstance(error, OSError)
            and error.errno
            and (error.filename in (None, str(partial)) or error.filename2 == str(partial))
        ):
            # The error names the user's file.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _json_form(value: Any) -> Any:
    """The form of a value that the module json does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (set, frozenset)) else str(value)


def plain_data(value: Any) -> Any:
    """Convert a value to types that JSON has.

    Containers become dictionaries and lists; infinities, NaN and values of other types become text.
    """
    return converted(value, _json_leaf, (list, tuple, set, frozenset))


def _json_leaf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that a user has named for reading bytes.

    Raises:
        FileError: it is missing, may not be read, or is a folder, a pipe or a device, from which
            one could read for ever.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        # ValueError: the path holds a null character.
        raise FileError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        mode = _mode_of(descriptor, path)
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise FileError(f"{path} cannot be read: it is {what}, not a file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _mode_of(descriptor: int, path: str | os.PathLike[str]) -> int:
    try:
        return os.fstat(descriptor).st_mode
    except OSError as error:
        raise FileError(f"{path} cannot be read: {_reason(error)}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file that a user has named.

    Raises:
        FileError: it cannot be read, is too large, or is not text in UTF-8.
    """
    try:
        with opened(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > LARGEST_TEXT:
                raise FileError(f"{path} cannot be read: it has {size:,} bytes, too many for text")
            return file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read: it is not text ({error.reason})") from error
    except (OSError, MemoryError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read: {_reason(error)}") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a file of JSON that a user has named.

    Raises:
        FileError: it cannot be read, or is not JSON; NaN and infinities, which JSON lacks,
            included.
    """
    return parse_json(read_text(path), path)


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """Parse JSON from a file that a user has named.

    Raises:
        FileError: it is not JSON; NaN and infinities, which JSON lacks, included.
    """
    if not text.strip():
        raise FileError(f"{path} cannot be read: it is empty")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FileError(f"{path} cannot be read: it is not JSON ({_reason(error)})") from error


def result_files(folder: Path) -> Iterator[tuple[str, int | None, Path]]:
    """Yield the name without the rank, the rank if it has one, and the path of each JSON file."""
    for path in sorted(folder.glob("*.json")):
        if found := _RESULT.fullmatch(path.name):
            rank = found["rank"]
            yield found["stem"] + found["rest"], None if rank is None else int(rank), path


def sweep_runs(folder: Path) -> list[Path]:
    """The folders of the runs of a sweep, ``flops_by=op/flops_batch=8``."""
    found = []
    for path in sorted(folder.glob("*=*")):
        found += [path] if (path / ERRORS).exists() else sweep_runs(path)
    return found


def read_result(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Read a result as ``ReportingTool.result()`` gives it; None if the JSON is something else.

    Raises:
        FileError: it cannot be read, or is not JSON.
    """
    result = read_json(path)
    kinds = {"tool": str, "schema": int, "summary": dict, "namespaces": list, "ops": list}
    is_result = (
        isinstance(result, dict)
        and all(isinstance(result.get(key), kind) for key, kind in kinds.items())
        and all(isinstance(name, str) for name in result["namespaces"])
        and all(isinstance(row, dict) for row in result["ops"])
    )
    return result if is_result else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
