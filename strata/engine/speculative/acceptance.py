"""How likely a proposed token is accepted, learnt from those that were tested."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def add(self, accepted: int, rejected: bool, memory: float) -> None:
        """Take in a run of accepted tokens, then perhaps a rejected one."""
        for hit in (*(1,) * accepted, *(0,) * rejected):
            self.tested = self.tested * memory + 1
            self.accepted = self.accepted * memory + hit


@dataclass
class Acceptance:
    """One request's, by the trust that its proposer put into what it proposed."""

    shared: dict[int, Counts]
    own: dict[int, Counts] = field(default_factory=dict)

    def rate(self, trust: int) -> float:
        """The chance that a token is accepted when all before it were."""
        own, shared = self.own.get(trust, Counts()), self.shared.get(trust, Counts())
        before = (shared.accepted + FIRST_GUESS) / (shared.tested + 1)
        return (own.accepted + before * SHARED_WEIGHT) / (own.tested + SHARED_WEIGHT)

    def add(self, trust: int, accepted: int, rejected: bool) -> None:
        """Learn from one verification."""
        self.own.setdefault(trust, Counts()).add(accepted, rejected, MEMORY)
        self.shared.setdefault(trust, Counts()).add(accepted, rejected, SHARED_MEMORY)
