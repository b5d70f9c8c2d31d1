"""The commands of pip in messages work where amanda-core is installed as it is."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from amanda.interface import install_command as module
from amanda.interface.install_command import install_command

UNKNOWN = "pip install -q ./amanda-torch/accel (in a clone of Amanda)"


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("amanda-core", "pip install -q '{}/amanda-torch/accel'"),
        ("amanda_core-1-py3-none-any.whl", "pip install -q --find-links '{}' amanda-torch-accel"),
        ("", UNKNOWN),
        ("gone/amanda-core", UNKNOWN),
    ],
)
def test_packages_come_from_where_core_comes_from(
    source: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone, a folder of wheels, or neither; a distribution of others comes from the index."""
    folder = tmp_path / "with space"
    (folder / "amanda-torch/accel" if source == "amanda-core" else folder).mkdir(parents=True)
    url = json.dumps({"url": (folder / source).as_uri()}) if source else None
    core = types.SimpleNamespace(read_text={"direct_url.json": url}.get)
    monkeypatch.setattr(module.metadata, "distribution", {"amanda-core": core}.get)
    assert install_command("amanda-torch-accel", "-q ") == advice.format(folder)
    assert install_command("amanda-minigrad") == "pip install amanda-minigrad"
