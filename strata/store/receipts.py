"""receipts.json: what a store's formats cost, as it was measured against what it was made from.

Beside the manifest, which says what was chosen and is never rewritten: its checksums stay what the conversion
wrote. A receipt belongs to one manifest; a store that was converted again has none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from strata.errors import StoreError
from strata.store.manifest import MANIFEST, Manifest
from strata.store.store_file import SideFile, open_store_file, remedy_of, replace_file

RECEIPTS = "receipts.json"
MOST = 32
"""Receipts that are kept; the oldest go first."""
_FILE = SideFile(
    "strata-receipts", 1, holds="receipts", owner="manifest", other="conversion", most_bytes=1 << 20
)
_MAX_TEXT = 300


@dataclass(frozen=True)
class Receipt:
    """One measurement. date: ISO, UTC. reference: the model's name, and the formats it was in.

    text: name of the file; text_xxh3: of its bytes, hexadecimal; predictions: tokens that were foreseen, in
    windows of `window`; second_half: only behind the middle of each. kv, activations: what both ran with.
    Perplexities are of this store and of the reference, change of the one against the other (0.01 is 1 %
    more) with its standard error; kl_*: of the predictions, in nats; top1: share of tokens where both find
    the same one likeliest.
    """

    date: str
    tool: str
    reference: str
    reference_formats: str
    text: str
    text_xxh3: str
    predictions: int
    window: int
    second_half: bool
    kv: str
    activations: str
    perplexity: float
    reference_perplexity: float
    change: float
    change_error: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float

    @property
    def subject(self) -> tuple[str, ...]:
        """What was measured: a new receipt replaces the one of the same subject."""
        cut = (str(self.window), str(self.second_half), str(self.predictions))
        return (self.reference, self.reference_formats, self.text_xxh3, *cut, self.kv, self.activations)


class LoadedReceipts(typing.NamedTuple):
    """receipts: oldest first. reason: why there are none, "" where the file was read or is absent."""

    receipts: tuple[Receipt, ...]
    reason: str


NO_RECEIPTS = LoadedReceipts((), "")


def read_receipts(store: Path) -> LoadedReceipts:
    """A store's receipts. A damaged file, or one of another manifest, is none: no run depends on it."""
    path = store / RECEIPTS
    try:
        return LoadedReceipts(_parse(_FILE.read(path, _manifest_hash(store))), "")
    except FileNotFoundError:
        return NO_RECEIPTS
    except OSError as error:
        return LoadedReceipts((), f"{path}: {error.strerror}")
    except (ValueError, TypeError, KeyError, RecursionError, StoreError) as error:
        return LoadedReceipts((), f"{path} is ignored: {error}")


def add_receipt(store: Path, receipt: Receipt) -> Path:
    """Write a receipt into the store; one of the same subject is replaced. StoreError where it cannot be."""
    kept = [old for old in read_receipts(store).receipts if old.subject != receipt.subject]
    receipts = [*kept, receipt][-MOST:]
    path = store / RECEIPTS
    try:
        replace_file(path, _to_bytes(receipts, _manifest_hash(store)))
    except OSError as error:
        raise StoreError(f"{path} was not written: {error.strerror}", remedy=remedy_of(error)) from None
    return path


def lossy_formats(manifest: Manifest) -> str:
    """Formats that do not hold the source's values, by the bytes they take: "w4g64+w4g128+w8"; "" if none."""
    return "+".join(name for name, exact in _by_bytes(manifest) if not exact)


def formats_in_words(manifest: Manifest) -> str:
    """All formats by the bytes they take, those that hold the source's values named so: "w4g32m (as in the
    source)+w4g64"."""
    return "+".join(f"{name} (as in the source)" if exact else name for name, exact in _by_bytes(manifest))


def all_formats(manifest: Manifest) -> str:
    """Formats of all matrices, by the bytes they take."""
    sizes: dict[str, int] = {}
    for (name, _), size in _sizes(manifest).items():
        sizes[name] = sizes.get(name, 0) + size
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))


def _by_bytes(manifest: Manifest) -> list[tuple[str, bool]]:
    """See `_sizes`, the largest first."""
    sizes = _sizes(manifest)
    return sorted(sizes, key=lambda key: -sizes[key])


def _sizes(manifest: Manifest) -> dict[tuple[str, bool], int]:
    """Bytes of each format, of what holds the source's values (True) apart from what was rounded."""
    sizes: dict[tuple[str, bool], int] = {}
    for tensor in manifest.tensors.values():
        if not tensor.plain:
            key = tensor.format, tensor.exact
            sizes[key] = sizes.get(key, 0) + tensor.packed_shape().nbytes
    for layer in manifest.layers.values():
        share = manifest.expert_count * layer.layout().record_bytes // 2
        for fmt in (layer.gate_up, layer.down):
            sizes[fmt, layer.exact] = sizes.get((fmt, layer.exact), 0) + share
    return sizes


def _manifest_hash(store: Path) -> str:
    with open_store_file(store / MANIFEST) as file:
        return xxhash.xxh3_64_hexdigest(file.read())


def _to_bytes(receipts: Sequence[Receipt], manifest: str) -> bytes:
    rows = [dataclasses.asdict(receipt) for receipt in receipts]
    return json.dumps({**_FILE.head(manifest), "receipts": rows}, indent=1).encode() + b"\n"


def _parse(data: dict[str, Any]) -> tuple[Receipt, ...]:
    rows = data["receipts"]
    if not isinstance(rows, list) or len(rows) > MOST:
        raise ValueError(f"receipts is no list of at most {MOST}")
    return tuple(_receipt(row) for row in rows)


def _receipt(row: Any) -> Receipt:
    hints = typing.get_type_hints(Receipt)
    if not isinstance(row, dict) or set(row) != set(hints):
        raise ValueError("a receipt has unknown or missing fields")
    return Receipt(**{name: _field(name, row[name], kind) for name, kind in hints.items()})


def _field(name: str, value: Any, kind: type) -> Any:
    allowed = (int, float) if kind is float else (kind,)
    if type(value) not in allowed:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if kind is str and len(value) > _MAX_TEXT:
        raise ValueError(f"{name} has {len(value)} characters")
    if name == "date" and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
        raise ValueError(f"date is {value[:40]!r}")
    return value
