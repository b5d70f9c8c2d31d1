"""Files that users name: whatever is wrong with one, there is one clear error that names it.

A matrix: each tool that reads a file, and each kind of damage.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amanda.cli.merge import MergeError, merge
from amanda.errors import AmandaWarning, FileError
from amanda_tools._values.tensor_files import (
    original_name,
    read_tensors,
    stored_name,
    write_tensors,
)
from amanda_tools.diff import DiffTool, Recording
from amanda_tools.inject import InjectTool
from amanda_tools.inject.campaign import Trial, append_trial, read_trials
from amanda_tools.path import effective_paths
from amanda_tools.prune import PruneTool
from amanda_tools.prune import files as prune_files

HEADER = {"campaign": "amanda-inject", "options": {"seed": 1}, "elements": 5}


def make_masks(folder: Path) -> Path:
    masks = {"/linear:0": np.random.default_rng(0).random((8, 4)) > 0.5}
    return prune_files.write(folder / "given.safetensors", "masks", masks, method="magnitude")


def make_recording(folder: Path) -> Path:
    rows = []
    tensors = {}
    for step in range(2):
        key = f"/linear:0 output0 {step}"
        tensors[key] = np.ones((2, 3), np.float32)
        rows.append(
            {"id": "/linear:0", "type": "linear", "name": "linear", "module": "", "order": 0,
             "direction": "forward", "namespace": "pytorch/2.13/eager", "key": key,
             "file": "given.safetensors", "kind": "activations", "tensor": "output0",
             "step": step, "shape": [2, 3], "dtype": "float32"}
        )  # fmt: skip
    write_tensors(folder / "given.safetensors", tensors)
    (folder / "given.index.json").write_text(json.dumps({"tensors": rows}))
    return folder / "given.index.json"


def make_tensors(folder: Path) -> Path:
    return make_recording(folder).with_name("given.safetensors")


def make_paths(folder: Path) -> Path:
    mask = effective_paths.Mask.of((4, 5), np.array([1, 7]))
    op = effective_paths.OpPath(mask, None, None, 2, 100)
    path = effective_paths.Path(1, {"/linear:0": op}, {"x": mask})
    effective_paths.write(folder / "given.safetensors", {"class 1": path})
    return folder / "given.safetensors"


def make_campaign(folder: Path) -> Path:
    path = folder / "given.jsonl"
    read_trials(str(path), HEADER)
    fault = {"position": 1, "bit": 3, "before": 1.0, "after": float("inf")}
    for number in range(3):
        append_trial(str(path), Trial(number, "/linear:0", 0, "masked", [fault]))
    return path


def make_ranks(folder: Path) -> Path:
    for rank in range(2):
        result = {"tool": "flops", "schema": 1, "namespaces": ["n"], "summary": {"flops": 1},
                  "ops": [{"id": "/linear:0"}]}  # fmt: skip
        (folder / f"given-rank{rank}.json").write_text(json.dumps(result))
    return folder / "given-rank1.json"


def read_campaign(path: Path) -> Any:
    return read_trials(str(path), HEADER)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "prune masks": (make_masks, lambda path: PruneTool(masks=str(path))),
    "diff index": (make_recording, lambda path: DiffTool(reference=str(path))),
    "diff tensors": (make_tensors, lambda path: DiffTool(reference=str(path.parent / INDEX))),
    "path": (make_paths, effective_paths.read),
    "inject campaign": (make_campaign, read_campaign),
    "merge": (make_ranks, lambda path: merge(path.parent)),
}
INDEX = "given.index.json"


def npz(**members: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


class Harmful:
    """Reading it as a pickle creates a file."""

    def __reduce__(self) -> Any:
        return (open, ("harmful", "w"))


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "random": random.Random(1).randbytes(5000),
    "zeros": bytes(5000),
    "text": b"no file of ours\n",
    "json list": b"[1, 2]",
    "json string": b'"text"',
    "json null": b"null",
    "json nan": b"NaN",
    "wrong keys": b'{"a": 1}',
    "wrong types": b'{"tensors": {"a": 1}, "tool": 1, "summary": [], "ops": 3}\n',
    "wrong items": b'{"tensors": [1], "tool": "flops", "schema": 1, "summary": {}, "ops": [1]}\n',
    "deep json": b"[" * 100_000 + b"\n",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "zip": npz(a=np.ones(3)),
    "pickle": pickle.dumps(Harmful()),
    "npy": b"\x93NUMPY\x01\x00v\x00",
    "header of 2**60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "header without end": struct.pack("<Q", 8) + b'{"a":   ',
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_the_expected_file_is_one_clear_error(reader: str, tmp_path: Path) -> None:
    """Missing, a folder, unreadable, empty, of random bytes, of another format or other keys."""
    make, read = READERS[reader]
    path = make(tmp_path)
    read(path)
    for content in CONTENTS.values():
        path.write_bytes(content)
        with pytest.raises((FileError, MergeError), match="given"):
            read(path)
    path.unlink()
    if reader not in ("inject campaign", "merge"):
        # Of these two, a missing file is a new campaign, and no rank.
        with pytest.raises(FileError, match=r"given.*No such file") as missing:
            read(path)
        assert str(missing.value).count(path.name) == 1
    path.mkdir()
    with pytest.raises((FileError, MergeError), match=r"given.*(folder|0 recordings)"):
        read(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises((FileError, MergeError), match=r"given.*pipe"):
        read(path)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_ends_early_is_one_clear_error(reader: str, tmp_path: Path) -> None:
    """Wherever it ends; the lines of a campaign that are whole stay."""
    make, read = READERS[reader]
    path = make(tmp_path)
    content = path.read_bytes()
    places = {*range(1, len(content), max(1, len(content) // 24)), len(content) - 1}
    for place in sorted(places):
        path.write_bytes(content[:place])
        if reader == "inject campaign" and b"\n" in content[:place]:
            assert [t.number for t in read(path)] == list(range(content[:place].count(b"\n") - 1))
            continue
        with pytest.raises((FileError, MergeError), match="given"):
            read(path)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_with_changed_bytes_is_read_or_one_clear_error(reader: str, tmp_path: Path) -> None:
    """No byte of a file leads to another kind of error."""
    make, read = READERS[reader]
    path = make(tmp_path)
    content, source = path.read_bytes(), random.Random(reader)
    refused = unnamed = 0
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(source.choice((1, 1, 3, 20))):
            changed[source.randrange(len(changed))] = source.randrange(256)
        path.write_bytes(bytes(changed))
        try:
            read(path)
        except (FileError, MergeError) as error:
            refused += "given" in str(error)
            unnamed += "given" not in str(error)
    assert (refused > 20, unnamed) == (True, 0)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


STRANGE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        2**64,
        10**400,
        1e308,
        0.5,
        "",
        "\ud800",
        "\x1b[2J",
        "../other",
        "a" * 10_000,
    ),
    *([], {}, [None], [[1.5]], {"": None}, nested(200)),
)
"""Values of JSON that are not expected where they stand."""


def strangely_changed(value: Any, source: random.Random) -> Any:
    """A copy of a value of JSON in which one value, at any depth, is another or is missing."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [key for key in keys if isinstance(value[key], (dict, list)) and value[key]]
    changed = dict(value) if isinstance(value, dict) else list(value)
    if inner and source.random() < 0.7:
        key = source.choice(inner)
        changed[key] = strangely_changed(value[key], source)
        return changed
    key = source.choice(keys)
    if source.random() < 0.2:
        del changed[key]
    else:
        changed[key] = source.choice(STRANGE)
    return changed


