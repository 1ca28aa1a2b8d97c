"""What makes two conversions the same: source files, options, model, tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

import strata
from strata.plan.spec import ModelSpec
from strata.store.manifest import VERSION, FileRecord, SourceRecord
from strata.store.options import ConvertOptions
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor

_END_BYTES = 64 << 10


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
    files = {
        path.name: [record.bytes, record.xxh3, path.stat().st_mtime_ns]
        for path, record in zip(sorted(source.files()), source_record(source).files, strict=True)
    }
    model = [spec.to_json(), [asdict(target) for target in targets], [asdict(expert) for expert in experts]]
    extra = {name: xxhash.xxh3_64_hexdigest(data) for name, data in sorted(extra_files.items())}
    decided = {key: value for key, value in options.identity().items() if key != "allow_nan"}
    found = {
        "tool": [tool_name(), VERSION],
        "source": {"path": str(source.path.resolve()), **files},
        "options": decided,
        "model": xxhash.xxh3_64_hexdigest(json.dumps(model).encode()),
        "extra files": extra,
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as a journal gives it back
