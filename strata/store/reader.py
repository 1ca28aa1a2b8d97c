"""An opened store: manifest and headers are read, everything else is mapped and touched when needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import StoreError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.formats import ExpertLayout, PackedShape, PackedTensor
from strata.store.manifest import SHARED, Manifest, TensorRecord, read_manifest
from strata.store.shards import ShardLayout
from strata.store.store_file import open_store_file, remedy_of

Bytes = NDArray[np.uint8]
_REMEDY = "`strata verify` lists the damage; convert the model again"


class FileIdentity(NamedTuple):
    """A file as it was when it was opened: what is read of it later must come from the same one."""

    path: str
    device: int
    inode: int
    nbytes: int
    modified_ns: int


class MappedFile(NamedTuple):
    """data: the whole file, u8, read-only. It holds no descriptor and ends with the last view of it."""

    data: Bytes
    identity: FileIdentity


class Store:
    """A shard store, read-only. Nothing is ever written into it, and no lock is needed.

    All files are mapped at open: a store replaced by rename while it is open keeps its old bytes. Arrays
    are views of the mappings and stay valid after `close` for as long as they live. No descriptor stays open.
    """

    def __init__(self, path: Path, manifest: Manifest, files: dict[str, MappedFile]) -> None:
        self.path = path
        self.manifest = manifest
        self._mappings = {file: mapped.data for file, mapped in files.items()}
        self._shards = {shard.path: shard for shard in manifest.shards()}
        self._entries = {entry.name: entry for entry in self._shards[SHARED].entries}
        self._layouts = {layer: record.layout() for layer, record in manifest.layers.items()}
        # Decoding asks for hundreds of records per token: one slice each, no names to format.
        experts = [files[names.expert_file(i)] for i in range(manifest.expert_count)]
        self._records = [file.data for file in experts]
        self.expert_files = tuple(file.identity for file in experts)
        self._ranges = self._record_ranges()

    def _record_ranges(self) -> dict[int, slice]:
        """Where each layer's record lies in every expert's file."""
        first = self._shards.get(names.expert_file(0))
        offsets = {entry.name: entry.offset for entry in first.entries} if first else {}
        starts = {layer: offsets[names.expert_record(ExpertId(layer, 0))] for layer in self._layouts}
        return {layer: slice(at, at + self._layouts[layer].record_bytes) for layer, at in starts.items()}

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open a store; StoreError when it is none, half-written, truncated or of another version."""
        path = Path(path)
        manifest = read_manifest(path)
        return cls(path, manifest, {shard.path: map_shard(path, shard) for shard in manifest.shards()})

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.manifest.spec

    def has(self, name: str) -> bool:
        """Whether shared.safetensors holds a tensor of that name."""
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a shared tensor."""
        return self._record(name).shape

    def tensor(self, name: str) -> PackedTensor:
        """A packed matrix, mapped."""
        record = self._record(name)
        if record.plain:
            raise StoreError(f"{self.path}: {name} is plain ({record.format}), not packed")
        return PackedTensor(name, record.packed_shape(), self._bytes(name))

    def plain(self, name: str) -> NDArray[np.float32]:
        """A plain vector or matrix as f32."""
        record = self._record(name)
        if record.format == "F32":
            return self._bytes(name).view(np.float32).reshape(record.shape)
        if record.format == "BF16":
            words = self._bytes(name).view(np.uint16).astype(np.uint32) << np.uint32(16)
            return words.view(np.float32).reshape(record.shape)
        raise StoreError(f"{self.path}: {name} is packed ({record.format}), not plain")

    def expert_layout(self, layer: int) -> ExpertLayout:
        """The layout of the expert records of a layer; StoreError for a layer without experts."""
        if layer not in self._layouts:
            raise StoreError(f"{self.path}: layer {layer} has no routed experts")
        return self._layouts[layer]

    def expert(self, expert: ExpertId) -> Bytes:
        """An expert's record, u8 `[record_bytes]`, mapped and 4 KiB aligned."""
        layer, index = expert
        if index < 0 or index >= len(self._records) or layer not in self._ranges:
            raise self._no_expert(expert)
        return self._records[index][self._ranges[layer]]

    def expert_range(self, layer: int) -> slice:
        """The bytes of `expert_files[index]` that are the record of expert `index` of a layer."""
        self.expert_layout(layer)
        return self._ranges[layer]

    def expert_part(self, expert: ExpertId, part: int) -> tuple[PackedTensor, PackedTensor]:
        """The gate_up and down matrices of slice `part` of an expert."""
        layout, record = self.expert_layout(expert.layer), self.expert(expert)
        name = f"layers.{expert.layer}.experts.{expert.index}.slice{part}"
        return (
            _packed(f"{name}.gate_up", layout.gate_up, record, layout.gate_up_offset(part)),
            _packed(f"{name}.down", layout.down, record, layout.down_offset(part)),
        )

    def close(self) -> None:
        """Forget the mappings; what was handed out stays valid."""
        self._mappings, self._records = {}, []

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _no_expert(self, expert: ExpertId) -> StoreError:
        if not self._mappings:
            return StoreError(f"{self.path} is closed")
        if expert.layer not in self._ranges:
            return StoreError(f"{self.path}: layer {expert.layer} has no routed experts")
        return StoreError(f"{self.path}: expert {expert.index} of {self.manifest.expert_count}")

    def _record(self, name: str) -> TensorRecord:
        if name not in self.manifest.tensors:
            raise StoreError(f"{self.path} holds no tensor {name}", remedy="convert the model again")
        return self.manifest.tensors[name]

    def _bytes(self, name: str) -> Bytes:
        entry = self._entries[name]
        return self._mapping(SHARED)[entry.offset : entry.offset + entry.nbytes]

    def _mapping(self, file: str) -> Bytes:
        if file not in self._mappings:
            raise StoreError(f"{self.path} is closed")
        return self._mappings[file]


def _packed(name: str, shape: PackedShape, record: Bytes, offset: int) -> PackedTensor:
    return PackedTensor(name, shape, record[offset : offset + shape.nbytes])


def map_shard(store: Path, shard: ShardLayout) -> MappedFile:
    """Map one file after checking size and header; a short file is an error here, never zeros later."""
    path = store / shard.path
    try:
        with open_store_file(path) as file:
            size = file.seek(0, 2)
            if size != shard.nbytes:
                raise StoreError(f"{path} has {size} bytes, the manifest says {shard.nbytes}", remedy=_REMEDY)
            file.seek(0)
            if file.read(len(shard.header)) != shard.header:
                raise StoreError(f"{path}: its header is not the one the manifest describes", remedy=_REMEDY)
            return _map(path, file)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", remedy=remedy_of(error) or _REMEDY) from None


def _map(path: Path, file: BinaryIO) -> MappedFile:
    from strata._C import map_file  # here: converting and planning do without the extension

    found = os.fstat(file.fileno())
    identity = FileIdentity(
        str(path.absolute()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    )
    return MappedFile(map_file(file.fileno(), found.st_size), identity)
