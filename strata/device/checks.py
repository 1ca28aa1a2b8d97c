"""What every device checks of a copy, a fill or a launch, and whether a graph still is what was captured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from strata.device.base import Copy, Launch
from strata.device.buffers import BoundsError, Buffer, BufferKindError, DeviceError

Direction = Literal["h2d", "d2h", "d2d"]


def copy_direction(dst: Buffer, src: Buffer) -> Direction:
    """Which engine moves a copy, after the checks that every device makes of one.

    BoundsError: sizes differ or the ranges overlap. BufferKindError: both on the host, or read-only.
    """
    dst.require_live()
    src.require_live()
    dst.require_writable()
    if dst.nbytes != src.nbytes:
        raise BoundsError(
            f"{src.nbytes} bytes of {src} do not fit {dst}, which has {dst.nbytes}",
            remedy="slice both to the same size",
        )
    if dst.overlaps(src):
        raise BoundsError(f"{dst} and {src} overlap", remedy="copy through a third buffer")
    to_device, from_device = dst.allocation.kind == "device", src.allocation.kind == "device"
    if to_device:
        return "d2d" if from_device else "h2d"
    if from_device:
        return "d2h"
    raise BufferKindError(f"{src} and {dst} are both host memory", remedy="use host_copy")


def batch_direction(copies: Sequence[Copy]) -> Direction:
    """The one direction of a batch; BufferKindError or BoundsError when it cannot be one."""
    directions = {copy_direction(*copy) for copy in copies}
    pageable = [buffer for copy in copies for buffer in copy if buffer.kind == "pageable"]
    if len(directions) != 1 or "d2d" in directions or pageable:
        raise BufferKindError(
            f"a batch of {len(copies)} copies has the directions {sorted(directions)} "
            f"and {len(pageable)} pageable buffers",
            remedy="give one or more copies between device and pinned memory, all in one direction",
        )
    # Sources and destinations are of different kinds, so only destinations can meet.
    written = sorted((copy.dst for copy in copies), key=lambda dst: (dst.address, dst.nbytes))
    for first, second in pairwise(written):
        if first.overlaps(second):
            raise BoundsError(
                f"a batch writes {first} and {second}, which overlap, in no particular order",
                remedy="use two calls",
            )
    return directions.pop()


def check_fill(dst: Buffer, value: int) -> None:
    """DeviceError for what is no byte, BufferKindError for memory that is not the device's."""
    if not 0 <= value <= 255:
        raise DeviceError(f"{value} is not the value of a byte", remedy="give 0 to 255")
    if dst.kind != "device":
        raise BufferKindError(f"fill of {dst}", remedy="write host memory through host_write")


def check_reach(launch: Launch) -> None:
    """BufferKindError where a kernel is given memory that no kernel reaches."""
    for buffer in (*launch.reads, *launch.writes):
        if buffer.kind == "pageable":
            raise BufferKindError(f"{launch.kernel.name} is given {buffer}", remedy="copy it to the device")


def differences(captured: Sequence[Launch], now: Sequence[Launch]) -> str:
    """The first way in which two lists of launches ask for other work, in words; "" when there is none.

    What they touch and their labels are not compared: a graph does not know them.
    """
    if len(captured) != len(now):
        return f"{len(captured)} launches were captured, now there are {len(now)}"
    for old, new in zip(captured, now, strict=True):
        if old.kernel != new.kernel:
            return f"{old.kernel.name} was captured, now it is {new.kernel.name}"
        if (old.grid, old.block, old.shared_bytes) != (new.grid, new.block, new.shared_bytes):
            return f"{old.kernel.name}: the grid was {old.grid}, now it is {new.grid}"
        if old.arguments != new.arguments:
            pairs = enumerate(zip(old.arguments, new.arguments, strict=True))
            index, (was, is_now) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            return f"{old.kernel.name}: argument {index} was {was}, now it is {is_now}"
    return ""
