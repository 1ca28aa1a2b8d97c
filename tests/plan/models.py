"""Footprints and machines written by hand, with round numbers for sums on paper."""

from __future__ import annotations

import dataclasses
from typing import Any

from strata.hardware.numa import MemoryNode
from strata.hardware.pci import Link
from strata.hardware.profile import DeviceProfile, HardwareProfile, Processor, Rate
from strata.plan.footprint import Attention, Footprint

GB = 10**9
GIB = 1 << 30


def toy(**changes: Any) -> Footprint:
    """10 layers that route to 2 of 8 experts of 10 MB; 100 MB static, 50 MB head; KV of 1 kB per token."""
    values: dict[str, Any] = {
        "name": "toy",
        "layers": 10,
        "moe_layers": 10,
        "hidden": 1000,
        "vocab": 50_000,
        "context": 65_536,
        "static": 100 * 10**6,
        "static_macs": 200 * 10**6,
        "head": 50 * 10**6,
        "head_macs": 50 * 10**6,
        "embedding": 50 * 10**6,
        "tied": False,
        "experts": 8,
        "top_k": 2,
        "expert_bytes": 10 * 10**6,
        "expert_macs": 20 * 10**6,
        "expert_total": 800 * 10**6,
        "slices": 2,
        "attention": Attention((0,) * 10, 1000, 100),
        "kv_dtype": "int8",
        "page_tokens": 32,
        "activation_bytes": 40_000,
    }
    return Footprint(**{**values, **changes})


def machine(
    nodes: int = 1,
    cores: int = 4,
    node_gib: int = 64,
    device_gib: float | None = 24,
    read: float = 100e9,
    **changes: Any,
) -> HardwareProfile:
    """`nodes` sockets whose memory together reads at `read`; a card of 1 TB/s behind a bus of 10 GB/s."""
    count = range(nodes)
    far = tuple(tuple(10 if i == j else 20 for j in count) for i in count)
    device = DeviceProfile(
        name="card",
        memory=int((device_gib or 0) * GIB),
        node=0,
        link=Link(3, 16),
        read=Rate(1000e9, "datasheet"),
        macs=Rate(10e12, "datasheet"),
        to_device=Rate(10e9, "field"),
        to_host=Rate(10e9, "field"),
    )
    found = HardwareProfile(
        name="machine",
        processor=Processor("P", "avx2", Rate(100e9, "assumed")),
        nodes=tuple(
            MemoryNode(i, cpus := tuple(range(cores * i, cores * (i + 1))), cpus, node_gib * GIB, 0, far[i])
            for i in count
        ),
        node_read=tuple(Rate(read / nodes, "measured") for _ in count),
        available=nodes * node_gib * GIB,
        device=device if device_gib else None,
        disk_read=Rate(1e9, "assumed"),
    )
    return dataclasses.replace(found, **changes)