@pytest.mark.parametrize("reader", ["diff index", "inject campaign", "merge"])
def test_a_file_with_strange_values_is_read_or_one_clear_error(reader: str, tmp_path: Path) -> None:
    """Values of any type, size and depth, wherever they stand, lead to no other kind of error."""
    make, read = READERS[reader]
    path = make(tmp_path)
    lines, source = path.read_text().splitlines(), random.Random(reader)
    if reader == "merge":
        result = {**json.loads(lines[0]), "summary": {"flops": 1.5, "steps": {"a": [1]}}}
        (tmp_path / "given-rank0.json").write_text(json.dumps(result))
    messages = []
    for _ in range(200):
        number = source.randrange(len(lines))
        changed = strangely_changed(json.loads(lines[number]), source)
        path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :], ""]))
        try:
            read(path)
        except (FileError, MergeError) as error:
            messages.append(str(error))
    assert 20 < len(messages) < 200
    assert [text for text in messages if "given" not in text or len(text) > 1500] == []


def test_what_a_message_quotes_of_a_file_is_short(tmp_path: Path) -> None:
    """A name in a damaged file may have megabytes; what and which file is wrong is said."""
    index = make_recording(tmp_path)
    content = json.loads(index.read_text())
    content["tensors"][0]["key"] = "a" * 1_000_000
    index.write_text(json.dumps(content))
    with pytest.raises(
        FileError, match=r"given\.index\.json is not a recording.*another rec"
    ) as found:
        Recording.read(index)
    assert len(str(found.value)) < 1500


