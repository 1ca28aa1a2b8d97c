"""Copies of the emulated device: what they cost, what they move, and what may be one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from strata.device.base import Copy
from strata.device.buffers import BoundsError, BufferKindError, Direction, copy_direction
from strata.device.emulated_memory import bytes_of
from strata.device.emulated_schedule import Schedule
from strata.device.figures import DeviceFigures
from strata.device.timeline import COMPUTE


def copy_cost(figures: DeviceFigures, direction: Direction, nbytes: int, copies: int) -> tuple[str, float]:
    """The engine's lane and the seconds for one call."""
    if direction == "d2d":  # every byte is read once and written once
        return COMPUTE, figures.kernel_seconds(2 * nbytes, 0)
    link = figures.h2d if direction == "h2d" else figures.d2h
    return direction, link.seconds(nbytes, copies)


def pageable_seconds(figures: DeviceFigures, direction: Direction, nbytes: int) -> float:
    """The driver stages the bytes through pinned memory of its own."""
    return copy_cost(figures, direction, 0, 1)[1] + nbytes / figures.pageable_bytes_per_s


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


def movement(copies: Sequence[Copy], schedule: Schedule) -> Callable[[], None]:
    """What moves the bytes when the op runs."""
    moves: list[Callable[[], None]] = [
        partial(np.copyto, bytes_of(copy.dst), bytes_of(copy.src)) for copy in copies
    ]
    return moves[0] if len(moves) == 1 else partial(_move_all, moves, schedule)


def _move_all(moves: list[Callable[[], None]], schedule: Schedule) -> None:
    schedule.shuffle(moves)
    for move in moves:
        move()
