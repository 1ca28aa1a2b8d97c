"""Host memory as a cache of the disk, for a store whose experts are more than the memory they may take."""

from __future__ import annotations

import weakref
from pathlib import Path

from strata.errors import CapacityError
from strata.memory.expert_host import HostExperts
from strata.memory.experts import ExpertSpace
from strata.memory.heat import Heat
from strata.memory.host_arena import host_arena
from strata.memory.policies import POLICIES
from strata.store.expert_reader import ExpertReader
from strata.store.reader import Store

POLICY = "forecast"
"""Fewest misses on the traces of docs/expert-policies.md, and on routes drawn by rank (docs/disk-tier.md)."""


def open_tier(store: Store, experts: int, policy: str = POLICY) -> HostExperts:
    """What brings the store's experts through memory for so many of them.

    What earlier runs used most (heat.json) is read in the background, and heat is written at the end of the
    process. CapacityError for less than one expert.
    """
    spec, layers = store.spec, store.manifest.layers
    space = ExpertSpace(tuple(store.manifest.expert_count * (i in layers) for i in range(spec.layers)))
    records = {layer: record.layout().record_bytes for layer, record in layers.items()}
    if experts < 1:
        raise CapacityError(
            f"memory has no room for a single expert of {max(records.values())} bytes",
            remedy="raise host.memory, or choose a smaller kv.size",
        )
    heat = Heat.load(store.path, _fingerprint(store), space).heat
    memory = host_arena(experts * max(records.values())).memory
    tier = HostExperts(space, records, memory, ExpertReader(store), POLICIES[policy], heat)
    weakref.finalize(tier, _save, heat, store.path)
    return tier


def _fingerprint(store: Store) -> str:
    """Names the weights: the checksum of the file that all experts' routers are in."""
    return store.manifest.files[0].xxh3


def _save(heat: Heat, path: Path) -> None:
    heat.save(path)  # a hint: a read-only store starts cold the next time
