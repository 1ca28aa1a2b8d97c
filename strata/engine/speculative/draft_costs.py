"""What a proposer takes that is not free: its tokens, and what it has to read before it can propose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from strata.core import MOST_DRAFTED
from strata.engine.speculative.choice import Steps
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.step_times import KEPT, LEAST_GAIN, usual

DRAFT_AT_MOST = 0.45
"""Of a plain step: a draft's token before one was measured. A draft model that takes longer is of no use; and
when nothing was measured yet, 64 steps may lose just so much beside a first draft that takes as much and a
row that takes a plain step."""
BELIEVED = 3
"""Times of a token that are believed when they say that it can never pay, or that one was disturbed."""
MANY = 32
"""Tokens that are read at once: of more of them each takes hardly less."""
WITH_THE_FIRST = 2
"""Tokens that are read with the first one that is proposed: what the last verification brought."""


class DraftCosts:
    """Asks a proposer and measures it.

    busy: seconds that it worked since `settle`, reading included; spent: what is charged for that, and for
    what it did beside. reads: whether it read in this step.
    """

    def __init__(self, proposer: Proposer, clock: Callable[[], float]) -> None:
        self.proposer = proposer
        self.spent = self.busy = 0.0
        self.reads = False
        self._clock = clock
        self._tokens: deque[float] = deque(maxlen=KEPT)
        self._reading: dict[int, deque[float]] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """As `Proposer.propose`."""
        begin = self._clock()
        found = self.proposer.propose(asks)
        self._add(self._tokens, max(len(proposal.tokens) for proposal in found), self._clock() - begin)
        return found

    def read(self, ask: Ask, count: int) -> None:
        """Let it read so many tokens of a request that it has not read yet."""
        begin = self._clock()
        self.proposer.read(ask.request, count)
        took = self._clock() - begin
        self._add(self._reading.setdefault(count.bit_length(), deque(maxlen=KEPT)), count, took)
        self.reads = True

    def _add(self, times: deque[float], count: int, took: float) -> None:
        """Of `count` tokens. What disturbed it is charged to nobody, as with steps."""
        self.busy += took
        if count:
            times.append(took / count)
            if len(times) >= BELIEVED:
                took = min(took, count * usual(times))
        self.spent += took

    def readable(self, steps: float, plain: float, behind: int) -> int:
        """Of `behind` tokens so many as it can read in so many plain steps; the first time one, which says
        what they take."""
        if not self._reading:
            return int(steps >= DRAFT_AT_MOST)
        for bits in range(behind.bit_length(), 0, -1):
            least = 1 << (bits - 1)
            count = min(behind, 2 * least - 1, int(max(0.0, steps) / self.reading(plain, least)))
            if count >= least:
                return count
        return 0

    def forgive(self, steps: float, plain: float) -> float:
        """What was spent counts as so many plain steps less, at most; by how many."""
        less = min(steps, self.spent / plain)
        self.spent -= less * plain
        return less

    def settle(self) -> float:
        """Seconds that were spent since the last call."""
        spent, self.spent, self.busy = self.spent, 0.0, 0.0
        return spent

    def token(self, plain: float) -> float:
        """Plain steps that a token of all drafts together takes: not less than one that was read alone."""
        if self._tokens:
            return usual(self._tokens) / plain
        return max(DRAFT_AT_MOST, max((max(times) for times in self._reading.values()), default=0.0) / plain)

    def reading(self, plain: float, count: int) -> float:
        """Plain steps that it takes to read one of `count` tokens at once, at most: of fewer, each takes
        longer."""
        bits = count.bit_length()
        measured = max((each for each in self._reading if each <= bits), default=0)
        if measured:
            return max(1e-9, usual(self._reading[measured]) / plain)
        if not self._reading:
            return DRAFT_AT_MOST
        more = min(self._reading)
        return max(1e-9, usual(self._reading[more]) * (1 << (more - bits)) / plain)

    def knows_reading(self, count: int) -> bool:
        """Whether as many at once were read, or MANY: before, it may take far less than is known."""
        return any(bits >= min(count, MANY).bit_length() for bits in self._reading)

    def could_pay(self, requests: int, steps: Steps, token: float) -> bool:
        """Whether it would if everything was accepted. The first times may have been a model's that had still
        to be fetched from the disk."""
        if len(self._tokens) < BELIEVED:
            token = min(token, DRAFT_AT_MOST)
        return any(
            requests + rows > LEAST_GAIN * requests * (steps.expected(requests + rows) + rows * token)
            for rows in range(1, MOST_DRAFTED + 1)
        )
