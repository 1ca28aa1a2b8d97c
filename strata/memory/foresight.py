"""How far guesses of the next layer's experts may be trusted, learned from what was asked for afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TRUSTED = 0.6
"""A guess is worth a read where so many of its rank were right. A right one hides a read behind a layer's
computation; a wrong one costs a read that the disk could have spent on something needed, and a slot. Where
65 % of the reads were right, decoding became 1.06 times as fast (docs/disk-tier.md)."""
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
        self._guesses: dict[int, list[tuple[int, int]]] = {}  # by layer: rank and expert
        self._since: dict[int, int] = {}  # steps of a layer since its last guess
        self._made = 0

    def wants(self, layer: int) -> bool:
        """Whether it is worth making a guess now."""
        since = self._since[layer] = self._since.get(layer, 0) + 1
        return max(self.trust) >= TRUSTED or self._made < _FIRST_GUESSES or since >= _LOOK_AGAIN

    def expect(self, layer: int, experts: Sequence[int], missing: Callable[[int], bool]) -> list[int]:
        """The trusted ones of a guess (likeliest first) that are missing.

        Only those count: favourites are guessed most easily, and are in memory already.
        """
        self._since[layer] = 0
        self._made += 1
        guess = [(rank, index) for rank, index in enumerate(experts[:_RANKS]) if missing(index)]
        self._guesses[layer] = guess
        return [index for rank, index in guess if self.trust[rank] >= TRUSTED]

    def judge(self, layer: int, experts: Sequence[int]) -> None:
        """What the layer asked for after all."""
        asked = set(experts)
        for rank, index in self._guesses.pop(layer, ()):
            self.trust[rank] += _WEIGHT * ((index in asked) - self.trust[rank])
