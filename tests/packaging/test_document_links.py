"""What documents point to exists: files, headings, modules and their names."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT

LISTS = [f"docs/{name}.md" for name in "index start tasks tools frameworks extend changes".split()]
"""What the documentation site has beside the documents: its first page, and the lists of pages."""

_LINK = re.compile(r"\]\(([^)]+)\)")
_NAME = re.compile(r"\bamanda(?:_tools)?(?:\.\w+)+\b")
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _documents() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("amanda-*/**/*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def _anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a document."""
    text = _CODE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("amanda"):  # Lightning is not installed here
                return True
            continue
        try:
            functools.reduce(getattr, parts[end:], found)
        except AttributeError:
            return False
        return True
    return False


def _links(document: str) -> list[tuple[Path, str]]:
    """The relative links of a document: files, and the headings in them."""
    path = ROOT / document
    found = []
    for link in _LINK.findall(_CODE.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = re.sub(r"\s", "", link).partition("#")
        if not re.match(r"\w+:", target):
            found.append(((path.parent / target).resolve() if target else path, anchor))
    return found


@pytest.mark.parametrize("document", _documents())
def test_links_lead_somewhere(document: str) -> None:
    """Every relative link is to a file, and to a heading in it if it names one."""
    assert not [
        (file, anchor)
        for file, anchor in _links(document)
        if not file.exists() or (anchor and anchor not in _anchors(file))
    ]


def test_the_readme_leads_to_every_document() -> None:
    """By links from document to document; changelogs, templates and lists stand for themselves."""
    found, new = set(), {"README.md"}
    while new:
        found |= new
        files = {file for document in new for file, _ in _links(document) if file.suffix == ".md"}
        new = {str(file.relative_to(ROOT)) for file in files} - found
    apart = ("CHANGELOG.md", "templates/", "docs/api/", *LISTS)
    assert not [d for d in _documents() if d not in found and not any(a in d for a in apart)]


@pytest.mark.parametrize("document", _documents())
def test_names_are_those_of_the_code(document: str) -> None:
    """Every dotted name of amanda or amanda_tools can be imported, also after files have moved."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert not [name for name in sorted(set(_NAME.findall(text))) if not _exists(name)]
