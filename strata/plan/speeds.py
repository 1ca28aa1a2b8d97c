"""What a machine sustains: its measured or published speeds, times the share of them that kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from strata.hardware.profile import HardwareProfile

Spread = Literal["partition", "interleave", "replicate"]

HOST_READ_SHARE = 0.67
"""Of the probed bandwidth while decoding; 2 cores, AVX2, Qwen3-30B shapes, early kernels (README: 0.72)."""
HOST_MACS_SHARE = 0.68
"""Of the rate of large products during prefill; 151 of 221 GMAC/s, 2 cores, AVX2, early kernels."""
SATURATING_CORES = 0.5
"""Share of a node's cores that saturates its memory; assumed (two of two do, on the machine at hand)."""
DEVICE_READ_SHARE = 0.75
"""Of the datasheet's bandwidth in small kernels; assumed (copies reach 900 of 936 GB/s on a 3090)."""
DEVICE_MACS_SHARE = 0.5
"""Of the datasheet's rate in products of 4-bit weights; assumed."""


@dataclass(frozen=True)
class Speeds:
    """What a machine sustains, per second. Device speeds and both directions are 0 without a device.

    host_read: of experts in host memory; host_shared: of what all its threads read (attention, KV, the head),
    which is spread over the nodes; host_near: of experts that every node has a copy of; 0 = as fast.
    """

    host_read: float
    host_macs: float
    disk_read: float
    device_read: float = 0.0
    device_macs: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    host_shared: float = 0.0
    host_near: float = 0.0


def speeds_of(hardware: HardwareProfile, threads: Mapping[int, int], spread: Spread) -> Speeds:
    """Sustained speeds with `threads[node]` threads on each node and experts spread over the nodes as told.

    interleave: every thread finds its bytes on all nodes alike; remote reads are slower by the ratio of the
    ACPI distances (assumed). partition: every node has the same work, so the slowest one sets the pace.
    """
    reads, macs_of = [], []
    for node, rate in zip(hardware.nodes, hardware.node_read, strict=True):
        used = threads.get(node.index, 0)
        full = max(1.0, SATURATING_CORES * len(node.cores))
        reads.append(rate.value * min(1.0, used / full))
        macs_of.append(hardware.processor.core_macs.value * min(used, max(1, len(node.cores))))
    near = read = math.fsum(reads)
    macs = math.fsum(macs_of)
    shared = read * _local_share(hardware, threads)
    if spread == "interleave":
        read = shared
    elif spread == "partition":
        homes = [place for place, speed in enumerate(reads) if speed]
        read = min((reads[place] for place in homes), default=0.0) * len(homes)
        macs = min((macs_of[place] for place in homes), default=0.0) * len(homes)
    device = hardware.device
    host = HOST_READ_SHARE * read, HOST_MACS_SHARE * macs, hardware.disk_read.value
    spread_out = HOST_READ_SHARE * shared, HOST_READ_SHARE * near
    if device is None:
        return Speeds(*host, host_shared=spread_out[0], host_near=spread_out[1])
    own = DEVICE_READ_SHARE * device.read.value, DEVICE_MACS_SHARE * device.macs.value
    return Speeds(*host, *own, device.to_device.value, device.to_host.value, *spread_out)


def _local_share(hardware: HardwareProfile, threads: Mapping[int, int]) -> float:
    """Mean of 10 / distance from nodes with threads to nodes with memory; 1 where distances are unknown."""
    homes = [node for node in hardware.nodes if threads.get(node.index) and node.usable and node.memory]
    places = [place for place, node in enumerate(hardware.nodes) if node in homes]
    shares = [10 / node.distances[place] for node in homes if node.distances for place in places]
    return sum(shares) / len(shares) if shares else 1.0
