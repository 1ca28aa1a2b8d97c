"""What is on its way from the disk into host memory, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import CapacityError, StoreError
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim, Handle
from strata.store.expert_reader import ReadTotals

Bytes = NDArray[np.uint8]

ORDERED_GROUP = 8
"""Experts of a long prompt that are given at once: their outputs wait in memory to be added in order."""
_WAIT_SECONDS = 1.0
"""Per look at the reader; a read that takes longer is waited for again."""


class Reader(Protocol):
    """What reads records (`store.expert_reader.ExpertReader`)."""

    def submit(self, expert: ExpertId, into: Bytes, *, urgent: bool) -> int:
        """Begin to read a record; a ticket."""
        ...

    def hurry(self, ticket: int) -> None:
        """It is needed now."""
        ...

    def cancel(self, ticket: int) -> bool:
        """True: it never began."""
        ...

    def finished(self, seconds: float) -> list[tuple[int, StoreError | None]]:
        """Reads that have ended, and how."""
        ...

    def totals(self) -> ReadTotals:
        """Sums so far."""
        ...

    def close(self) -> None:
        """Wait for what runs."""
        ...


class Read:
    """A record on its way from the disk. claim None: into a buffer. users: how many wait for it."""

    __slots__ = ("claim", "done", "expert", "place", "problem", "ticket", "users")

    def __init__(self, expert: ExpertId, place: int, claim: Claim | None) -> None:
        self.expert = expert
        self.place = place
        self.claim = claim
        self.ticket = 0
        self.users = 0
        self.done = False
        self.problem: StoreError | None = None


class Landing(Protocol):
    """Where experts arrive (`expert_host.HostExperts`)."""

    cache: ExpertCache

    @property
    def idle(self) -> bool:
        """Whether nothing is being read."""
        ...

    def collect(self, seconds: float) -> None:
        """Take in the reads that have ended; waits up to `seconds` for the first one if any is under way."""
        ...

    def find(self, expert: ExpertId) -> Read | None:
        """The read that is bringing an expert into its slot; it is needed now."""
        ...

    def read(self, expert: ExpertId, *, passing: bool) -> tuple[Read, Handle | None] | None:
        """Begin to read an expert for somebody; None when there is no room at the moment."""
        ...

    def used(self, expert: ExpertId) -> None:
        """Somebody asked for an expert."""
        ...

    def leave(self, read: Read) -> None:
        """Somebody who waited for a read, or used its buffer, does not any more."""
        ...

    def record_at(self, place: int, layer: int) -> Bytes:
        """The bytes of a place, read-only."""
        ...


class Arriving:
    """Experts on their way: a context manager whose iterator gives {index: record} as they are there.

    Every expert comes once. Records, u8 `[record_bytes]`, are valid until the next group is asked for; when
    the experts need more room than there is, the others are read meanwhile into what the last group leaves.
    StoreError for an expert that cannot be read.
    """

    def __init__(
        self, host: Landing, layer: int, experts: Sequence[int], passing: bool, ordered: bool
    ) -> None:
        self._host = host
        self._layer = layer
        self._passing = passing
        self._most = ORDERED_GROUP if ordered else None
        self._ordered = ordered
        self._left = list(dict.fromkeys(experts))
        self._handles: dict[int, Handle] = {}
        self._reads: dict[int, Read] = {}
        self._group: list[int] = []
        acquired = host.cache.acquire(layer, self._left, prefill=passing)
        self._handles.update((handle.expert.index, handle) for handle in acquired.handles)
        for handle in acquired.loading:
            read = host.find(handle.expert)
            assert read is not None, f"{handle.expert} is loading, but nobody reads it"
            self._reads[handle.expert.index] = read
        for handle in acquired.handles:
            host.used(handle.expert)
        self._missing = [expert.index for expert in acquired.misses]
        self._ask()

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[int, Bytes]]:
        return self

    def __next__(self) -> dict[int, Bytes]:
        self._release(self._group)
        self._group = []
        if not self._left:
            raise StopIteration
        while True:
            self._ask()
            self._raise_problem()
            self._group = self._ready()
            if self._group:
                break
            self._wait()
        self._left = [index for index in self._left if index not in self._group]
        return {index: self._host.record_at(self._place(index), self._layer) for index in self._group}

    @property
    def is_kept(self) -> bool:
        """Whether all that was given last lies in slots, and stays there until close, not in a buffer."""
        return all(index in self._handles for index in self._group)

    def close(self) -> None:
        """Give up what has not come; what is being read into a slot will be there for others."""
        self._missing, self._left, self._group = [], [], []
        self._release(list({**self._handles, **self._reads}))

    def _ask(self) -> None:
        """Begin to read what is missing, as far as there is room."""
        while self._missing:
            index = self._missing[0]
            begun = self._host.read(ExpertId(self._layer, index), passing=self._passing)
            if begun is None:
                return
            del self._missing[0]
            self._reads[index], handle = begun
            if handle is not None:
                self._handles[index] = handle

    def _wait(self) -> None:
        if self._host.idle:
            raise CapacityError(
                f"layer {self._layer} waits for {len(self._left)} experts, all memory for experts is in use",
                remedy="raise host.memory",
            )
        self._host.collect(_WAIT_SECONDS)

    def _raise_problem(self) -> None:
        for read in self._reads.values():
            if read.problem is not None:
                raise read.problem

    def _ready(self) -> list[int]:
        """What can be given now."""
        ready = []
        for index in self._left:
            read = self._reads.get(index)
            if (read is None and index in self._handles) or (read is not None and read.done):
                ready.append(index)
            elif self._ordered:
                break
        return ready[: self._most]

    def _place(self, index: int) -> int:
        read = self._reads.get(index)
        return self._handles[index].slot if read is None else read.place

    def _release(self, group: Sequence[int]) -> None:
        for index in group:
            handle = self._handles.pop(index, None)
            if handle is not None:
                self._host.cache.release(handle)
            read = self._reads.pop(index, None)
            if read is not None:
                self._host.leave(read)
