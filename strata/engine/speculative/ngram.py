"""Proposes what followed the last time that the text read like this. No model: for texts that repeat."""

from __future__ import annotations

from collections.abc import Sequence

from strata.core import MOST_DRAFTED, Request
from strata.engine.scheduler import Work
from strata.engine.speculative.proposer import Ask, Proposal

PLACES = 4
"""Earlier places that are compared; the longest match wins, the latest among equals."""
LONGEST = 16
"""Tokens that are compared: more of them say nothing that these do not say already."""
_TRUSTS = tuple(min(matched, LONGEST).bit_length() for matched in range(LONGEST + MOST_DRAFTED))


class NgramProposer:
    """See `Proposer`. trusts: how many tokens matched, by powers of two (2 and 3, 4 to 7, 8 to 15, 16).

    When a draft's first tokens are right, they match, too, where the next one is tested.
    """

    name = "ngram"
    free, follows = True, False

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """What followed the longest match."""
        return [self._propose(ask) for ask in asks]

    def behind(self, request: Request) -> int | None:
        """None is: a text is read when it is asked for."""
        return 0

    def read(self, request: Request, count: int) -> None:
        """Nothing."""

    def glance(self, request: Request) -> int:
        """By the one place where the text last read like this, and how long it has followed that."""
        matched = self._text(request).matched(request.tokens)
        return _TRUSTS[min(matched, LONGEST)] if matched else 0

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """Nothing."""

    def forget(self, request_id: str) -> None:
        """Drop its index."""
        self._texts.pop(request_id, None)

    def check_integrity(self, running: set[str]) -> None:
        """Only running requests have an index."""
        if not set(self._texts) <= running:
            raise AssertionError(f"n-grams of {set(self._texts) - running} are kept, {running} run")

    def _propose(self, ask: Ask) -> Proposal:
        tokens, text = ask.request.tokens, self._text(ask.request)
        text.read(tokens)
        end, matched = text.longest_match(tokens)
        if not matched:
            return Proposal()
        return Proposal(_continued(tokens, end, ask.count), _TRUSTS[matched : matched + ask.count])

    def _text(self, request: Request) -> _Text:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = _Text()
        return text


class _Text:
    """Where each pair of tokens of one text ended, as chains from the latest place to the first.

    A pair takes 16 bytes of list and an entry of a dict; 100,000 tokens are read in about 50 ms, once.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = [0]  # by the index behind a pair: the one of the same pair before, or 0
        self._compared = self._place = self._followed = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that are new. Known ones never change: they are the request's, no draft's."""
        for end in range(len(self._earlier), len(tokens) + 1):
            if end < 2:
                self._earlier.append(0)
                continue
            pair = tokens[end - 2] << 32 | tokens[end - 1]
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = end

    def matched(self, tokens: Sequence[int]) -> int:
        """Of the last tokens, those that are as at the place that the text follows; 0: no two are."""
        self.read(tokens)
        place, followed, earlier = self._place, self._followed, self._earlier
        for end in range(self._compared, len(tokens)):
            if place and tokens[place] == tokens[end]:
                place += 1
                followed += 1
            else:
                place, followed = earlier[end + 1], 0
        self._compared, self._place, self._followed = len(tokens), place, followed
        return 2 + followed if place else 0

    def longest_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The index behind the earlier place that reads most like the end, and how many tokens agree.

        (0, 0): there is none.
        """
        best = most = 0
        place = self._earlier[len(tokens)]
        for _ in range(PLACES):
            if not place:
                break
            matched = _matched(tokens, place)
            if matched > most:
                best, most = place, matched
            place = self._earlier[place]
        return best, most


def _matched(tokens: Sequence[int], end: int) -> int:
    """Tokens before `end` that agree with the text's last ones, LONGEST at most. Two do already."""
    last, count = len(tokens), 2
    while count < LONGEST and count < end and tokens[end - count - 1] == tokens[last - count - 1]:
        count += 1
    return count


def _continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; where the text ends, it goes round: it repeats itself right now."""
    if start + count <= len(tokens):
        return tuple(tokens[start : start + count])
    period = len(tokens) - start
    return tuple(tokens[start + i % period] for i in range(count))
