"""The command of pip that a message advises.

The packages of Amanda are on no index: they come from where amanda-core came from, a clone or a
folder with the wheels of a release::

    f"no driver is installed; try: {install_command('amanda-torch')}"
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

import importlib_metadata as metadata

_OURS = ("core", "tensorflow", "tools", "torch", "torch-accel")


def install_command(name: str, options: str = "") -> str:
    """Return the command that installs a distribution, one of Amanda or of others.

    Args:
        name: the name of the distribution.
        options: options of ``pip install``, with a space at the end.
    """
    if name.removeprefix("amanda-") not in _OURS:
        return f"pip install {options}{name}"
    folder, source = name.replace("torch-accel", "torch/accel"), _source()
    if source is None:
        return f"pip install {options}./{folder} (in a clone of Amanda)"
    if (source / folder).is_dir():
        return f"pip install {options}{quote(str(source / folder))}"
    return f"pip install {options}--find-links {quote(str(source))} {name}"


def _source() -> Path | None:
    """The clone or the folder of wheels that amanda-core was installed from, if it is there.

    None if it came from an index or with ``--find-links``, which pip does not record.
    """
    try:
        text = metadata.distribution("amanda-core").read_text("direct_url.json")
        url = urlsplit(json.loads(text or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None
    folder = Path(unquote(url.path)).parent
    return folder if url.scheme == "file" and folder.is_dir() else None
