"""The one way through the house: a file imports only from packages that stand before its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata

ROOT = Path(strata.__file__).parent
# docs/design.md, section 2. Modules on one line may import each other's predecessors only.
ORDER = (
    ("errors",),
    ("core",),
    ("config",),
    ("hardware",),
    ("device",),
    ("plan",),
    ("store",),
    ("memory",),
    ("backends",),
    ("model",),
    ("engine",),
    ("interfaces",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# The compiled extension is a leaf: csrc sees pointers and sizes, never policy.
FREE = {"_C", "demo"}


def python_files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in RANK)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first-level package of every strata import in a file, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the layering"
            module = node.module or ""
            names = [f"strata.{alias.name}" for alias in node.names] if module == "strata" else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "strata" and len(parts) > 1 and parts[1] != "__version__":
                yield node.lineno, parts[1]


def test_every_package_has_a_rank() -> None:
    found = {part_of(path) for path in python_files()} - FREE
    assert found == set(RANK), "ORDER and the tree disagree"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_backwards(path: Path) -> None:
    own = part_of(path)
    if own in FREE:
        pytest.skip("data or generated")
    for line, part in imported_parts(path):
        assert part in FREE or RANK[part] <= RANK[own], f"{path}:{line}: {own} must not import {part}"
