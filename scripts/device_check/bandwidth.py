"""Each op's bytes per second beside what the card's own copies reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from device_check.launches import Bench, LaunchSet
from device_check.machine import open_device
from device_check.stages import stage_main
from device_check.timing import seconds_of

REPEATS = 20
Make = Callable[[], LaunchSet]


def ops(bench: Bench, emulated: bool) -> dict[str, Make]:
    """By name. The emulated ones are small: every thread of every block is run."""
    if emulated:
        return {
            "rms_norm": partial(bench.rms_norm, 1, 256),
            "linear w4g128, 1 token": partial(bench.linear, "w4g128", 64, 256, 1),
            "experts w4g64, 1 token": partial(bench.experts, "w4g64", 64, 64, 2),
            "attention int8, 64 tokens": partial(bench.attention, "int8", 8, 1, 64, 64),
            "router": partial(bench.router, 1, 64, 8, 2),
        }
    return {
        "rms_norm": partial(bench.rms_norm, 1, 2048),
        "linear w4g128 5120 x 2048, 1 token": partial(bench.linear, "w4g128", 5120, 2048, 1),
        "linear w4g128 5120 x 2048, 8 tokens": partial(bench.linear, "w4g128", 5120, 2048, 8),
        "linear w8 151936 x 2048, 1 token": partial(bench.linear, "w8", 151_936, 2048, 1),
        "linear bf16 5120 x 2048, 1 token": partial(bench.linear, "bf16", 5120, 2048, 1),
        "linear w4g128 5120 x 2048, 512 tokens": partial(bench.linear, "w4g128", 5120, 2048, 512),
        "experts w4g64, 8 of 2048 x 768, 1 token": partial(bench.experts, "w4g64", 2048, 768, 8),
        "attention int8, 4096 tokens": partial(bench.attention, "int8", 32, 4, 128, 4096),
        "attention int8, 32768 tokens": partial(bench.attention, "int8", 32, 4, 128, 32_768),
        "attention bf16, 4096 tokens": partial(bench.attention, "bf16", 32, 4, 128, 4096),
        "router, 128 experts": partial(bench.router, 1, 2048, 128, 8),
    }


def run(emulated: bool) -> dict[str, Any]:
    """Seconds of one run, bytes that it must move, and their rate as a share of a copy's inside the card."""
    device, kernels = open_device(emulated)
    bench = Bench(device, kernels, emulated)
    copy = copy_rate(bench, emulated)
    result: dict[str, Any] = {"copy_bytes_per_second": copy, "ops": {}, "problem": ""}
    repeats = 1 if emulated else REPEATS
    for name, make in ops(bench, emulated).items():
        try:
            result["ops"][name] = measure(bench, make(), repeats, copy)
        except Exception as error:  # one op that fails must not hide the others
            result["problem"] += f"{name}: {type(error).__name__}: {error}\n"
    device.close()
    return result


def measure(bench: Bench, launches: LaunchSet, repeats: int, copy: float) -> dict[str, float]:
    """Runs back to back, so that the time between launches is part of it, as in a model."""

    def work() -> None:
        for index in range(repeats):
            launches.make(index)

    seconds = seconds_of(bench.device, bench.stream, work) / repeats
    rate = launches.nbytes / seconds
    return {"seconds": seconds, "bytes": launches.nbytes, "bytes_per_second": rate, "share": rate / copy}


def copy_rate(bench: Bench, emulated: bool) -> float:
    """Bytes read and written per second by a copy inside the card."""
    nbytes = (1 << 20) if emulated else (512 << 20)
    device = bench.device
    source, target = device.alloc(nbytes, "copy"), device.alloc(nbytes, "copy")
    seconds = seconds_of(device, bench.stream, lambda: device.copy(target, source, bench.stream, "copy"))
    device.free(source)
    device.free(target)
    return 2 * nbytes / seconds


if __name__ == "__main__":
    stage_main(run)
