"""manifest.json: what a store holds. Written last, checked field by field before anything is used."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from strata.errors import StoreError
from strata.plan.check import check_spec
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.formats import FORMATS, ExpertLayout, PackedShape
from strata.store.shards import ShardLayout, shard_layout
from strata.store.store_file import open_store_file, remedy_of

MANIFEST = "manifest.json"
SHARED = "shared.safetensors"
VERSION = 1
_KIND = "strata-store"
_MAX_BYTES = 64 << 20
_MAX_SIZE = 1 << 40
_REMEDY = "convert the model again"
PLAIN_DTYPES = ("F32", "BF16")


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of shared.safetensors. format: a WeightFormat's name, or "F32"/"BF16" (plain).

    exact: dequantizing gives the source's values bit by bit. source: dtypes it came from.
    """

    shape: tuple[int, ...]
    format: str
    exact: bool
    source: str

    @property
    def plain(self) -> bool:
        """Whether it is stored unpacked."""
        return self.format in PLAIN_DTYPES

    def packed_shape(self) -> PackedShape:
        """Of a packed matrix."""
        return PackedShape(FORMATS[self.format], self.shape[0], self.shape[1])


@dataclass(frozen=True)
class LayerRecord:
    """The routed experts of one layer: all its experts share one layout."""

    gate_up: str
    down: str
    hidden: int
    width: int
    slices: int
    biases: bool
    exact: bool
    source: str

    def layout(self) -> ExpertLayout:
        """The byte layout of its records."""
        formats = FORMATS[self.gate_up], FORMATS[self.down]
        return ExpertLayout(*formats, self.hidden, self.width, self.slices, self.biases)


