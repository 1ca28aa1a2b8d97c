"""How far guesses of the next layer's experts may be trusted, learned from what was asked for afterwards."""

from __future__ import annotations

from collections.abc import Sequence

TRUSTED = 0.7
"""A guess is worth a read where so many of its rank were right. A right one hides a read behind a layer's
computation; a wrong one costs a read that the disk could have spent on something needed, and a slot."""
_RANKS = 16
_WEIGHT = 0.02
"""Of one guess in the running mean."""
_FIRST_GUESSES = 256
"""Made in any case, to learn what they are worth."""
_LOOK_AGAIN = 16
"""Steps of a layer between two guesses where none is trusted, to notice when they become better."""


class Foresight:
    """Guesses are judged by rank (the likeliest first) whether or not they led to a read: watching is free.

    It begins with no trust: the first tokens show what guesses are worth in this model.
    """

    def __init__(self) -> None:
        self.trust = [0.5] * _RANKS
        self._guesses: dict[int, Sequence[int]] = {}
        self._since: dict[int, int] = {}  # steps of a layer since its last guess
        self._made = 0

    def wants(self, layer: int) -> bool:
        """Whether it is worth making a guess now."""
        since = self._since[layer] = self._since.get(layer, 0) + 1
        return max(self.trust) >= TRUSTED or self._made < _FIRST_GUESSES or since >= _LOOK_AGAIN

    def expect(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The trusted ones of a guess, likeliest first."""
        self._since[layer] = 0
        self._made += 1
        guess = self._guesses[layer] = list(experts[:_RANKS])
        return [index for index, trust in zip(guess, self.trust, strict=False) if trust >= TRUSTED]

    def judge(self, layer: int, experts: Sequence[int]) -> None:
        """What the layer asked for after all."""
        asked = set(experts)
        for rank, index in enumerate(self._guesses.pop(layer, ())):
            self.trust[rank] += _WEIGHT * ((index in asked) - self.trust[rank])
