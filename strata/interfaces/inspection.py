"""What `strata inspect` says about a checkpoint, a bare config.json or a store: headers, never weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.config import format_bytes
from strata.errors import UsageError
from strata.interfaces import activations
from strata.interfaces.bundled import in_package
from strata.interfaces.importing import open_and_resolve
from strata.interfaces.quality import UNMEASURED
from strata.interfaces.quality import describe as quality_in_words
from strata.model.counts import Counts, count
from strata.model.resolve import resolve
from strata.plan.spec import ModelSpec
from strata.store.checkpoint_file import read_json_file
from strata.store.inspect import Summary, inspect_source, inspect_store
from strata.store.manifest import MANIFEST, read_manifest
from strata.store.receipts import NO_RECEIPTS, LoadedReceipts, read_receipts

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Inspection:
    """kind: "config", "safetensors", "gguf" or "store". summary: bytes and formats, None for "config".

    quality: of a store, what its formats cost, in words; receipts: as measured, oldest first.
    disk_bytes: of a store, `Manifest.disk_bytes`; the summary's are those of the weights alone.
    smoothed: of a store, whether it was made for `backend.activations: int8_per_token`.
    notes: what of a checkpoint a conversion would leave out.
    """

    path: Path
    kind: str
    spec: ModelSpec
    counts: Counts
    summary: Summary | None
    quality: str = ""
    receipts: LoadedReceipts = NO_RECEIPTS
    notes: tuple[str, ...] = ()
    smoothed: bool = False
    disk_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """For --json: counts in parameters, sizes in bytes."""
        parameters = {
            field.name: getattr(self.counts, field.name)
            for field in dataclasses.fields(self.counts)
            if field.name not in ("moe_layers", "experts", "top_k")
        }
        parameters |= {"total": self.counts.total, "active": self.counts.active, "shared": self.counts.shared}
        return {
            "path": str(self.path),
            "kind": self.kind,
            "name": self.spec.name,
            "architecture": self.spec.architecture,
            "parameters": parameters,
            "moe_layers": self.counts.moe_layers,
            "experts": self.counts.experts,
            "top_k": self.counts.top_k,
            "notes": list(self.notes),
            **({} if self.summary is None else _summary_json(self.summary)),
            **(self._quality_json() if self.kind == "store" else {}),
            "spec": self.spec.to_json(),
        }

    def _quality_json(self) -> dict[str, Any]:
        found = [dataclasses.asdict(receipt) for receipt in self.receipts.receipts]
        told = {"quality": self.quality, "receipts": found, "smoothed": self.smoothed}
        return {"disk_bytes": self.disk_bytes, **told}


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {
        "bytes": summary.bytes,
        "expert_bytes": {"smallest": summary.expert_bytes[0], "largest": summary.expert_bytes[1]},
        "parts": {name: dataclasses.asdict(part) for name, part in summary.parts.items()},
    }


def inspect_path(path: Path) -> Inspection:
    """Inspect a store, a checkpoint, a config.json or a directory that holds only one.

    Raises the errors of the readers and of `resolve`: what Strata does not support is refused by name.
    """
    if (path / MANIFEST).is_file():
        return _inspect_store(path)
    config = bare_config(path)
    if config is not None:
        spec = resolve(read_json_file(config), None, "safetensors").spec
        return Inspection(path, "config", spec, count(spec), None)
    source, found = open_and_resolve(path)
    summary = inspect_source(source, found.spec, found.targets, found.experts)
    return Inspection(path, source.kind, found.spec, count(found.spec), summary, notes=found.notes)


def _inspect_store(path: Path) -> Inspection:
    manifest, receipts = read_manifest(path), read_receipts(path)
    quality = quality_in_words(manifest, receipts.receipts)
    summary = inspect_store(manifest)
    made_for_tokens = activations.smoothed(manifest)
    found = Inspection(path, "store", manifest.spec, count(manifest.spec), summary, quality, receipts)
    return dataclasses.replace(found, smoothed=made_for_tokens, disk_bytes=manifest.disk_bytes)


def bare_config(path: Path) -> Path | None:
    """The config.json to read when there are no weights beside it."""
    if path.is_file() and path.name.endswith(".json") and not path.name.endswith(_WEIGHT_SUFFIXES):
        return path
    if not path.is_dir():
        if not path.exists():
            raise UsageError(
                f"{path}: no such file or directory", remedy="give a store, a model or a config.json"
            )
        return None
    names = [entry.name for entry in path.iterdir()]
    weights = any(name.endswith(_WEIGHT_SUFFIXES) for name in names)
    return path / "config.json" if "config.json" in names and not weights else None


def describe(found: Inspection) -> str:
    """A page for people."""
    spec, counts = found.spec, found.counts
    attention = spec.attention
    lines = [
        f"{spec.name} ({spec.architecture}, {found.kind})",
        f"  parameters   {counts.total:,}, {counts.active:,} active per token",
        f"  layers       {spec.layers}, {counts.moe_layers} with experts; hidden {spec.hidden}; "
        f"{attention.heads} heads, {attention.kv_heads} KV heads of {attention.head_dim}",
        f"  tokens       vocabulary {spec.vocab:,}, context {spec.context:,}",
    ]
    if counts.experts:
        lines.append(
            f"  experts      {counts.experts} per layer, {counts.top_k} per token, "
            f"{counts.per_expert:,} parameters each"
        )
    if spec.further:
        lines.append("  MTP head     predicts the token after the next: strata run MODEL -md THIS")
    left_out = [f"  left out     {note}" for note in found.notes]
    lines += _part_lines(found.summary)
    if found.disk_bytes:
        lines.append(f"  on disk      {format_bytes(found.disk_bytes)}, with headers and tokenizer")
    lines += _quality_lines(found)
    if found.smoothed:
        lines.append(f"  inputs       {activations.SMOOTHED}")
    return "\n".join([*lines, *left_out])


def _quality_lines(found: Inspection) -> list[str]:
    if not found.quality:
        return []
    lines = [f"  quality      {found.quality}"]
    if found.receipts.reason:
        lines.append(f"               {found.receipts.reason}")
    if found.quality.endswith(UNMEASURED):
        lines.append(f"               {_MEASURE if not in_package(found.path) else _NO_SOURCE}")
    return lines


_MEASURE = "`strata eval compare SOURCE STORE --record` measures it"
_NO_SOURCE = (
    "what it was made from is not in the package; the end of its training knew these formats\n"
    "               (docs/demo-model.md has the losses of both)"
)


def _part_lines(summary: Summary | None) -> list[str]:
    if summary is None:
        return []
    lines = []
    for name, part in summary.parts.items():
        formats = ", ".join(sorted(part.formats, key=lambda key: -part.formats[key]))
        lines.append(f"  {name:<12} {format_bytes(part.bytes)}: {formats}")
    smallest, largest = summary.expert_bytes
    if largest:
        most = f" to {format_bytes(largest)}" if largest > smallest else ""
        lines.append(f"  one expert   {format_bytes(smallest)}{most}")
    return [*lines, f"  weights      {format_bytes(summary.bytes)}"]
