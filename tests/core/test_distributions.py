"""What is read of the installed distributions, complete or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import amanda
from amanda.cli import main
from amanda.errors import PluginWarning
from amanda.registry import distributions, plugins

GROUP = "amanda.test"
Distribution = Callable[..., Path]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribution]:
    """Writes what an installer writes of a distribution, into a folder that is searched first."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(folder: str, metadata: str | None = "", points: str = "", site: str = "") -> Path:
        place = tmp_path / site / f"{folder}.dist-info"
        place.mkdir(parents=True)
        if metadata is not None:
            (place / "METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}")
        if points:
            (place / "entry_points.txt").write_text(points)
        return place.parent

    yield written
    plugins.registry.cache_clear()


def names(group: str = GROUP) -> list[str]:
    """The names of the entry points of a group."""
    return [point.name for point in distributions.entry_points(group)[0]]


def test_entry_points_know_their_distribution(distribution: Distribution) -> None:
    """Name and version of the distribution come with each entry point."""
    distribution("one-1.5", "Name: one\nVersion: 1.5\n", f"[{GROUP}]\nfirst = a.b\n")
    [point], unreadable = distributions.entry_points(GROUP)
    assert (point.name, point.value, unreadable) == ("first", "a.b", [])
    assert distributions.origin(point.dist) == ("one", "1.5")


def test_a_malformed_file_hides_only_its_own_entry_points(distribution: Distribution) -> None:
    """The entry points of the other distributions are found; the malformed file is named."""
    distribution("bad-2.0", "Name: bad\nVersion: 2.0\n", "[console_scripts]\nno equals sign\n")
    distribution("one-1.5", "Name: one\nVersion: 1.5\n", f"[{GROUP}]\nfirst = a.b\n")
    points, [said] = distributions.entry_points(GROUP)
    assert [point.name for point in points] == ["first"]
    assert said.startswith("the entry points of bad 2.0 cannot be read: ")


def test_of_two_copies_the_first_on_the_path_counts(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a malformed file elsewhere as without one."""
    later = distribution("one-1", "Name: one\nVersion: 1\n", f"[{GROUP}]\nold = a.b\n", "later")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    distribution("one-2", "Name: one\nVersion: 2\n", f"[{GROUP}]\nnew = a.b\n")
    assert names() == ["new"]
    distribution("bad-2.0", "Name: bad\nVersion: 2.0\n", "[console_scripts]\nno equals sign\n")
    assert names() == ["new"]


@pytest.mark.parametrize("metadata", [None, "", "Name: half\n", "Version: 3\n"])
def test_incomplete_metadata_end_nothing(
    distribution: Distribution, metadata: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a distribution does not say of itself is a question mark; the rest is read."""
    distribution("half-3", metadata, f"[{GROUP}]\nfirst = a.b\n")
    [point], unreadable = distributions.entry_points(GROUP)
    assert unreadable == []
    name, version = distributions.origin(point.dist)
    assert name in ("half", distributions.UNKNOWN)
    assert version in ("3", distributions.UNKNOWN)
    assert distributions.version("no-such-distribution") == distributions.UNKNOWN
    assert isinstance(distributions.amanda_versions(), dict)
    assert distributions.providers("pytest")[0].endswith("(pytest)")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("amanda-core ")


def test_a_malformed_file_is_a_warning(distribution: Distribution) -> None:
    """Plugins are loaded all the same, and ``amanda doctor`` finds the message."""
    distribution("bad-2.0", "Name: bad\nVersion: 2.0\n", "[console_scripts]\nno equals sign\n")
    plugins.registry.cache_clear()
    with pytest.warns(PluginWarning, match=r"the entry points of bad 2\.0 cannot be read"):
        amanda.tools.available()
    [mistake] = plugins.registry().mistakes
    assert mistake.startswith("the entry points of bad 2.0 cannot be read")
