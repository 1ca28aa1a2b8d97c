"""Which host memory the driver page-locks, how fast, and what that is worth (`memory.locked_pieces`)."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_check.machine import open_device
from device_check.stages import stage_main
from device_check.timing import seconds_of
from strata.device.base import Buffer, Copy, Device
from strata.device.buffers import PageLockError
from strata.memory.transfer import Priority
from strata.memory.transfers import TransferOptions, TransferQueue

Bytes = NDArray[np.uint8]


def run(emulated: bool) -> dict[str, Any]:
    """mapped: a file, read-only, as the store is; arena: memory that can be written."""
    device, _ = open_device(emulated)
    nbytes = (1 << 20) if emulated else (256 << 20)
    there = device.alloc(nbytes, "there")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(nbytes))
        file.flush()
        mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        mapped = locked(device, there, np.frombuffer(mapping, np.uint8))
    arena = np.zeros(nbytes, np.uint8)
    own, plain = locked(device, there, arena), staged(device, there, arena)
    device.close()
    return {"mapped": mapped, "arena": own, "staged": plain, "bytes": nbytes, "problem": own["refused"]}


def locked(device: Device, there: Buffer, memory: Bytes) -> dict[str, Any]:
    """refused: the driver's reason, or "". Seconds of locking and of a copy to the device, None without."""
    begin = device.now()
    try:
        here = device.host_register(memory, "locked")
    except PageLockError as error:
        return {"refused": error.cause, "lock_seconds": None, "copy_seconds": None}
    seconds = device.now() - begin
    stream = device.stream("locked")
    copy = seconds_of(device, stream, lambda: device.copy(there, here, stream, "locked"))
    device.free(here)
    return {"refused": "", "lock_seconds": seconds, "copy_seconds": copy}


def staged(device: Device, there: Buffer, memory: Bytes) -> float:
    """Seconds of a copy from plain memory through the staging buffers, the second of two."""
    queue = TransferQueue(device, TransferOptions(staging_bytes=min(4 << 20, memory.nbytes // 4)))
    here = device.host_pageable(memory, "plain")
    for _ in range(2):
        begin = device.now()
        queue.finish(queue.submit([Copy(there, here)], Priority.NOW, 0))
        seconds = device.now() - begin
    device.free(here)
    return seconds


if __name__ == "__main__":
    stage_main(run)