def test_masks_are_of_booleans_and_gates_of_finite_numbers(tmp_path: Path) -> None:
    """Other elements are an error at once, and not a wrong result."""
    path = tmp_path / "given.safetensors"
    for elements in (np.ones((2, 2)), np.full((2, 2), np.nan)):
        prune_files.write(path, "masks", {"/linear:0": elements})
        with pytest.raises(FileError, match=r"given\.safetensors: the mask /linear:0 is of"):
            PruneTool(masks=str(path))
    for elements in (np.array([1.0, np.inf]), np.array([np.nan]), np.array([1])):
        prune_files.write(path, "gates", {"/linear:0|scale": elements})
        with pytest.raises(FileError, match=r"scale is not of finite numbers"):
            PruneTool(method="channel").load(path)


def test_a_name_in_a_file_is_no_path(tmp_path: Path) -> None:
    """Neither of a tensor nor of an index: nothing outside of its folder is read or written."""
    other = tmp_path / "other"
    other.mkdir()
    make_recording(other)
    folder = tmp_path / "folder"
    folder.mkdir()
    index = make_recording(folder)
    for name in ("../other/given.safetensors", str(other / "given.safetensors"), "..", "", "."):
        content = json.loads(index.read_text())
        for row in content["tensors"]:
            row["file"] = name
        index.write_text(json.dumps(content))
        with pytest.raises(FileError, match=r"given\.index\.json.*'file'"):
            Recording.read(index)
    masks = {"../../outside": np.ones(2, bool), "/absolute": np.ones(2, bool)}
    path = prune_files.write(tmp_path / "given.safetensors", "masks", masks)
    assert prune_files.read(path, "masks")[0].keys() == masks.keys()
    assert sorted(os.listdir(tmp_path)) == ["folder", "given.safetensors", "other"]


def test_a_recording_whose_tensors_are_of_another_is_an_error(tmp_path: Path) -> None:
    """The index and its files belong together."""
    index = make_recording(tmp_path)
    write_tensors(tmp_path / "given.safetensors", {"x": np.ones(2)})
    with pytest.raises(FileError, match=r"given\.safetensors has no tensor /linear:0 output0 0"):
        DiffTool(reference=str(index))


def test_a_recording_is_of_one_run(tmp_path: Path) -> None:
    """Two runs may write into one folder: tensors of the one are not those of the other's index."""
    index = make_recording(tmp_path)
    file = tmp_path / "given.safetensors"
    tensors = {
        row["key"]: np.ones((2, 3), np.float32) for row in json.loads(index.read_text())["tensors"]
    }
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"recording": "one", **content}))
    for about, is_fine in (
        ({"recording": "one"}, True),
        ({"recording": "other"}, False),
        (None, False),
    ):
        write_tensors(file, tensors, about)
        if is_fine:
            assert len(Recording.read(index).records) == 2
            continue
        with pytest.raises(FileError, match=r"given\.safetensors is of another recording"):
            Recording.read(index)
    index.write_text(json.dumps({"recording": 1, **content}))
    with pytest.raises(FileError, match="'recording' is not text"):
        Recording.read(index)


