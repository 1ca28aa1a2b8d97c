"""What the makers' datasheets say about graphics cards, by PCI device id.

Dense 16-bit rates with f32 accumulation, halved from FLOP/s to multiply-adds/s. Sources: NVIDIA's whitepapers
"Ampere GA102 GPU Architecture" (2020, tables 2 and 9) and "Ada GPU Architecture" (2022, appendix A), and the
H200 datasheet (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Datasheet:
    """memory: bytes; read: bytes/s of its own memory; macs: multiply-adds/s."""

    name: str
    memory: int
    read: float
    macs: float


BY_PCI_ID = {
    "2204": Datasheet("NVIDIA GeForce RTX 3090", 24 * GIB, 936e9, 71e12 / 2),
    "2203": Datasheet("NVIDIA GeForce RTX 3090 Ti", 24 * GIB, 1008e9, 80e12 / 2),
    "2684": Datasheet("NVIDIA GeForce RTX 4090", 24 * GIB, 1008e9, 165.2e12 / 2),
    "2335": Datasheet("NVIDIA H200", 141 * 10**9, 4800e9, 989e12 / 2),
}
