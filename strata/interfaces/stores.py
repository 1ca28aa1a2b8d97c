"""From the option model.path to a store on disk; anything else is converted into the cache on first use."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from strata.config import Config, ConvertConfig
from strata.errors import UsageError
from strata.interfaces.bundled import model_path
from strata.interfaces.importing import Progress, cache_folder, cached_store
from strata.interfaces.progress import progress_bar
from strata.interfaces.terminal import note
from strata.store.manifest import MANIFEST, read_manifest
from strata.store.options import ConvertOptions
from strata.store.writer import beside


def store_path(
    config: Config, *, text: bool = True, progress: Progress | None = None, exact: bool = False
) -> Path:
    """The store of the model; anything but a store is converted into the cache on first use.

    text: whether it must have a tokenizer; random token ids do without. progress: hears of a conversion
    instead of a bar on the terminal. exact: see ConvertOptions.
    """
    path = named_model(config.model.path)
    if (path / MANIFEST).is_file():
        return path
    begin = time.perf_counter()
    shown = progress_bar("importing") if progress is None else contextlib.nullcontext(progress)
    with shown as hears:
        cache = cache_folder(config.model.cache_dir) / "models"
        options = dataclasses.replace(convert_options(config.convert), exact=exact)
        store, report = cached_store(path, cache, options, hears, text=text)
    if report is not None:
        seconds = time.perf_counter() - begin
        note(f"imported {path.name} in {seconds:.1f} s, kept in {store}")
        for line in report.notes:
            note(f"note: {line}")
    return store


def named_model(asked: str) -> Path:
    """The path of what was asked for, be it a store or not. UsageError where it can be neither, StoreError
    for a conversion that is not finished."""
    path = model_path(asked)
    if (path / MANIFEST).is_file():
        return path
    if beside(path, ".partial").exists() and not path.exists():
        read_manifest(path)  # raises: says that the conversion is not finished and how to go on
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UsageError(f"{path} is a configuration, not a model", remedy=f"--config {path}")
    if not path.exists():
        raise UsageError(
            f"{path}: no such file or directory",
            remedy="check the path; Strata downloads nothing, `hf download OWNER/NAME --local-dir DIR` does",
        )
    return path


def convert_options(asked: ConvertConfig) -> ConvertOptions:
    """What a configuration asks of the converter."""
    return ConvertOptions(
        experts=asked.experts, shared=asked.shared, head=asked.head, embed=asked.embed, slices=asked.slices
    )