def test_a_campaign_of_other_trials_is_an_error(tmp_path: Path) -> None:
    """A line that is missing, twice there or wrong is named; nothing of the file changes."""
    path = make_campaign(tmp_path)
    lines = path.read_text().splitlines()
    for wrong, said in (
        ([lines[0], lines[2]], "line 2, is not the trial 0"),
        ([*lines[:2], lines[1]], "line 3, is not the trial 1"),
        ([lines[0], lines[1].replace("masked", "fine")], "line 2"),
        ([lines[0], lines[1].replace('"execution": 0', '"execution": NaN')], "line 2, cannot"),
        ([json.dumps({**HEADER, "elements": 6}), *lines[1:]], "another campaign|other options"),
    ):
        path.write_text("\n".join(wrong) + "\n")
        with pytest.raises(FileError, match=f"given.*({said})"):
            read_campaign(path)
        assert path.read_text() == "\n".join(wrong) + "\n"


def test_options_that_are_no_numbers_belong_to_a_campaign(tmp_path: Path) -> None:
    """A campaign with value=nan is resumed like any other."""
    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    for trials in (2, 4):
        tool = InjectTool(fault="value", value=float("nan"))
        found = tool.campaign(lambda: model(x).detach(), trials, path=str(tmp_path / "t.jsonl"))
        assert len(found.trials) == trials
    json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)


def test_a_campaign_goes_on_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full is a warning; what the file has can be resumed."""
    model, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
    path = tmp_path / "t.jsonl"

    def full(where: str, trial: Trial) -> None:
        if trial.number == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append_trial(where, trial)

    with monkeypatch.context() as patch:
        patch.setattr("amanda_tools.inject.tool.append_trial", full)
        with pytest.warns(AmandaWarning, match=r"t\.jsonl cannot be written: No space left"):
            found = InjectTool().campaign(lambda: model(x).detach(), 5, path=str(path))
    assert len(found.trials) == 5
    assert len(path.read_text().splitlines()) == 3
    assert InjectTool().campaign(lambda: model(x).detach(), 5, path=str(path)) == found


def test_any_name_of_an_operator_can_be_stored(tmp_path: Path) -> None:
    """Null characters, backslashes and lone surrogates come back."""
    names = ["a\0b", "\\u0041", "\udc80", "é 模型", "..", "/", "a\\"]
    assert [original_name(stored_name(name)) for name in names] == names
    path = tmp_path / "a.safetensors"
    write_tensors(path, {name: np.arange(i) for i, name in enumerate(names)})
    found, _ = read_tensors(path, "prune")
    assert {name: len(array) for name, array in found.items()} == {
        name: i for i, name in enumerate(names)
    }


def test_merging_names_each_rank_that_is_missing(tmp_path: Path) -> None:
    """A rank of one tool only, a rank twice, a count that does not fit: nothing is written."""
    make_ranks(tmp_path)
    second = (tmp_path / "given-rank0.json").read_text()
    for name, said in (
        ("other-rank0.json", "other.json has no result of rank 1"),
        ("given-rank01.json", "given-rank01.json and given-rank1.json are of the same rank"),
    ):
        (tmp_path / name).write_text(second)
        with pytest.raises(MergeError, match=said):
            merge(tmp_path)
        (tmp_path / name).unlink()
    for count, said in ((3, "given.json has no result of rank 2"), (1, "rank 1 is of another run")):
        counted = {**json.loads(second), "rank": {"number": 0, "count": count}}
        (tmp_path / "given-rank0.json").write_text(json.dumps(counted))
        with pytest.raises(MergeError, match=said):
            merge(tmp_path)
    assert not (tmp_path / "given.json").exists()
    left_out: list[str] = []
    assert [path.name for path in merge(tmp_path, left_out)] == ["given.json"]
    assert left_out == ["rank 1 is of another run than those with 1 ranks"]


def test_merging_writes_all_or_nothing(tmp_path: Path) -> None:
    """A tool whose results differ keeps the files of all tools from being written."""
    make_ranks(tmp_path)
    for rank in range(2):
        (tmp_path / f"trace-rank{rank}.timeline.json").write_text('{"traceEvents": [1]}')
    with pytest.raises(MergeError, match="timeline of rank 0 has no list of events"):
        merge(tmp_path)
    assert not (tmp_path / "given.json").exists()
