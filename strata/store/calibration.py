"""STATS: what the inputs of a model's matrices look like on a calibration text, and those of every expert.

One safetensors file whose header follows from its metadata, a JSON text `stats` (`StatsInfo`): the reader
compares headers byte by byte, as stores do. For every input of `calibration_inputs.linear_inputs` it holds,
with m members (experts of a layer, heads of an MLA matrix, otherwise 1) and n columns:

    NAME.tokens       I64 [m]     rows that each member really saw
    NAME.xxh3         U8 [m, 16]  checksums: of tokens and the vectors of a member, and of its moments
    NAME.absmax       F32 [m, n]  largest |x|
    NAME.p999         F32 [m, n]  99.9th percentile of |x|, exact: the least value that 99.9 % do not exceed
    NAME.mean_abs     F32 [m, n]  mean of |x| (AWQ)
    NAME.mean_square  F32 [m, n]  mean of x^2: the diagonal of the moments
    NAME.moments      F32 [m, n (n + 1) / 2]  only with `StatsInfo.moments`: mean of x x^T (GPTQ's H is twice
                      that), its lower triangle row by row: row i, column j <= i at i (i + 1) / 2 + j

x is what the matrix multiplies, in the model's own order of columns: of an expert's down matrix the whole
intermediate vector, slices one after the other. An expert's rows are those that the router sent to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import FileFormatError, StoreError, UnsupportedError, UsageError
from strata.plan.check import check_spec
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.calibration_inputs import (
    ExpertPart,
    LinearInput,
    expert_input,
    linear_inputs,
    pooled_input,
)
from strata.store.checkpoint_file import CheckpointFile, parse_json, shown
from strata.store.manifest import check_type
from strata.store.safetensors_parse import SafetensorsHeader, parse_safetensors
from strata.store.shards import Entry, ShardLayout, shard_layout

Floats = NDArray[np.float32]
VECTORS = ("absmax", "p999", "mean_abs", "mean_square")
CHECKSUM_BYTES = 16
KIND, VERSION = "strata-stats", 2
_MAX_LAYERS = 10_000
_REMEDY = "run `strata calibrate` again"
_MISSING = "check the path; `strata calibrate MODEL --out STATS` makes such a file"


@dataclass(frozen=True)
class DataFile:
    """A calibration text. xxh3: of all its bytes; tokens: of it, as many as were used."""

    name: str
    bytes: int
    xxh3: str
    tokens: int


@dataclass(frozen=True)
class StatsInfo:
    """Where statistics come from. fingerprint: `model_fingerprint`. tokens: rows of every layer, in windows
    of `window`. min_tokens: experts that saw fewer rows get their layer's shared statistics."""

    spec: ModelSpec
    fingerprint: str
    tokens: int
    window: int
    min_tokens: int
    moments: bool
    data: tuple[DataFile, ...]
    tool: str

    def to_json(self) -> str:
        """The metadata `stats`."""
        return json.dumps({**dataclasses.asdict(self), "spec": self.spec.to_json()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str) -> StatsInfo:
        """Inverse of `to_json`. Raises FileFormatError."""
        data = parse_json(text.encode("utf-8", "surrogatepass"), where)
        try:
            files = tuple(DataFile(**entry) for entry in data.pop("data"))
            info = cls(**{**data, "spec": ModelSpec.from_json(data["spec"]), "data": files})
            _check_info(info)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"{where}: {shown(str(error))}", remedy=_REMEDY) from None
        return info


@dataclass(frozen=True)
class LinearStats:
    """Statistics of one matrix's input; f32 `[cols]`, moments f32 `[cols, cols]` (symmetric) or None.

    tokens: rows they are of. own_tokens: rows that this very expert saw; it is below `tokens` where the
    statistics are `shared`, that is the whole layer's, because the expert saw too few.
    """

    name: str
    tokens: int
    absmax: Floats
    p999: Floats
    mean_abs: Floats
    mean_square: Floats
    moments: Floats | None = field(repr=False)
    own_tokens: int
    shared: bool = False


def model_fingerprint(spec: ModelSpec, plain: Callable[[str], NDArray[Any]]) -> str:
    """What makes two files of weights the same model, whatever formats they are in: xxh3-64, hexadecimal.

    plain(name): a plain tensor by its name in the store. Norms and routers are hashed, which no conversion
    changes; and the sizes of the model.
    """
    sizes = {**spec.to_json(), "name": "", "context": 0}
    hasher = xxhash.xxh3_64(json.dumps(sizes, sort_keys=True).encode())
    parts = [names.FINAL_NORM]
    for layer in range(spec.layers):
        parts += [names.layer(layer, "attn_norm.weight"), names.layer(layer, "ffn_norm.weight")]
        parts += [names.layer(layer, "router.weight")] * spec.is_moe(layer)
    for name in parts:
        hasher.update(np.ascontiguousarray(plain(name), np.float32).tobytes())
    return hasher.hexdigest()


