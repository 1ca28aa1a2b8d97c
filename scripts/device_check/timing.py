"""Seconds of work on a stream, by the device's own events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from strata.device.base import Device, Stream


def seconds_of(device: Device, stream: Stream, work: Callable[[], None], rounds: int = 5) -> float:
    """The median of some rounds after one that does not count."""
    start, end = device.event(timing=True), device.event(timing=True)
    taken = []
    for _ in range(rounds + 1):
        device.record(start, stream)
        work()
        device.record(end, stream)
        device.sync(end)
        taken.append(device.elapsed_ms(start, end) / 1e3)
    return median(taken[1:])
