"""Host memory as a cache of the disk: the experts of a model that is larger than the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.core import ExpertId
from strata.errors import CapacityError, StoreError
from strata.memory.expert_arrivals import Arriving, Bytes, Read, Reader
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim, Handle
from strata.memory.experts import ExpertSpace
from strata.memory.foresight import Foresight
from strata.memory.heat import Heat
from strata.memory.policies.base import PolicyFactory
from strata.store.expert_reader import ReadTotals

MOST_BUFFERS = 8
"""Records that pass through without a slot: as many as the disk reads at once."""
MOST_PREFETCHES = 4
"""Prefetched records queued or being read: more would keep the disk from what is needed."""


@dataclass
class HostStatistics:
    """passed: records that went through a buffer. guessed, right, dropped: prefetches begun, used before they
    were evicted, and given up before they were read."""

    passed: int = 0
    guessed: int = 0
    right: int = 0
    dropped: int = 0


class HostExperts:
    """Expert records in host memory, read from the disk when they are asked for. Belongs to one thread.

    memory: u8, 4 KiB aligned, cut into places of the largest record's size: slots of the cache, and a few
    buffers for records that the policy does not want, and for those of a long prompt, which would displace
    what decoding needs. One place is enough to compute anything; each expert that a layer uses beside others
    should have one.
    """

    def __init__(
        self,
        space: ExpertSpace,
        record_bytes: Mapping[int, int],
        memory: Bytes,
        reader: Reader,
        policy: PolicyFactory,
        heat: Heat | None = None,
        *,
        learns: bool = True,
    ) -> None:
        """record_bytes: by layer. heat: what was used before, which begins to be read; learns: it learns what
        is brought from now on.

        CapacityError when memory has no room for a record.
        """
        self.place_bytes = max(record_bytes.values())
        places = memory.nbytes // self.place_bytes
        if places < 1:
            raise CapacityError(
                f"{memory.nbytes} bytes of memory for experts, one of them has {self.place_bytes}",
                remedy="raise host.memory",
            )
        self._record_bytes = dict(record_bytes)
        self._memory = memory
        self._reader = reader
        buffers = min(MOST_BUFFERS, max(1, places // 4))
        self.cache = ExpertCache(space, places - buffers, policy)
        self.statistics = HostStatistics()
        self.foresight = Foresight()
        self._buffers = list(range(places - buffers, places))
        self._reads: dict[int, Read] = {}  # running or queued, by ticket
        self._ended: list[tuple[int, StoreError | None]] = []
        self._loading: dict[ExpertId, Read] = {}  # into slots, until loaded or abandoned
        self._guesses: dict[ExpertId, None] = {}  # prefetched and not used so far
        self._heat = heat if learns else None
        if heat is not None:
            heat.seed(self.cache.policy)
            self._warm(heat.warm_order(self.cache.slots))

    def bring(
        self, layer: int, experts: Sequence[int], *, passing: bool = False, ordered: bool = False
    ) -> Arriving:
        """Ask for experts of a layer at once; they come as they are there, see Arriving.

        passing: of a long prompt: what is not there displaces nothing. ordered: they come as named.
        """
        self.collect(0.0)
        self.cache.begin_step()  # its list of misses is for caches that choose what to insert at a step's end
        self._drop_guesses(layer, experts)
        if not passing:
            self.foresight.judge(layer, experts)
        if self._heat is not None and not passing:
            self._heat.add(layer, experts)
        return Arriving(self, layer, experts, passing, ordered)

    def lend(self, expert: ExpertId, *, passing: bool) -> Arriving:
        """One expert for somebody who copies it elsewhere: nothing is learned from that. See `bring`."""
        self.collect(0.0)
        self.cache.begin_step()
        return Arriving(self, expert.layer, [expert.index], passing, ordered=False)

    def has(self, expert: ExpertId) -> bool:
        """Whether an expert is in memory, or on its way there."""
        return self.cache.slot_of(expert) is not None or expert in self._loading

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Experts that will probably be asked for next, likeliest first.

        Those whose rank has mostly been right so far are read after all that is needed now.
        """

        def missing(index: int) -> bool:
            return not self.has(ExpertId(layer, index))

        for index in self.foresight.expect(layer, experts, missing):
            if self._waiting_guesses() >= MOST_PREFETCHES or not self._prefetch(ExpertId(layer, index)):
                return

    def collect(self, seconds: float) -> None:
        """Take in the reads that have ended; waits up to `seconds` for the first one if any is under way."""
        if not self._reads:
            return
        self._ended += self._reader.finished(seconds)
        while self._ended:  # one by one: an interrupted step (Ctrl-C) leaves the others to the next
            ticket, problem = self._ended.pop()
            read = self._reads.pop(ticket)
            read.done, read.problem = True, problem
            if read.claim is not None and problem is None:
                self.cache.loaded(read.claim)
                del self._loading[read.expert]
            elif read.users == 0:
                self._give_up(read)

    def place_of(self, record: Bytes) -> Bytes:
        """All of the place, writable, in which a record lies that the cache keeps."""
        start = record.ctypes.data - self._memory.ctypes.data
        return self._memory[start : start + self.place_bytes]

    def reads(self) -> ReadTotals:
        """What was read from the disk so far, prefetches too."""
        return self._reader.totals()

    def close(self) -> None:
        """Wait for reads that run. Afterwards nothing may be asked for."""
        self._reader.close()
        self._reads.clear()

    def check_integrity(self) -> None:
        """Cache, reads and buffers agree (AssertionError). Only while no Arriving is open."""
        self.cache.check_integrity()
        busy = [read.place for read in self._reads.values() if read.claim is None]
        _check(len(set(busy + self._buffers)) == len(busy + self._buffers), "a buffer is used twice")
        claimed = {read.expert for read in self._reads.values() if read.claim is not None}
        _check(claimed == set(self._loading), f"loading {set(self._loading)}, read {claimed}")
        _check(all(read.users == 0 for read in self._reads.values()), "somebody waits for a read")

    # -- for Arriving ------------------------------------------------------------------------------------

    def record_at(self, place: int, layer: int) -> Bytes:
        """The bytes of a place, read-only."""
        found = self._memory[place * self.place_bytes :][: self._record_bytes[layer]]
        found.flags.writeable = False
        return found

    def find(self, expert: ExpertId) -> Read | None:
        """The read that is bringing an expert into its slot; it is needed now."""
        read = self._loading.get(expert)
        if read is not None:
            read.users += 1
            if not read.done:
                self._reader.hurry(read.ticket)
        return read

    def read(self, expert: ExpertId, *, passing: bool) -> tuple[Read, Handle | None] | None:
        """Begin to read an expert for somebody; None when there is no room at the moment."""
        claim = None if passing and not self.cache.free else self.cache.admit(expert)
        if isinstance(claim, Claim):
            read = self._begin(expert, claim.slot, claim, urgent=True)
            handle = self.cache.hold(expert)
        elif self._buffers:
            read, handle = self._begin(expert, self._buffers.pop(), None, urgent=True), None
            self.statistics.passed += 1
        else:
            return None
        read.users = 1
        return read, handle

    def leave(self, read: Read) -> None:
        """Somebody who waited for a read, or used its buffer, does not any more."""
        read.users -= 1
        if read.users:
            return
        if read.done:
            self._give_up(read)
        elif read.claim is None and self._reader.cancel(read.ticket):
            del self._reads[read.ticket]
            self._buffers.append(read.place)

    def used(self, expert: ExpertId) -> None:
        """Somebody asked for an expert: if it was guessed, then rightly."""
        if expert in self._guesses:
            del self._guesses[expert]
            self.statistics.right += 1

    @property
    def on_their_way(self) -> int:
        """Experts that are being read into slots, or wait for that."""
        return len(self._loading)

    @property
    def idle(self) -> bool:
        """Whether nothing is being read."""
        return not self._reads

    # -- inside ------------------------------------------------------------------------------------------

    def _begin(self, expert: ExpertId, place: int, claim: Claim | None, *, urgent: bool) -> Read:
        read = Read(expert, place, claim)
        room = self._memory[place * self.place_bytes :][: self._record_bytes[expert.layer]]
        read.ticket = self._reader.submit(expert, room, urgent=urgent)
        self._reads[read.ticket] = read
        if claim is not None:
            self._loading[expert] = read
        return read

    def _give_up(self, read: Read) -> None:
        """An ended read that nobody needs: its buffer is free, and so is the slot of one that failed."""
        if read.claim is None:
            self._buffers.append(read.place)
        elif read.problem is not None:
            self.cache.abandon(read.claim)
            del self._loading[read.expert]
            self._guesses.pop(read.expert, None)

    def _warm(self, experts: Sequence[ExpertId]) -> None:
        """Read experts into free slots, in the background; the last one is the newest for the policy."""
        claims = [claim for claim in map(self.cache.admit, experts) if isinstance(claim, Claim)]
        for claim in reversed(claims):  # the one that will be asked for first is the newest
            self._begin(claim.expert, claim.slot, claim, urgent=False)

    def _prefetch(self, expert: ExpertId) -> bool:
        """False when there is no room for guesses."""
        claim = self.cache.admit(expert, insist=True)
        if not isinstance(claim, Claim):
            return False
        self._begin(expert, claim.slot, claim, urgent=False)
        self._guesses[expert] = None
        self.statistics.guessed += 1
        return True

    def _waiting_guesses(self) -> int:
        return sum(expert in self._loading for expert in self._guesses)

    def _drop_guesses(self, layer: int, experts: Sequence[int]) -> None:
        """Guesses for this layer that were wrong: those not begun are given up, the others forgotten."""
        wrong = [guess for guess in self._guesses if guess.layer == layer and guess.index not in experts]
        for guess in wrong:
            del self._guesses[guess]
            read = self._loading.get(guess)
            if read is None or read.claim is None or not self._reader.cancel(read.ticket):
                continue
            del self._reads[read.ticket], self._loading[guess]
            self.cache.abandon(read.claim)
            self.statistics.dropped += 1


def _check(sound: bool, problem: str) -> None:
    if not sound:
        raise AssertionError(problem)
