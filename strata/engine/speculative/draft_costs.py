"""What a proposer takes that is not free: its tokens, and what it has to read before it can propose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from strata.core import MOST_DRAFTED
from strata.engine.speculative.choice import Steps
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.step_times import LEAST_GAIN

DRAFT_AT_MOST = 0.5
"""Of a plain step: a draft's token before one was measured. A draft model that takes longer is of no use."""
KEPT = 8
"""Latest times that count, of which the fastest quarter does, as of steps (`step_times.KEPT`)."""
WITH_THE_FIRST = 2
"""Tokens that are read with the first one that is proposed: what the last verification brought."""


class DraftCosts:
    """Asks a proposer and measures it. spent: seconds since `settle`, reading included."""

    def __init__(self, proposer: Proposer, clock: Callable[[], float]) -> None:
        self.proposer = proposer
        self.spent = 0.0
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

    def settle(self) -> float:
        """Seconds that were spent since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent

    def token(self, plain: float) -> float:
        """Plain steps that a token of all drafts together takes."""
        return _usual(self._tokens) / plain if self._tokens else DRAFT_AT_MOST

    def reading(self, plain: float) -> float:
        """Plain steps that it takes to read a token, at most: many at once take less each."""
        return _usual(self._reading) / plain if self._reading else DRAFT_AT_MOST

    def could_pay(self, requests: int, steps: Steps, token: float) -> bool:
        """Whether it would if everything was accepted."""
        return any(
            requests + rows > LEAST_GAIN * requests * (steps.expected(requests + rows) + rows * token)
            for rows in range(1, MOST_DRAFTED + 1)
        )


def _usual(times: deque[float]) -> float:
    return sorted(times)[len(times) // 4]
