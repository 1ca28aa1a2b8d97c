"""What a proposer takes that is not free: its tokens, and what it has to read before it can propose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from strata.core import MOST_DRAFTED
from strata.engine.speculative.choice import Steps
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.step_times import LEAST_GAIN

DRAFT_AT_MOST = 0.45
"""Of a plain step: a draft's token before one was measured. A draft model that takes longer is of no use; and
when nothing was measured yet, 64 steps may lose just so much beside a first draft that takes as much and a
row that takes a plain step."""
KEPT = 8
"""Latest times that count, of which the fastest quarter does, as of steps (`step_times.KEPT`)."""
WITH_THE_FIRST = 2
"""Tokens that are read with the first one that is proposed: what the last verification brought."""


class DraftCosts:
    """Asks a proposer and measures it. spent: seconds since `settle`, reading included; reads: whether it did
    in this step."""

    def __init__(self, proposer: Proposer, clock: Callable[[], float]) -> None:
        self.proposer = proposer
        self.spent = 0.0
        self.reads = False
        self._clock = clock
        self._tokens: deque[float] = deque(maxlen=KEPT)
        self._reading: deque[float] = deque(maxlen=KEPT)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """As `Proposer.propose`."""
        begin = self._clock()
        found = self.proposer.propose(asks)
        took = self._clock() - begin
        self.spent += took
        longest = max(len(proposal.tokens) for proposal in found)
        if longest:
            self._tokens.append(took / longest)
        return found

    def read(self, ask: Ask, count: int) -> None:
        """Let it read so many tokens of a request that it has not read yet."""
        begin = self._clock()
        self.proposer.read(ask.request, count)
        took = self._clock() - begin
        self.spent += took
        self._reading.append(took / count)
        self.reads = True

    def readable(self, steps: float, plain: float) -> int:
        """Tokens that it can read in so many plain steps; the first time one, which says what they take."""
        if not self._reading:
            return int(steps >= DRAFT_AT_MOST)
        return int(steps / self.reading(plain)) if steps > 0 else 0

    def forgive(self, steps: float, plain: float) -> float:
        """What was spent counts as so many plain steps less, at most; by how many."""
        less = min(steps, self.spent / plain)
        self.spent -= less * plain
        return less

    def settle(self) -> float:
        """Seconds that were spent since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent

    def token(self, plain: float) -> float:
        """Plain steps that a token of all drafts together takes: not less than one that was read alone."""
        if self._tokens:
            return _usual(self._tokens) / plain
        return max(DRAFT_AT_MOST, max(self._reading, default=0.0) / plain)

    def reading(self, plain: float) -> float:
        """Plain steps that it takes to read a token, at most: many at once take less each."""
        return max(1e-9, _usual(self._reading) / plain) if self._reading else DRAFT_AT_MOST

    def could_pay(self, requests: int, steps: Steps, token: float) -> bool:
        """Whether it would if everything was accepted."""
        return any(
            requests + rows > LEAST_GAIN * requests * (steps.expected(requests + rows) + rows * token)
            for rows in range(1, MOST_DRAFTED + 1)
        )


def _usual(times: deque[float]) -> float:
    return sorted(times)[len(times) // 4]
