"""What makes two conversions the same: source files, options, model, tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

import strata
from strata.errors import StoreError
from strata.plan.spec import ModelSpec
from strata.store.manifest import VERSION, FileRecord, SourceRecord
from strata.store.options import ConvertOptions
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor

_END_BYTES = 64 << 10
_AGAIN = "wait until its download is complete, then run the same command again"


def tool_name() -> str:
    """The program and its version, as the manifest records it."""
    return f"strata {strata.__version__}"


def source_record(source: CheckpointSource) -> SourceRecord:
    """The checkpoint's files by size and by the xxh3 of their first and last 64 KiB."""
    files = tuple(_file_record(path) for path in sorted(source.files()))
    return SourceRecord(source.kind, source.path.name, files)


def _file_record(path: Path) -> FileRecord:
    size = path.stat().st_size
    with path.open("rb") as file:
        data = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        data += file.read(_END_BYTES)
    return FileRecord(path.name, size, xxhash.xxh3_64_hexdigest(data))


def _files_now(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": record.bytes, "xxh3 of its ends": record.xxh3, "time": path.stat().st_mtime_ns}
        for path, record in zip(sorted(source.files()), source_record(source).files, strict=True)
    }


def check_unchanged(source: CheckpointSource, begun: Mapping[str, Any]) -> None:
    """Raises StoreError when a file is not the one that `identity` saw: `begun` is its result.

    A checkpoint that is still being downloaded, or is replaced meanwhile, would make a store of two halves.
    """
    try:
        now = _files_now(source)
    except OSError as error:
        raise StoreError(
            f"{error.filename}: {error.strerror}: it was there when the conversion began", remedy=_AGAIN
        ) from None
    for name, values in now.items():
        before = begun["source"][name]
        changes = [
            f"{what} was {before[what]}, is {value}"
            for what, value in values.items()
            if value != before[what]
        ]
        if changes:
            raise StoreError(
                f"{source.path}: {name} changed while it was converted: {', '.join(changes)}", remedy=_AGAIN
            )


def identity(
    source: CheckpointSource,
    spec: ModelSpec,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
    options: ConvertOptions,
    extra_files: Mapping[str, bytes],
) -> dict[str, Any]:
    """What a journal begins with; times of change are in it, for changes in the middle of a file.

    allow_nan is left out: records that are finished without it are the same with it.
    """
    model = [spec.to_json(), [asdict(target) for target in targets], [asdict(expert) for expert in experts]]
    extra = {name: xxhash.xxh3_64_hexdigest(data) for name, data in sorted(extra_files.items())}
    decided = {key: value for key, value in options.identity().items() if key != "allow_nan"}
    return {
        "tool": [tool_name(), VERSION],
        "source": {"path": str(source.path.resolve()), **_files_now(source)},
        "options": decided,
        "model": xxhash.xxh3_64_hexdigest(json.dumps(model).encode()),
        "extra files": extra,
    }
