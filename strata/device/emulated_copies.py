"""Copies of the emulated device: what they cost and what they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from strata.device.base import Copy
from strata.device.checks import Direction
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
