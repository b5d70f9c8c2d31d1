"""Files of results and files that users name: whole or not at all, and one clear error."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from amanda.engine.notes import note
from amanda.errors import AmandaError, AmandaWarning, CoverageWarning, FileError, SelectionError
from amanda.files import new_beside, put_beside, read_json, read_text, replaced, write_json
from amanda.python.text import printable
from amanda.results import Table
from amanda.tools.reporting import plain_text


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """What fails while a file is written leaves the earlier file, and nothing beside it."""
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ZeroDivisionError), replaced(path) as file:
        file.write(f"half {1 / 0}")
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """The error has the name that the user knows, not that of the file being written."""
    path = tmp_path / "result.json"
    with pytest.raises(OSError, match=r"No space left on device: '.*result\.json'"), replaced(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError, match=r"nowhere/result\.json"):
        write_json(tmp_path / "nowhere" / "result.json", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"'[^']*folder'$"):
        write_json(tmp_path / "folder", {})


def test_a_link_in_the_place_of_a_result_is_replaced(tmp_path: Path) -> None:
    """Neither the link is followed, nor one in place of the file being written."""
    other = tmp_path / "other"
    other.write_text("precious")
    path = tmp_path / "result.json"
    path.symlink_to(other)
    for planted in (".result.json.partial", "result.json.partial", ".result.json.tmp"):
        (tmp_path / planted).symlink_to(other)
    write_json(path, {"a": 1})
    with new_beside(path) as partial:
        partial.write_text("{}")
    assert (other.read_text(), path.is_symlink(), path.read_text()) == ("precious", False, "{}")


def test_the_name_of_a_file_being_written_cannot_be_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are random; a file or a link of that name is an error, and is not followed."""
    path, names = tmp_path / "result.json", set()
    for _ in range(8):
        with new_beside(path) as partial:
            names.add(partial.name)
    assert len(names) == 8
    monkeypatch.setattr("secrets.token_hex", lambda count: "known")
    other = tmp_path / "other"
    (tmp_path / ".amanda-known.partial").symlink_to(other)
    with pytest.raises(FileExistsError):
        write_json(path, {})
    assert not other.exists()


def put(path: Path) -> None:
    """Put a folder there that has a file."""
    with put_beside(path, ("mark", "data")) as partial:
        partial.mkdir()
        (partial / "mark").write_text("new")


def test_a_folder_is_replaced_by_one_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, or a file, stays, and so does an earlier one that cannot be replaced."""
    path = tmp_path / "result"
    for _ in range(2):
        put(path)
        assert (path / "mark").read_text() == "new"
        (path / "data").touch()
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if (Path(source) / "mark").exists() and Path(source).parent != tmp_path:
            monkeypatch.setattr("os.replace", replace)
            raise OSError(errno.EBUSY, "busy")
        replace(source, target)

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(OSError, match="busy"):
        put(path)
    assert sorted(os.listdir(path)) == ["data", "mark"]
    (path / "precious").touch()
    with pytest.raises(FileExistsError, match="another folder is there"):
        put(path)
    with pytest.raises(FileExistsError, match="a file is there"):
        put(path / "precious")
    assert sorted(os.listdir(path)) == ["data", "mark", "precious"]
    assert os.listdir(tmp_path) == ["result"]


def test_results_have_the_permissions_of_other_files(tmp_path: Path) -> None:
    """They are those that the program's own new files would have."""
    plain, path = tmp_path / "plain", tmp_path / "result.json"
    plain.touch()
    write_json(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_data_that_holds_itself_is_written(tmp_path: Path) -> None:
    """There is an ellipsis where it would begin anew; what is held twice is there twice."""
    row: dict[str, Any] = {"ops": [1]}
    data: dict[str, Any] = {"first": row, "second": row}
    data["self"] = [data]
    write_json(tmp_path / "a.json", data)
    expected = {"first": {"ops": [1]}, "second": {"ops": [1]}, "self": ["..."]}
    assert read_json(tmp_path / "a.json") == expected


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    """JSON has them back; a text file has their numbers."""
    write_json(tmp_path / "a.json", {"a\udc80": "\udcff"})
    assert read_json(tmp_path / "a.json") == {"a\udc80": "\udcff"}
    with replaced(tmp_path / "a.txt") as file:
        file.write("a\udc80é")
    assert read_text(tmp_path / "a.txt") == r"a\udc80é"


def test_messages_hold_nothing_that_a_terminal_obeys() -> None:
    """Errors, warnings and notes, which name modules and files that may be called anything."""
    name = "a\n\x1b]0;x\x07\udc80"
    for kind in (AmandaError, FileError, SelectionError, AmandaWarning, CoverageWarning):
        assert str(kind(name)) == "a\n\\x1b]0;x\\x07\\udc80", kind
    error = ValueError("of the tool")
    note(error, "Tool.run", name)
    assert error.__notes__ == [r"amanda: raised in Tool.run at op a\n\x1b]0;x\x07\udc80"]


def test_text_for_a_terminal_has_no_commands() -> None:
    """Control characters, marks of direction and lone surrogates are shown, not sent."""
    assert printable("\x1b]0;x\x07\r\n\t\u202e\x9b\udc80") == (
        r"\x1b]0;x\x07\r\n\t\u202e\x9b\udc80"
    )
    assert printable("Modell é 模型 \\ ") == "Modell é 模型 \\ "
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    table = plain_text(Table("t\x1b", ("c\x1b",), [("v\x1b[2J",)]))
    assert "\x1b" not in table
    assert r"v\x1b[2J" in table


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"{", b'{"a": ', b"\x80\xff", b"NaN", b'{"a": Infinity}', b"[" * 100_000,
     b"1" * 10_000, b"PK\x03\x04", b'\xff\xfe{\x00}\x00'],
    ids=["empty", "blank", "cut", "cut in a pair", "bytes", "NaN", "inf", "deep", "long", "zip",
         "utf-16"],
)  # fmt: skip
def test_json_of_anybody_is_read_or_refused(content: bytes, tmp_path: Path) -> None:
    """One kind of error, which names the file."""
    path = tmp_path / "given.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"given\.json cannot be read: "):
        read_json(path)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for root, who may read everything; and one that cannot be read any further."""

    def refuse(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "given.json").write_text("{}")
    for failing in ("os.open", "os.fstat"):
        with monkeypatch.context() as patch:
            patch.setattr(failing, refuse)
            with pytest.raises(FileError, match=r"given\.json cannot be read: Permission denied"):
                read_json(tmp_path / "given.json")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A folder, a pipe, a device, a file that is missing, may not be read, or is too large."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "secret").chmod(0)
    names = ["pipe", "large", "missing", "", "/dev/zero", "a\0b"]
    # Root may read everything.
    names += ["secret"] if os.geteuid() else []
    for name in names:
        with pytest.raises(FileError, match="cannot be read"):
            read_json(tmp_path / name)


def test_a_file_error_is_each_error_that_callers_expect() -> None:
    """A missing file is an OSError elsewhere, a damaged one a ValueError."""
    assert issubclass(FileError, AmandaError)
    assert issubclass(FileError, OSError)
    assert issubclass(FileError, ValueError)
    assert str(FileError("a.npz cannot be read")) == "a.npz cannot be read"
