"""How much of a copy to the device hides under kernels, and how much of the kernels' time that costs."""

from __future__ import annotations

from typing import Any

from device_check.launches import Bench
from device_check.machine import open_device
from device_check.stages import stage_main
from device_check.timing import seconds_of

LEAST_HIDDEN = 0.5


def run(emulated: bool) -> dict[str, Any]:
    """hidden: share of the shorter of both that running them together saves."""
    device, kernels = open_device(emulated)
    bench = Bench(device, kernels, emulated)
    nbytes = (1 << 20) if emulated else (256 << 20)
    there, here = device.alloc(nbytes, "copied"), device.host_alloc(nbytes, "copied")
    copies, side = device.stream("copies"), device.event()
    launches = bench.linear("w4g128", *((64, 256) if emulated else (5120, 2048)), 1)
    count = 4 if emulated else 400

    def compute() -> None:
        for index in range(count):
            launches.make(index)

    def copy() -> None:
        device.copy(there, here, copies, "overlap")

    def both() -> None:
        device.record(side, bench.stream)
        device.wait(copies, side)
        copy()
        compute()
        device.record(side, copies)
        device.wait(bench.stream, side)

    alone = seconds_of(device, copies, copy)
    busy = seconds_of(device, bench.stream, compute)
    together = seconds_of(device, bench.stream, both)
    hidden = (alone + busy - together) / min(alone, busy)
    device.close()
    return {
        "copy_seconds": alone,
        "copy_bytes_per_second": nbytes / alone,
        "compute_seconds": busy,
        "together_seconds": together,
        "hidden": hidden,
        "problem": "" if hidden >= LEAST_HIDDEN else f"{hidden:.0%} of the shorter is hidden",
    }


if __name__ == "__main__":
    stage_main(run)
