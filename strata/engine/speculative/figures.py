"""What speculation did and what it was good for, counted since the engine started."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from strata.core import MOST_DRAFTED

RECENT_LENGTHS = 256
"""Draft lengths that are kept one by one, to show how they changed."""


@dataclass
class SpeculationFigures:
    """forwards: of single requests in decoding steps; tokens: what they brought. drafted: of the forwards,
    those with a draft; proposed and accepted: tokens of the drafts.

    tested_at, accepted_at: by position in the draft; a token behind a rejected one is not tested. lengths:
    forwards by draft length. proposed_by, tested_by, accepted_by: the same tokens by the proposer's name:
    n-grams propose where a draft model does not pay. Seconds: decoding steps without the draft model's work
    (verify), of them those with a draft in them (drafted), and the proposer's work (draft), all of the
    engine's clock.
    """

    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    tested_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTED)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTED)
    lengths: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFTED + 1))
    proposed_by: dict[str, int] = field(default_factory=dict)
    tested_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_LENGTHS))
    verify_seconds: float = 0.0
    drafted_seconds: float = 0.0
    draft_seconds: float = 0.0

    def add(self, length: int, accepted: int, rejected: bool, tokens: int, proposer: str) -> None:
        """One forward of one request with a draft of `length` by `proposer`, which brought `tokens` tokens.

        They are one more than were accepted, unless the last accepted one ended the request.
        """
        self.forwards += 1
        self.tokens += tokens
        self.lengths[length] += 1
        self.recent.append(length)
        if not length:
            return
        self.drafted += 1
        self.proposed += length
        self.accepted += accepted
        for counts, count in (
            (self.proposed_by, length),
            (self.tested_by, accepted + rejected),
            (self.accepted_by, accepted),
        ):
            counts[proposer] = counts.get(proposer, 0) + count
        for position in range(accepted + rejected):
            self.tested_at[position] += 1
            self.accepted_at[position] += position < accepted

    def rest(self, forwards: int, seconds: float) -> None:
        """So many forwards of single requests brought a token each: nothing was asked."""
        self.verify_seconds += seconds
        self.forwards += forwards
        self.tokens += forwards
        self.lengths[0] += forwards
        self.recent.extend([0] * min(forwards, RECENT_LENGTHS))

    @property
    def tokens_per_forward(self) -> float:
        """1.0 without any speculation."""
        return self.tokens / self.forwards if self.forwards else 1.0

    @property
    def acceptance(self) -> float:
        """Accepted tokens as a part of those tested."""
        tested = sum(self.tested_at)
        return self.accepted / tested if tested else 0.0

    @property
    def mean_length(self) -> float:
        """Of the latest drafts, plain steps included as 0."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def draft_share(self) -> float:
        """The proposer's part of the time of decoding."""
        total = self.draft_seconds + self.verify_seconds
        return self.draft_seconds / total if total else 0.0