@dataclass(frozen=True)
class FileRecord:
    """One file of the store and the xxh3-64 of its bytes, hexadecimal."""

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class SourceRecord:
    """Where a store came from. xxh3: of each file's first and last 64 KiB."""

    kind: str
    name: str
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """A store's table of contents. replaced: NaN and Inf values that became 0, per source tensor."""

    spec: ModelSpec
    tensors: dict[str, TensorRecord]
    layers: dict[int, LayerRecord]
    expert_count: int
    source: SourceRecord
    options: dict[str, Any]
    tool: str
    files: tuple[FileRecord, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)

    @property
    def disk_bytes(self) -> int:
        """Of all the files that a store was made with, its manifest apart; what measures it later is not in
        it. The size of a store, wherever one is said."""
        return sum(entry.bytes for entry in self.files)

    def shards(self) -> list[ShardLayout]:
        """The safetensors files in the order of the file table."""
        tensors = []
        for name, record in self.tensors.items():
            if record.plain:
                tensors.append((name, record.format, record.shape))
            else:
                tensors.append((name, "U8", (record.packed_shape().nbytes,)))
        shards = [shard_layout(SHARED, tensors)]
        records = [
            (f"layers.{layer}", "U8", (record.layout().record_bytes,))
            for layer, record in self.layers.items()
        ]
        if records:
            common = shard_layout("", records)
            shards += (
                dataclasses.replace(common, path=names.expert_file(i)) for i in range(self.expert_count)
            )
        return shards

    def to_bytes(self) -> bytes:
        """The JSON text, with a checksum over everything else in it."""
        data = {"kind": _KIND, "version": VERSION, **dataclasses.asdict(self)}
        data["spec"] = self.spec.to_json()
        data["layers"] = {str(layer): dataclasses.asdict(record) for layer, record in self.layers.items()}
        data["checksum"] = _checksum(data)
        return json.dumps(data, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Inverse of `to_bytes`; raises StoreError naming the file and what is wrong with it."""
        data = _parse(text, where)
        try:
            manifest = cls(
                spec=ModelSpec.from_json(data["spec"]),
                tensors={str(name): _record(TensorRecord, entry) for name, entry in data["tensors"].items()},
                layers={int(layer): _record(LayerRecord, entry) for layer, entry in data["layers"].items()},
                source=_source(data["source"]),
                files=tuple(_record(FileRecord, entry) for entry in data["files"]),
                **{key: data[key] for key in ("expert_count", "options", "tool", "replaced")},
            )
            check_type("manifest", manifest, Manifest)
            _check(manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{where}: {type(error).__name__}: {error}", remedy=_REMEDY) from None
        return manifest


def read_manifest(store: Path) -> Manifest:
    """The manifest of a store; StoreError when `store` is none."""
    path = store / MANIFEST
    try:
        with open_store_file(path) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            size = path.stat().st_size
            raise StoreError(f"{path}: {size} bytes, a manifest has at most {_MAX_BYTES}", remedy=_REMEDY)
        return Manifest.from_bytes(text, str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{store} is no store: {_missing(store)}", remedy=_missing_remedy(store)) from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", remedy=remedy_of(error)) from None


def _missing(store: Path) -> str:
    if store.is_dir():
        return f"it holds no {MANIFEST}"
    return "it is a file, and a store is a folder" if store.exists() else "there is no such folder"


def _missing_remedy(store: Path) -> str:
    store = store.absolute()  # "." has no name
    if (store.parent / (store.name + ".partial")).exists():
        return "its conversion is not finished: run the same `strata convert` again, it continues"
    return "make one with `strata convert SOURCE --out STORE`"


def _checksum(data: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is no JSON: {error}", remedy=_REMEDY) from None
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise StoreError(f"{where} is not the manifest of a store", remedy=_REMEDY)
    if data.get("version") != VERSION:
        raise StoreError(
            f"{where} has format version {data.get('version')!r}, this Strata reads version {VERSION}",
            remedy="convert the model again with this Strata, or use the Strata that made the store",
        )
    expected = {item.name for item in dataclasses.fields(Manifest)} | {"kind", "version", "checksum"}
    if set(data) != expected:
        odd = ", ".join(sorted(set(data) ^ expected))
        raise StoreError(f"{where}: unknown or missing fields: {odd}", remedy=_REMEDY)
    recorded = data.pop("checksum")
    found = _checksum(data)
    if recorded != found:
        raise StoreError(
            f"{where} was changed after conversion: its checksum is {found}, recorded is {recorded}",
            remedy=_REMEDY,
        )
    return data


def _source(data: dict[str, Any]) -> SourceRecord:
    files = tuple(_record(FileRecord, entry) for entry in data["files"])
    return SourceRecord(**{**data, "files": files})


def _record(kind: type[Any], data: dict[str, Any]) -> Any:
    if "shape" in data:
        data = {**data, "shape": tuple(data["shape"])}
    return kind(**data)


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)  # 0.1 ms each: a store has hundreds of records


def check_type(where: str, value: Any, wanted: Any) -> None:
    """TypeError unless `value` is what a dataclass field's annotation says (ints count as floats)."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        valid = isinstance(value, typing.cast(type, wanted))
        for name, hint in _hints(typing.cast(Hashable, wanted)).items() if valid else ():
            check_type(f"{where}.{name}", getattr(value, name), hint)
    elif origin is tuple:
        valid = isinstance(value, tuple)
        for item in value if valid else ():
            check_type(where, item, arguments[0])
    elif origin is dict:
        valid = isinstance(value, dict)
        for key, item in value.items() if valid else ():
            check_type(where, key, arguments[0])
            check_type(f"{where}[{key!r}]", item, arguments[1])
    elif wanted is Any:
        valid = True
    elif origin is typing.Literal:
        valid = value in arguments
    elif origin is types.UnionType:
        valid = value is None or isinstance(value, arguments)
        if dataclasses.is_dataclass(arguments[0]) and value is not None:
            check_type(where, value, arguments[0])
    else:
        valid = isinstance(value, (int, float) if wanted is float else wanted)
        valid = valid and (wanted is bool or not isinstance(value, bool))
    if not valid:
        raise TypeError(f"{where} is {value!r}")


def _check(manifest: Manifest) -> None:
    """Sizes and names that everything after this relies on; ValueError."""
    check_spec(manifest.spec)
    if not 0 <= manifest.expert_count <= len(manifest.files):
        raise ValueError(
            f"expert_count is {manifest.expert_count!r} in a store of {len(manifest.files)} files"
        )
    for name, tensor in manifest.tensors.items():
        if not tensor.plain and (tensor.format not in FORMATS or len(tensor.shape) != 2):
            raise ValueError(f"{name} has format {tensor.format!r} and shape {tensor.shape}")
        _check_sizes(name, tensor.shape)
    for layer, record in manifest.layers.items():
        if record.gate_up not in FORMATS or record.down not in FORMATS:
            raise ValueError(f"layer {layer} has formats {record.gate_up!r} and {record.down!r}")
        _check_sizes(f"layer {layer}", (record.hidden, record.width, record.slices))
        if not manifest.spec.layers > layer >= 0 or record.width % record.slices:
            raise ValueError(f"layer {layer}: width {record.width} in {record.slices} slices")
    shards = manifest.shards()
    listed = {entry.file: entry.bytes for entry in manifest.files}
    for name in set(listed) - {shard.path for shard in shards}:
        if Path(name).name != name or len(listed) != len(manifest.files):
            raise ValueError(f"{name!r} in the file table is no name of a file beside the manifest")
    for shard in shards:
        if listed.get(shard.path) != shard.nbytes:
            raise ValueError(
                f"{shard.path} has {listed.get(shard.path)} bytes by the table, {shard.nbytes} by layout"
            )


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not all(0 < size <= _MAX_SIZE for size in sizes):
        raise ValueError(f"{name} has sizes {sizes}")
