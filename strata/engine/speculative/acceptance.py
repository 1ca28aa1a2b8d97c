"""How likely a proposed token is accepted, learnt from those that were tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

MEMORY = 0.97
"""Weight of what was known when one more token is tested: about 33 tokens count."""
SHARED_MEMORY = 0.995
"""The same for what all requests of a proposer have seen together."""
SHARED_WEIGHT = 4.0
"""What other requests saw counts as so many tokens that a new request tested itself."""
FIRST_GUESS = 0.7
"""Before anything was tested; field reports have 0.7 to 0.8 for a draft of 1B parameters."""


@dataclass
class Counts:
    """Tested and accepted tokens, the latest counting most. A token after a rejected one was never tested."""

    tested: float = 0.0
    accepted: float = 0.0

    def add(self, hit: bool, memory: float) -> None:
        """Take in one tested token."""
        self.tested = self.tested * memory + 1
        self.accepted = self.accepted * memory + hit


UNTESTED = Counts()


@dataclass
class Acceptance:
    """One request's, by the trust that its proposer puts into each token that it proposes."""

    shared: dict[int, Counts]
    own: dict[int, Counts] = field(default_factory=dict)

    def rate(self, trust: int) -> float:
        """The chance that a token is accepted when all before it were."""
        own, shared = self.own.get(trust, UNTESTED), self.shared.get(trust, UNTESTED)
        before = (shared.accepted + FIRST_GUESS) / (shared.tested + 1)
        return (own.accepted + before * SHARED_WEIGHT) / (own.tested + SHARED_WEIGHT)

    def chances(self, trusts: Sequence[int]) -> list[float]:
        """For every token of a proposal the chance that it is reached and accepted."""
        rates = {trust: self.rate(trust) for trust in set(trusts)}
        return list(accumulate((rates[trust] for trust in trusts), mul))

    def add(self, trusts: Sequence[int], accepted: int, rejected: bool) -> None:
        """Learn from one verification: a run of accepted tokens, then perhaps a rejected one."""
        for place, trust in enumerate(trusts[: accepted + rejected]):
            self.own.setdefault(trust, Counts()).add(place < accepted, MEMORY)
            self.shared.setdefault(trust, Counts()).add(place < accepted, SHARED_MEMORY)
