"""The layers of each package: imports lead down, and never in a circle."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.packaging.environments import ROOT

LAYERS = tomllib.loads((Path(__file__).parent / "layers.toml").read_text())
SOURCES = {
    folder.name: folder
    for pattern in ("amanda-*/**/src/*", "tests/packaging/*/src/*")
    for folder in ROOT.glob(pattern)
    if folder.name in LAYERS and folder.is_dir()
}


@attrs.frozen
class Import:
    """One import: the modules at both ends, by their names, and where it stands."""

    importer: str
    imported: str
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.imported}"


def modules_of(package: str) -> dict[str, Path]:
    """The modules of a package by their dotted names."""
    folder = SOURCES[package]
    found = {}
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(package: str) -> Iterator[Import]:
    """All imports within a package, under TYPE_CHECKING and inside functions included."""
    modules = modules_of(package)
    for importer, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _named(node, importer, file):
                # What is not a module is a name in one: its parent is imported.
                imported = name if name in modules else name.rpartition(".")[0]
                if imported in modules and imported != importer:
                    yield Import(importer, imported, file, node.lineno)  # type: ignore[attr-defined]


def _named(node: ast.AST, importer: str, file: Path) -> list[str]:
    """The dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        depth = node.level - (file.name == "__init__.py")
        parts = importer.split(".")
        base = ".".join([*parts[: len(parts) - depth], *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def part_of(module: str) -> str:
    """The part of its package that a module belongs to."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or "__init__"


def layered() -> list[str]:
    return [package for package in LAYERS if "layers" in LAYERS[package]]


@pytest.mark.parametrize("package", layered())
def test_every_part_has_a_layer(package: str) -> None:
    """The list names each module and folder of a package once, and nothing else."""
    listed = [part for layer in LAYERS[package]["layers"] for part in layer]
    assert sorted(listed) == sorted({part_of(module) for module in modules_of(package)})


@pytest.mark.parametrize("package", layered())
def test_imports_lead_down(package: str) -> None:
    """A module imports from its own folder and from lower layers only."""
    layer = {part: i for i, parts in enumerate(LAYERS[package]["layers"]) for part in parts}
    wrong = []
    for found in imports_of(package):
        above, below = part_of(found.importer), part_of(found.imported)
        if above != below and layer[above] >= layer[below]:
            way = "up" if layer[above] > layer[below] else "across"
            wrong.append(f"{found}, which leads {way}: {above} -> {below}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", list(LAYERS))
def test_no_circles(package: str) -> None:
    """No module imports another that leads back to it."""
    graph: dict[str, dict[str, Import]] = {module: {} for module in modules_of(package)}
    for found in imports_of(package):
        graph[found.importer].setdefault(found.imported, found)
    circle = _circle(graph)
    assert not circle, "\n".join(str(found) for found in circle)


def _circle(graph: dict[str, dict[str, Import]]) -> list[Import]:
    """The imports of one circle; none if there is none."""
    done: set[str] = set()

    def search(module: str, path: list[Import]) -> list[Import]:
        for imported, found in graph[module].items():
            starts = [step.importer for step in path] + [module]
            if imported in starts:
                return [*path, found][starts.index(imported) :]
            if imported not in done and (circle := search(imported, [*path, found])):
                return circle
        done.add(module)
        return []

    for module in graph:
        if module not in done and (circle := search(module, [])):
            return circle
    return []


@pytest.mark.parametrize("package", list(SOURCES))
def test_private_names_stay_in_their_package(package: str) -> None:
    """No module imports an underscored module or name of another of our packages."""
    wrong = []
    for file in modules_of(package).values():
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _named(node, "", file):
                first, *rest = name.split(".")
                private = any(part.startswith("_") and part != "__version__" for part in rest)
                if first != package and first in SOURCES and private:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} imports {name}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)
