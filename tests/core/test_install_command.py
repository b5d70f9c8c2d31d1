"""The commands of pip in messages: they work where amanda-core is installed as it is."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from amanda.interface import install_command as module
from amanda.interface.install_command import install_command


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        # A clone, editable or not.
        ("amanda-core", "pip install -q '{0}/amanda-torch/accel'"),
        # The wheel of a release: its siblings are beside it.
        ("amanda_core-0.1.0-py3-none-any.whl", "pip install -q --find-links '{0}' {1}"),
        # An index, or a folder that is gone: nothing is known.
        ("", "pip install -q ./amanda-torch/accel (in a clone of Amanda)"),
        ("gone/amanda-core", "pip install -q ./amanda-torch/accel (in a clone of Amanda)"),
    ],
)
def test_packages_come_from_where_core_comes_from(
    source: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone, a folder of wheels, or neither; a distribution of others comes from the index."""
    folder = tmp_path / "with space"
    (folder / "amanda-torch/accel" if source == "amanda-core" else folder).mkdir(parents=True)
    url = json.dumps({"url": (folder / source).as_uri()}) if source else None
    origin = types.SimpleNamespace(read_text={"direct_url.json": url}.get)
    monkeypatch.setattr(module.metadata, "distribution", {"amanda-core": origin}.get)
    name = "amanda-torch-accel"
    assert install_command(name, "-q ") == advice.format(folder, name)
    assert install_command("amanda-minigrad") == "pip install amanda-minigrad"
