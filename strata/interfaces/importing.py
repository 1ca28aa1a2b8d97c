"""Checkpoint -> store: the one way in, for `strata convert` and for models that are imported on first use."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from strata.errors import IncompleteError, StoreError, UsageError
from strata.interfaces.tokenizer import FILES as TOKENIZER_FILES
from strata.model.resolve import Resolved, resolve
from strata.plan.spec import FURTHER
from strata.store.calibration import CalibrationStats
from strata.store.checkpoint import open_checkpoint
from strata.store.checkpoint_file import inside
from strata.store.convert import ConvertReport, convert
from strata.store.fingerprint import source_record, tool_name
from strata.store.gguf_tokenizer import tokenizer_files
from strata.store.manifest import MANIFEST, VERSION
from strata.store.options import ConvertOptions
from strata.store.source import CheckpointSource

Progress = Callable[[int, int, str], None]
Refine = Callable[[CheckpointSource, Resolved, ConvertOptions], ConvertOptions]
_MAX_EXTRA_BYTES = 256 << 20
_TOKENIZER = "tokenizer.json"


def open_and_resolve(path: Path, *, further: bool = False) -> tuple[CheckpointSource, Resolved]:
    """A checkpoint and what it is; what Strata does not support is refused by name.

    further: its layer that predicts further tokens instead. Raises UsageError for a store.
    """
    if (path / MANIFEST).is_file():
        raise UsageError(
            f"{path} is a store already, and its weights are rounded",
            remedy="give the checkpoint or the GGUF file that it was made of",
        )
    source = open_checkpoint(path)
    return source, resolve_checkpoint(source, further=further)


def resolve_checkpoint(source: CheckpointSource, *, further: bool = False) -> Resolved:
    """What a checkpoint is, with a name."""
    kind: Any = source.kind
    resolved = resolve(source.config, source.tensors, kind, further=further)
    if resolved.spec.name == resolved.spec.architecture:  # config.json seldom has a name, its folder does
        name = source.path.resolve().name.removesuffix(".gguf").removesuffix(".safetensors")
        name += FURTHER if resolved.spec.further else ""
        resolved = dataclasses.replace(resolved, spec=dataclasses.replace(resolved.spec, name=name))
    return resolved


def import_checkpoint(
    path: Path,
    out: Path,
    options: ConvertOptions,
    progress: Progress | None = None,
    refine: Refine | None = None,
    further: bool = False,
    stats: CalibrationStats | None = None,
) -> ConvertReport:
    """Convert a checkpoint with everything a store holds beside weights: tokenizer, template, stop ids.

    refine: the last word on the options, when the model is known. further: only its layer that predicts
    further tokens. stats: for options whose methods need them.
    """
    source, resolved = open_and_resolve(path, further=further)
    options = refine(source, resolved, options) if refine is not None else options
    extra = extra_files(source)
    report = _convert(source, resolved, out, options, extra, progress, stats)
    if _TOKENIZER in extra:
        return report
    remark = f"there is no {_TOKENIZER} beside the weights: `strata run` needs one in the store"
    return dataclasses.replace(report, notes=(*report.notes, remark))


def cached_store(
    path: Path, cache: Path, options: ConvertOptions, progress: Progress | None = None, *, text: bool = True
) -> tuple[Path, ConvertReport | None]:
    """The store of a checkpoint in `cache`, converted if it is not there (then with the report).

    The folder's name holds a hash of the source's files, the options and the converter's version, so that a
    changed model, tokenizer or template and other formats make another store.
    text: raise IncompleteError where there is no tokenizer, before hours of converting rather than after.
    """
    source, resolved = open_and_resolve(path)
    extra = extra_files(source)
    if text and _TOKENIZER not in extra:
        raise IncompleteError(
            f"{path}: {_TOKENIZER} is missing", remedy="put it beside the weights, or take a GGUF file"
        )
    record = dataclasses.asdict(source_record(source))
    files = {name: xxhash.xxh3_64_hexdigest(data) for name, data in extra.items()}
    key = json.dumps([record, files, options.identity(), tool_name(), VERSION], sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", resolved.spec.name)[:60].strip(".-") or "model"
    out = cache / f"{slug}-{xxhash.xxh3_64_hexdigest(key.encode())}"
    if (out / MANIFEST).is_file():
        return out, None
    try:
        return out, _convert(source, resolved, out, options, extra, progress)
    except StoreError:
        if (out / MANIFEST).is_file():  # another process was a moment faster
            return out, None
        raise


def cache_folder(setting: str) -> Path:
    """The folder for the option model.cache_dir: "auto" or a path."""
    if setting != "auto":
        return Path(setting)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "strata"


def _convert(
    source: CheckpointSource,
    resolved: Resolved,
    out: Path,
    options: ConvertOptions,
    extra: Mapping[str, bytes],
    progress: Progress | None,
    stats: CalibrationStats | None = None,
) -> ConvertReport:
    model = source, resolved.spec, resolved.targets, resolved.experts
    report = convert(*model, out, options, extra, progress, stats)
    return dataclasses.replace(report, notes=(*report.notes, *resolved.notes))


def extra_files(source: CheckpointSource) -> dict[str, bytes]:
    """The tokenizer's files: rebuilt from GGUF metadata, or those beside the weights.

    Links that lead out of the model's folder are refused: the files become part of a store that is passed on.
    """
    if source.kind == "gguf":
        return tokenizer_files(source.config)
    folder = source.path if source.path.is_dir() else source.path.parent
    found = [inside(folder, name, "file") for name in TOKENIZER_FILES if (folder / name).is_file()]
    return {path.name: path.read_bytes() for path in found if path.stat().st_size <= _MAX_EXTRA_BYTES}
