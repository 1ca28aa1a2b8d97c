"""Host memory as a cache of the disk, for a store whose experts are more than the memory they may take."""

from __future__ import annotations

import weakref
from pathlib import Path

import strata
from strata.errors import CapacityError
from strata.memory.expert_host import HostExperts
from strata.memory.experts import ExpertSpace
from strata.memory.heat import Heat, LoadedHeat
from strata.memory.host_arena import host_arena
from strata.memory.policies import POLICIES
from strata.store.expert_reader import ExpertReader
from strata.store.reader import Store

_PACKAGE = Path(strata.__file__).resolve().parent
POLICY = "forecast"
"""Fewest misses on the traces of docs/expert-policies.md, and on routes drawn by rank (docs/disk-tier.md)."""


def open_tier(
    store: Store, experts: int, heat: Heat, *, learns: bool = True, policy: str = POLICY
) -> HostExperts:
    """What brings the store's experts through memory for so many of them.

    heat: what earlier runs used most is read in the background; learns: it also takes in what is used now.
    CapacityError for less than one expert.
    """
    records = {layer: record.layout().record_bytes for layer, record in store.manifest.layers.items()}
    if experts < 1:
        raise CapacityError(
            f"memory has no room for a single expert of {max(records.values())} bytes",
            remedy="raise host.memory, or choose a smaller kv.size",
        )
    memory = host_arena(experts * max(records.values())).memory
    reader = ExpertReader(store)
    return HostExperts(heat.space, records, memory, reader, POLICIES[policy], heat, learns=learns)


def load_heat(store: Store) -> LoadedHeat:
    """What earlier runs with this store used, or nothing and why."""
    layers, count = store.manifest.layers, store.manifest.expert_count
    space = ExpertSpace(tuple(count * (index in layers) for index in range(store.spec.layers)))
    return Heat.load(store.path, _fingerprint(store), space)


def keep_heat(owner: object, heat: Heat, store: Store) -> None:
    """Write heat to the store when `owner` goes or the process ends, if it changed; never to the demo's."""
    if _PACKAGE not in store.path.resolve().parents:
        weakref.finalize(owner, _save, heat, store.path)


def _fingerprint(store: Store) -> str:
    """Names the weights: the checksum of the file that all experts' routers are in."""
    return store.manifest.files[0].xxh3


def _save(heat: Heat, path: Path) -> None:
    if heat.changed:
        heat.save(path)  # a hint: a read-only store starts cold the next time
