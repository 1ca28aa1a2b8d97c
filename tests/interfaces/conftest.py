"""A tiny random model for tests of the command line: converted once, like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Result
from tiny_checkpoint import write_checkpoint

from strata.interfaces import cli
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


@pytest.fixture(scope="session")
def statistics(checkpoint: Path) -> Path:
    """What its matrices read on a short text, without second moments."""
    from strata.interfaces.calibration import CalibrateOptions, TextFile, calibrate_model

    out = checkpoint.parent / "stats"
    text = TextFile("some", b"The quick brown fox jumps over the lazy dog. " * 9)
    calibrate_model(checkpoint, [text], out, CalibrateOptions(min_tokens=50, moments=False))
    return out


@pytest.fixture
def strata(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process."""

    def call(*arguments: str | Path) -> Result:
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call
