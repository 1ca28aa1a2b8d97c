"""What proposers are asked and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from strata.core import Request
from strata.engine.sampler import Sampler
from strata.engine.scheduler import Work


@dataclass(frozen=True)
class Ask:
    """count: tokens wanted after the request's last one, at most. sampler: what will choose the real ones.

    more: asked by a proposer that is not free after each token, with the trusts of all of them, whether it is
    to go on; None: it is, and nobody needs trusts.
    """

    request: Request
    count: int
    sampler: Sampler
    more: Callable[[Sequence[int]], bool] | None = None


class Proposal(NamedTuple):
    """tokens: fewer than wanted, or none.

    trusts: one for each token: those of one trust are right about as often. (): all have the same.
    """

    tokens: tuple[int, ...] = ()
    trusts: tuple[int, ...] = ()

    def trusted(self, most: int) -> tuple[int, ...]:
        """The trusts of the first `most` tokens."""
        return (self.trusts or (0,) * len(self.tokens))[:most]


class Proposer(Protocol):
    """Guesses how texts go on. Belongs to the engine's thread; knows of a request until `forget`.

    free: proposing costs next to nothing, so that it may be asked for more than will be verified. follows:
    `follow` is to be called after every step.
    """

    name: str
    free: bool
    follows: bool

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal for each ask, in order. Nothing that was proposed before is certain: see `tokens`."""
        ...

    def behind(self, request: Request) -> int | None:
        """Tokens of the text to be read before the next proposal; None: there will be none (now)."""
        ...

    def read(self, request: Request, count: int) -> None:
        """Read so many of them."""
        ...

    def glance(self, request: Request) -> int:
        """The trust of its next token, as far as that costs nothing to say; 0: none is known of."""
        ...

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """The model computed a step: compute what cannot be made up for later.

        kept: rows of each work that were no rejected draft. Requests that ended in it are forgotten already.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request ended; harmless when nothing is known of it."""
        ...

    def check_integrity(self, running: set[str]) -> None:
        """AssertionError when something of a request that does not run is still there."""
        ...
