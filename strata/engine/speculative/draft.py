"""A draft in the making."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.engine.speculative.confidence import trust
from strata.engine.speculative.proposer import Ask, Proposal
from strata.errors import StrataError


class Draft:
    """Of one ask, by a model that guesses token by token.

    tokens: of the text, to which the guesses are added. room: how many of them there is memory for.
    """

    def __init__(self, ask: Ask, tokens: list[int], room: int) -> None:
        self.ask, self.tokens = ask, tokens
        self._start, self._most = len(tokens), min(ask.count, room)
        self._numbers = ask.sampler.ahead(ask.count)
        self._trusts: list[int] = []

    @property
    def count(self) -> int:
        """Guesses so far."""
        return len(self.tokens) - self._start

    @property
    def proposal(self) -> Proposal:
        """What came of it."""
        return Proposal(tuple(self.tokens[self._start :]), tuple(self._trusts))

    def guess(self, logits: NDArray[np.float32]) -> bool:
        """Add what the sampler would choose of logits `[vocab]`, if anything; whether one more is wanted."""
        ask = self.ask
        try:
            token = ask.sampler.guess(logits, self.tokens, self._numbers[self.count])
        except StrataError:
            return False  # logits without a possible token: the draft ends here
        self.tokens.append(token)
        if ask.more is None:
            return self.count < self._most
        self._trusts.append(trust(logits, token))
        return ask.more(self._trusts) and self.count < self._most
