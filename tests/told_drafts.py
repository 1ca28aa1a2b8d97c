"""A proposer of drafts that knows the answers, for tests of those who verify them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from strata.core import Request
from strata.engine.scheduler import Work
from strata.engine.speculative.proposer import Ask, Proposal


class Told:
    """Proposes what it was told, a wrong token now and then."""

    name, free, follows = "told", True, False

    def __init__(self, answers: Mapping[str, list[int]], lies: float, vocab: int) -> None:
        self.answers, self.lies, self.vocab, self.random = answers, lies, vocab, random.Random(1)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal(tuple(self._tokens(ask))) for ask in asks]

    def _tokens(self, ask: Ask) -> list[int]:
        done = len(ask.request.generated)
        right = self.answers[ask.request.request_id][done : done + ask.count]
        return [self.random.randrange(self.vocab) if self.random.random() < self.lies else t for t in right]

    def glance(self, request: Request) -> int:
        """Nothing is known beforehand."""
        return 0

    def behind(self, request: Request) -> int | None:
        return 0

    def read(self, request: Request, count: int) -> None: ...

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def check_integrity(self, running: set[str]) -> None: ...
