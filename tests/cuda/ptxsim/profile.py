"""Counts what memory accesses cost: wavefronts of shared memory, 32-byte sectors of global memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LANES, BANKS, SECTOR = 32, 32, 32


@dataclass
class SharedCost:
    """wavefronts: passes that the banks needed; ideal: passes that the amount of data needs."""

    wavefronts: int = 0
    ideal: int = 0


@dataclass
class Profile:
    """shared: per place in the source. sectors: touched, per argument. instructions: executed by warps.

    products: of matrix instructions, counted as 16-bit ones: four of 8 bits are one.
    """

    shared: dict[str, SharedCost] = field(default_factory=dict)
    sectors: dict[int, int] = field(default_factory=dict)
    instructions: int = 0
    products: int = 0

    def shared_access(self, place: str, addresses: np.ndarray, size: int, active: np.ndarray) -> None:
        """addresses: byte offsets per thread. 4-byte accesses pass by warps, 8 by halves, 16 by quarters."""
        cost = self.shared.setdefault(place, SharedCost())
        lanes = {16: 8, 8: 16}.get(size, LANES)
        for start in range(0, len(addresses), lanes):
            used = active[start : start + lanes]
            if used.any():
                bytes_ = addresses[start : start + lanes][used][:, None] + np.arange(0, size, 4)
                words = np.unique(bytes_ >> 2)
                cost.wavefronts += int(np.bincount(words % BANKS).max())
                cost.ideal += -(-len(words) // BANKS)

    def global_access(self, argument: int, offsets: np.ndarray, warps: np.ndarray, size: int) -> None:
        """offsets: of the threads that access; warps: theirs."""
        touched = (offsets[:, None] + np.arange(0, size, min(size, SECTOR))) // SECTOR
        keys = warps[:, None].astype(np.int64) << 40 | touched
        self.sectors[argument] = self.sectors.get(argument, 0) + len(np.unique(keys))

    @property
    def conflicts(self) -> float:
        """Wavefronts over the ideal, all lines together."""
        ideal = sum(cost.ideal for cost in self.shared.values())
        return sum(cost.wavefronts for cost in self.shared.values()) / ideal if ideal else 1.0

    def worst_lines(self, count: int = 3) -> str:
        """For messages: the lines that lose most."""
        order = sorted(self.shared.items(), key=lambda item: item[1].ideal - item[1].wavefronts)
        return ", ".join(f"{place}: {c.wavefronts} of {c.ideal}" for place, c in order[:count])
