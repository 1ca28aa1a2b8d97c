"""A tiny random model for tests of the command line: converted once, like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from strata.interfaces.importing import import_checkpoint
from strata.store.options import ConvertOptions


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-moe")


@pytest.fixture(scope="session")
def store(checkpoint: Path) -> Path:
    """Its store."""
    out = checkpoint.parent / "store"
    import_checkpoint(checkpoint, out, ConvertOptions())
    return out
