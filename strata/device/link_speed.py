"""How fast a device copies from and to page-locked memory, by its own events.

On a GPU this is written, not yet run on hardware; tests measure the emulated device, whose speed is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from strata.device.base import Buffer, Device

NBYTES, COPIES, ROUNDS = 64 << 20, 4, 5


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second, the median of some rounds; generation: of the link while it copied, 0 = not told."""

    to_device: float
    to_host: float
    generation: int


def link_speed(device: Device, generation: Callable[[], int] = lambda: 0, nbytes: int = NBYTES) -> LinkSpeed:
    """Copies of `nbytes` back to back. generation: asked while they are under way: an idle link is slower.

    Takes and gives back `nbytes` on either side. CapacityError when there are not as many.
    """
    there, here = device.alloc(nbytes, "link speed"), device.host_alloc(nbytes, "link speed")
    seen: list[int] = []

    def ask() -> None:
        seen.append(generation())

    try:
        to_device, to_host = (_speed(device, *way, ask) for way in ((there, here), (here, there)))
    finally:
        device.sync()
        device.free(there)
        device.free(here)
    return LinkSpeed(to_device, to_host, max(seen))


def _speed(device: Device, dst: Buffer, src: Buffer, meanwhile: Callable[[], None]) -> float:
    stream = device.stream("link speed")
    start, end = device.event(timing=True), device.event(timing=True)
    rates = []
    for _ in range(ROUNDS):
        device.record(start, stream)
        for _ in range(COPIES):
            device.copy(dst, src, stream, "link speed")
        device.record(end, stream)
        meanwhile()
        device.sync(end)
        rates.append(COPIES * dst.nbytes / device.elapsed_ms(start, end) * 1e3)
    return median(rates)
