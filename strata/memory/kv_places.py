"""Places for KV pages on one tier, and what moves a page from a place on one tier to one on the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from strata.memory.transfer import Transfer, TransferState


class PageMover(Protocol):
    """Copies pages between device places and host places; nothing here waits but `finish`.

    A move comes after everything that the device was given to do before it. Moves of one direction end in the
    order of their calls. The mover marks a move as DONE when it learns of its end: in `poll` and `finish`.
    """

    def move(self, device: int, host: int, outward: bool) -> Transfer:
        """Begin to copy a page: outward from the device to the host, else back."""
        ...

    def cancel(self, move: Transfer) -> bool:
        """Forget a move of which nothing has happened yet; False when it is too late for that."""
        ...

    def order(self, move: Transfer) -> None:
        """What the device is given to do from now on comes after the move."""
        ...

    def finish(self, move: Transfer) -> None:
        """Wait for the end of a move."""
        ...

    def poll(self) -> None:
        """Learn which moves have ended."""
        ...

    def issue(self) -> None:
        """Hand the moves that were begun to the device."""
        ...

    def is_quiet(self) -> bool:
        """Whether the device has finished all that it was given to do with pages."""
        ...


class Border(Protocol):
    """What else the device's memory is used for, and how much of it pages may have (`kv_border`)."""

    def widen(self, pages: int) -> int:
        """Make room for `pages` pages in all, or for as many as can be; how many there may be now."""
        ...

    def narrow(self, pages: int) -> int:
        """Give away what is beyond the first `pages` pages, or less; how many there may be now."""
        ...


class Places:
    """Places 0 to total - 1 of one tier. A place that a move still uses is free when the move has ended."""

    def __init__(self, total: int) -> None:
        self.total = total
        # A heap: low places first, so that the end is free to be given away.
        self._free = list(range(total))
        self._pending: list[tuple[Transfer, int]] = []

    @property
    def free(self) -> int:
        """Places that can be had without waiting."""
        return len(self._free)

    @property
    def pending(self) -> int:
        """Places that are free when their moves have ended."""
        return len(self._pending)

    def take(self) -> int:
        """A free place."""
        return heapq.heappop(self._free)

    def give(self, place: int, move: Transfer | None = None) -> None:
        """Take a place back: now, or when the move that uses it has ended."""
        if move is None or move.state in (TransferState.DONE, TransferState.CANCELLED):
            heapq.heappush(self._free, place)
        else:
            self._pending.append((move, place))

    def settle(self) -> None:
        """Free the places whose moves have ended."""
        pending, self._pending = self._pending, []
        for move, place in pending:
            self.give(place, move)

    def first_pending(self) -> Transfer | None:
        """The move that will free a place next."""
        return self._pending[0][0] if self._pending else None

    def resize(self, total: int) -> None:
        """Add places at the end, or take away places there, which must be free."""
        added = list(range(self.total, total))
        self._free = [place for place in self._free if place < total] + added
        heapq.heapify(self._free)
        self.total = total

    def free_places(self) -> list[int]:
        """Those that can be had without waiting, in no order."""
        return list(self._free)

    def pending_places(self) -> list[int]:
        """Those that are free when their moves have ended."""
        return [place for _, place in self._pending]

    def check(self, tier: str, used: Sequence[int]) -> None:
        """Every place has one use: those `used`, free ones and pending ones (AssertionError)."""
        everything = sorted([*used, *self.free_places(), *self.pending_places()])
        if everything != list(range(self.total)):
            raise AssertionError(f"{tier} places {everything}, there are {self.total}")


class DevicePlaces(Places):
    """Places on the device. Beyond those of the pages' own there are some that expert slots lend, at the end,
    and that go back to them as soon as nobody needs them."""

    def __init__(self, own: int, border: Border | None = None) -> None:
        super().__init__(own)
        self._own = own
        self._border = border

    @property
    def borrowed(self) -> int:
        """How many expert slots gave. They count as part of the reserve, idle pages leave them at once, and
        to give them back even kept pages are forgotten."""
        return self.total - self._own

    def is_borrowed(self, place: int) -> bool:
        """Whether an expert slot gave the place."""
        return place >= self._own

    def widen(self, lacking: int) -> None:
        """Turn slots into as many more places as are lacking, or as can be."""
        if self._border is not None:
            self.resize(self._border.widen(self.total + lacking))

    def narrow(self, reserve: int, is_quiet: Callable[[], bool]) -> None:
        """Give places at the end back to the slots, as long as `reserve` free ones stay.

        An expert is written to a slot without waiting for anybody, so the last user of a page must be done.
        """
        if self._border is None or not self.borrowed or self.free <= reserve:
            return
        used = set(range(self.total)) - set(self.free_places())
        keep = max(self._own, max(used, default=-1) + 1, len(used) + reserve)
        if keep < self.total and is_quiet():
            self.resize(self._border.narrow(keep))


@dataclass(eq=False, slots=True)
class Home:
    """Where one page lies: on the device, in the host pool, or with a move under way in both.

    reader: the last move that only read the host place (to another page's place on the device).
    """

    device: int | None = None
    host: int | None = None
    move: Transfer | None = None
    outward: bool = False
    reader: Transfer | None = None

    @property
    def leaving(self) -> bool:
        """Whether it is on its way to the host."""
        return self.move is not None and self.outward

    @property
    def arriving(self) -> bool:
        """Whether it is on its way to the device."""
        return self.move is not None and not self.outward
