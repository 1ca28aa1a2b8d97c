"""How likely a proposed token is accepted, learnt from those that were tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MEMORY = 0.97
"""Weight of what was known when one more token is tested: about 33 tokens count."""
SHARED_MEMORY = 0.995
"""The same for what all requests of a proposer have seen together."""
SHARED_WEIGHT = 4.0
"""What other requests saw counts as so many tokens that a new request tested itself."""
FIRST_GUESS = 0.7
"""Before anything was tested; field reports have 0.7 to 0.8 for a draft of 1B parameters."""
GUESS_WEIGHT = 8.0
"""So many tokens' worth is the guess that a later token is accepted as often as those before it. With one,
the first later token that was wrong by chance ended longer drafts for good."""
AFTER_MISS = 0.7
"""A draft after one whose first token was wrong is thought to be right so much less often, until it was seen
how often it is: right and wrong proposals come in runs."""
MOST_MISSES = 3
"""More of them in a row say nothing new."""


@dataclass(slots=True)
class Counts:
    """Tested and accepted tokens, the latest counting most. A token after a rejected one was never tested."""

    tested: float = 0.0
    accepted: float = 0.0

    def add(self, hit: bool, memory: float, times: int = 1) -> None:
        """Take in a tested token, or some in a row that were all accepted or all not."""
        kept = memory**times
        gained = (1 - kept) / (1 - memory)
        self.tested = self.tested * kept + gained
        self.accepted = self.accepted * kept + (gained if hit else 0.0)


Key = tuple[int, int]
"""A token's trust, and for the first one of a draft how many drafts before it began wrong (else -1)."""
UNTESTED = Counts()
_INSIDE = -1


@dataclass(slots=True)
class Acceptance:
    """One request's of one proposer, by the trust that it puts into each token that it proposes.

    shared: what all its requests saw. misses: verifications in a row whose first token was wrong.
    guesses: how often each trust is thought to be right before anything was tested; (): as often as the
    tokens before.
    """

    shared: dict[Key, Counts]
    guesses: Sequence[float] = ()
    own: dict[Key, Counts] = field(default_factory=dict)
    misses: int = 0

    def first(self, trust: int) -> float:
        """The chance that a draft's first token is accepted, after so many that were not."""
        rate = (self.guesses[trust] if self.guesses else FIRST_GUESS) / AFTER_MISS
        for misses in range(self.misses + 1):
            rate = self._rate((trust, misses), AFTER_MISS * rate)
        return rate

    def chances(self, trusts: Sequence[int]) -> list[float]:
        """For every token of a proposal the chance that it is reached and accepted."""
        if not trusts:
            return []
        chance = self.first(trusts[0])
        found, last, rate = [chance], _INSIDE, self._rate((trusts[0], 0), FIRST_GUESS)
        for trust in trusts[1:]:
            if trust != last:
                guess = self.guesses[trust] if self.guesses else rate
                last, rate = trust, self._rate((trust, _INSIDE), guess, GUESS_WEIGHT)
            chance *= rate
            found.append(chance)
        return found

    def add(self, trusts: Sequence[int], accepted: int, rejected: bool) -> None:
        """Learn from one verification: a run of accepted tokens, then perhaps a rejected one."""
        tested = trusts[: accepted + rejected]
        if not tested:
            return
        self._add((tested[0], self.misses), accepted > 0)
        place = 1
        while place < accepted:  # stretches of one trust at once: drafts of 16 tokens have five
            end = place + 1
            while end < accepted and tested[end] == tested[place]:
                end += 1
            self._add((tested[place], _INSIDE), True, end - place)
            place = end
        if rejected and accepted:
            self._add((tested[accepted], _INSIDE), False)
        if accepted:
            self.misses = 0
        elif rejected:
            self.misses = min(self.misses + 1, MOST_MISSES)

    def _add(self, key: Key, hit: bool, times: int = 1) -> None:
        self.own.setdefault(key, Counts()).add(hit, MEMORY, times)
        self.shared.setdefault(key, Counts()).add(hit, SHARED_MEMORY, times)

    def _rate(self, key: Key, guess: float, weight: float = 1.0) -> float:
        own, shared = self.own.get(key, UNTESTED), self.shared.get(key, UNTESTED)
        before = (shared.accepted + weight * guess) / (shared.tested + weight)
        return (own.accepted + before * SHARED_WEIGHT) / (own.tested + SHARED_WEIGHT)