def stats_layout(info: StatsInfo) -> ShardLayout:
    """The file that such statistics fill: a function of `info` alone."""
    tensors = []
    for entry in linear_inputs(info.spec):
        m, n = entry.members, entry.cols
        tensors += [(f"{entry.name}.tokens", "I64", (m,)), (f"{entry.name}.xxh3", "U8", (m, CHECKSUM_BYTES))]
        tensors += [(f"{entry.name}.{vector}", "F32", (m, n)) for vector in VECTORS]
        if info.moments:
            tensors.append((f"{entry.name}.moments", "F32", (m, n * (n + 1) // 2)))
    return shard_layout("", tensors, {"format": KIND, "version": str(VERSION), "stats": info.to_json()})


def checksums(tokens: int, vectors: NDArray[Any], moments: NDArray[Any] | None) -> bytes:
    """The two checksums of a member. vectors: f32 `[4, cols]`; moments: the triangle."""
    first = xxhash.xxh3_64(tokens.to_bytes(8, "little") + vectors.tobytes()).digest()
    return first + (bytes(8) if moments is None else xxhash.xxh3_64(moments.data).digest())


class CalibrationStats:
    """An opened STATS file. Nothing is kept in memory: every call reads what it returns, and checks it."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError when there is no such file, FileFormatError when it is no complete one."""
        self.path = path
        self._file, header = _opened(path)
        kind, version = header.metadata.get("format"), header.metadata.get("version")
        if kind != KIND or version != str(VERSION):
            raise FileFormatError(
                f"{path}: format {shown(kind or '')} version {shown(version or '')}, "
                f"wanted {KIND} version {VERSION}",
                remedy=_REMEDY,
            )
        self.info = StatsInfo.from_json(header.metadata.get("stats", ""), f"{path}: stats")
        layout = stats_layout(self.info)
        if self._file.read_bytes(0, len(layout.header)) != layout.header:
            raise FileFormatError(f"{path}: its tensors are not those of its model", remedy=_REMEDY)
        self._sound: dict[bool, bool] = {}
        self._entries = {entry.name: entry for entry in layout.entries}
        self._inputs = {entry.name: entry for entry in linear_inputs(self.info.spec)}
        self._named = {name: entry for entry in self._inputs.values() for name in (entry.name, *entry.also)}

    def check_model(self, spec: ModelSpec, fingerprint: str) -> None:
        """UsageError unless the statistics are this model's."""
        if linear_inputs(spec) != tuple(self._inputs.values()) or fingerprint != self.info.fingerprint:
            raise UsageError(
                f"{self.path} is of {self.info.spec.name} (fingerprint {self.info.fingerprint}), "
                f"the model is {spec.name} (fingerprint {fingerprint})",
                remedy="give statistics that `strata calibrate` made of this model",
            )

    @cached_property
    def digest(self) -> str:
        """xxh3-64 of what the statistics are, hexadecimal: of the header and all checksums."""
        hasher = xxhash.xxh3_64(self.info.to_json().encode())
        for entry in self._inputs.values():
            hasher.update(self._bytes(self._entries[f"{entry.name}.xxh3"]).tobytes())
        return hasher.hexdigest()

    def check(self, *, moments: bool) -> None:
        """Read all and compare the checksums, once. moments: those as well, nearly all of the bytes.

        StoreError for damage: a conversion asks before it begins, for it could not be finished.
        """
        if self._sound.get(moments) or self._sound.get(True):
            return
        for name, entry in self._inputs.items():
            for member in range(entry.members):
                self._read(name, member, moments=moments)
        self._sound[moments] = True

    def has(self, name: str) -> bool:
        """Whether there are statistics of the input of matrix `name` (see `names.py`)."""
        return name in self._named

    def members(self, name: str) -> int:
        """Heads of an MLA matrix, experts of `expert_input`, else 1."""
        return self._entry(name).members

    def linear(self, name: str, member: int = 0, *, moments: bool = True) -> LinearStats:
        """Of a matrix by its name in the store, or of one head of an MLA matrix (k_b, v_b).

        moments False leaves them on the disk. Raises StoreError where there are none, or for damage.
        """
        entry = self._entry(name)
        if not 0 <= member < entry.members:
            raise StoreError(f"{self.path}: {name} has {entry.members} members, asked for {member}")
        tokens, vectors, triangle = self._read(entry.name, member, moments=moments)
        full = None if triangle is None else symmetric(triangle, entry.cols)
        absmax, p999, mean_abs, mean_square = vectors
        return LinearStats(name, tokens, absmax, p999, mean_abs, mean_square, full, tokens)

    def expert(self, expert: ExpertId, part: ExpertPart, *, moments: bool = True) -> LinearStats:
        """Of a routed expert's gate_up or down; of all experts of its layer when it saw too few rows."""
        name = expert_input(expert.layer, part)
        own = int(self.tokens(name)[expert.index])
        if own >= self.info.min_tokens:
            return self.linear(name, expert.index, moments=moments)
        pooled = self.linear(pooled_input(expert.layer, part), moments=moments)
        return dataclasses.replace(pooled, name=f"{name}[{expert.index}]", own_tokens=own, shared=True)

    def tokens(self, name: str) -> NDArray[np.int64]:
        """Rows that each member saw: i64 `[members]`."""
        return self._bytes(self._entries[f"{self._entry(name).name}.tokens"]).view(np.int64)

    @cached_property
    def starved(self) -> dict[ExpertId, int]:
        """Experts that saw fewer than `info.min_tokens` rows, and how many those were."""
        spec, found = self.info.spec, {}
        for layer in filter(spec.is_moe, range(spec.layers)):
            for index, tokens in enumerate(self.tokens(expert_input(layer, "gate_up")).tolist()):
                if tokens < self.info.min_tokens:
                    found[ExpertId(layer, index)] = tokens
        return found

    def _read(self, name: str, member: int, *, moments: bool) -> tuple[int, Floats, Floats | None]:
        """Rows seen, the vectors `[4, cols]` and the triangle of the moments of one member, all checked."""
        cols = self._inputs[name].cols
        tokens = int(self.tokens(name)[member])
        vectors = np.stack([self._row(f"{name}.{vector}", member, cols) for vector in VECTORS])
        wanted = moments and self.info.moments
        triangle = self._row(f"{name}.moments", member, cols * (cols + 1) // 2) if wanted else None
        self._verify(name, member, tokens, vectors, triangle)
        return tokens, vectors, triangle

    def _entry(self, name: str) -> LinearInput:
        if name not in self._named:
            raise StoreError(f"{self.path} has no statistics of {shown(name)}", remedy=_REMEDY)
        return self._named[name]

    def _row(self, name: str, member: int, cols: int) -> Floats:
        return self._bytes(self._entries[name], member * cols * 4, cols * 4).view(np.float32)

    def _bytes(self, entry: Entry, start: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        return self._file.read(entry.offset + start, entry.nbytes if nbytes is None else nbytes)

    def _verify(self, name: str, member: int, tokens: int, vectors: Floats, moments: Floats | None) -> None:
        """Checksums, then what no statistics can be: a file may be hostile and its checksums right."""
        at = member * CHECKSUM_BYTES
        recorded = self._bytes(self._entries[f"{name}.xxh3"], at, CHECKSUM_BYTES).tobytes()
        length = 8 if moments is None else CHECKSUM_BYTES
        if checksums(tokens, vectors, moments)[:length] != recorded[:length]:
            raise StoreError(f"{self.path}: {name}, member {member}: the checksum differs", remedy=_REMEDY)
        parts = [vectors] if moments is None else [vectors, moments]
        finite = all(bool(np.isfinite(part).all()) for part in parts)
        if tokens < 0 or not finite or bool((vectors < 0).any()) or bool((vectors[1] > vectors[0]).any()):
            raise StoreError(f"{self.path}: {name}, member {member}: no possible statistics", remedy=_REMEDY)


def _opened(path: Path) -> tuple[CheckpointFile, SafetensorsHeader]:
    """The file and its header; what is wrong with it has the remedy of statistics, not of a checkpoint."""
    try:
        file = CheckpointFile(path)
        return file, parse_safetensors(file)
    except UsageError as error:
        raise UsageError(error.cause, remedy=_MISSING) from None
    except (FileFormatError, UnsupportedError) as error:
        raise FileFormatError(error.cause, remedy=_REMEDY) from None


def symmetric(triangle: Floats, cols: int) -> Floats:
    """The full matrix `[cols, cols]` of a lower triangle."""
    full = np.empty((cols, cols), np.float32)
    start = 0
    for row in range(cols):
        full[row, : row + 1] = full[: row + 1, row] = triangle[start : start + row + 1]
        start += row + 1
    return full


def triangle_of(full: Floats) -> Floats:
    """The lower triangle of a symmetric `[n, n]`, row by row: f32 `[n (n + 1) / 2]`."""
    return np.concatenate([full[row, : row + 1] for row in range(len(full))])


def _check_info(info: StatsInfo) -> None:
    """ValueError or TypeError for what cannot be."""
    check_type("stats", info, StatsInfo)
    check_spec(info.spec)
    if info.spec.layers > _MAX_LAYERS:
        raise ValueError(f"{info.spec.layers} layers, at most {_MAX_LAYERS}")
    for count in (info.tokens, info.window, info.min_tokens, *(f.tokens for f in info.data)):
        if not 0 <= count < 1 << 53:
            raise ValueError(f"{count} is no count of tokens")
