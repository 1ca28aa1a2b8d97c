"""Decides what a step verifies, and learns from what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from strata.core import Request
from strata.engine.metrics import Phase
from strata.engine.scheduler import Work
from strata.engine.speculative.costs import ByCosts
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.figures import SpeculationFigures
from strata.engine.speculative.ledger import Promise
from strata.engine.speculative.proposer import Ask, Proposer
from strata.engine.speculative.rule import ByRule
from strata.engine.speculative.step_times import Estimate


class LengthPolicy(Protocol):
    """How long drafts are."""

    @property
    def known(self) -> set[str]:
        """Requests of which something is kept."""
        ...

    @property
    def drafted_by(self) -> str:
        """Name of what the latest drafts of `propose` are from."""
        ...

    def rests(self, decoding: Sequence[Request]) -> int:
        """How many steps are not to be asked about, from the next one of these requests on; 0: it is."""
        ...

    def rested(self, requests: int, steps: int, seconds: float) -> None:
        """So many steps of so many requests were not. seconds: from the first one's beginning until now."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The drafts of a step, one for each ask, which may be empty."""
        ...

    def verified(self, work: Work, accepted: int, rejected: bool) -> None:
        """Of a request's draft so many tokens were right, and then one was wrong or none was tested."""
        ...

    def measured(self, works: Sequence[Work], kept: Sequence[int], seconds: float, asking: float) -> None:
        """A step that only decoded. kept: as of the engine's; seconds: it took without the `asking` ones that
        were spent on drafts beside it."""
        ...

    def charge(self, seconds: float) -> None:
        """The proposer worked so long beside proposing."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended."""
        ...


class _Rest:
    """Steps that nothing is asked about: when they began, and what had been decoded then."""

    __slots__ = ("begin", "decoded", "requests", "seconds", "tokens")

    def __init__(self, requests: int, decoded: Phase, begin: float) -> None:
        self.requests, self.decoded, self.begin = requests, decoded, begin
        self.tokens, self.seconds = decoded.tokens, decoded.seconds


class Speculator:
    """Belongs to the engine's thread, which calls `rests` at the beginning of every step; where that is
    False, `propose`, then `verified` for each request whose forward is complete, then `measured`. asked: the
    latest step was such a one. figures: other threads may read them; they lag behind by a few steps until all
    requests have ended.

    lengths: the rule by recent acceptance, or a fixed length. estimate: what steps cost before they were
    measured; None: costs do not count, every draft is as long as the rule says. promise: over what a request
    keeps nearly the speed of plain decoding, with costs (`ByCosts`); spare: what proposes then while
    `proposer`, which is not free, does not pay. clock: in seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: LengthOptions,
        estimate: Estimate | None,
        clock: Callable[[], float] = time.perf_counter,
        promise: Promise = "request",
        spare: Proposer | None = None,
    ) -> None:
        self.proposer = proposer
        self.asked = False
        self.figures = SpeculationFigures()
        self._proposers = [proposer] if spare is None else [proposer, spare]
        self._followers = [each for each in self._proposers if each.follows]
        self._policy: LengthPolicy = (
            ByRule(proposer, lengths)
            if estimate is None
            else ByCosts(proposer, lengths, estimate, clock, promise, spare)
        )
        self._clock = clock
        self._begin = self._proposed_at = self._verifying = self._learning = 0.0
        self._rest = 0
        self._resting: _Rest | None = None

    def rests(self, running: Sequence[Request], decoded: Phase) -> bool:
        """Whether the step that begins, of these requests, goes without: asking takes time, too.

        Those whose prompt is still computed do not count. decoded: what the engine's steps have decoded,
        which it goes on counting.
        """
        if self._rest:
            self._rest -= 1
            return True
        self._account_rest()
        self._begin = self._clock()
        decoding = [request for request in running if request.computed >= len(request.prompt)]
        rest = 0 if self._followers or not decoding else self._policy.rests(decoding)
        self.asked = not rest
        if rest:
            self._rest, self._resting = rest - 1, _Rest(len(decoding), decoded, self._begin)
        return not self.asked

    def propose(self, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]:
        """The drafts of a step. asks: all that decode in it, with the tokens that could be verified."""
        found = self._policy.propose(asks) if asks else []
        self._proposed_at = self._clock()
        return {ask.request.request_id: draft for ask, draft in zip(asks, found, strict=True) if draft}

    def verified(self, work: Work, accepted: int) -> None:
        """A request's forward brought the first `accepted` tokens of its draft, and one more."""
        if work.is_prefill:  # the prompt's last tokens: nothing could have been proposed
            return
        begin = self._clock()
        tokens, behind = work.request.tokens, work.start + 1 + accepted
        sampled = tokens[behind] if behind < len(tokens) else None
        proposed = work.draft[accepted] if accepted < len(work.draft) else None
        rejected = proposed is not None and sampled != proposed
        hits = accepted + (proposed is not None and not rejected)
        self.figures.add(len(work.draft), hits, rejected, accepted + 1, self._policy.drafted_by)
        self._policy.verified(work, hits, rejected)
        self._verifying += self._clock() - begin

    def measured(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """The step is over. kept: rows of each work that were no rejected draft."""
        end = self._clock()
        if not any(work.is_prefill for work in works):
            self._account(works, kept, end - self._proposed_at - self._verifying)
        self._verifying, self._learning = 0.0, self._clock() - end
        if self._followers:
            self._follow(works, kept)

    def settle(self) -> None:
        """Nobody is left: what rests has ended, and is accounted for."""
        self._rest = 0
        self._account_rest()

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._policy.forget(request_id)
        for proposer in self._proposers:
            proposer.forget(request_id)

    def check_integrity(self, running: set[str]) -> None:
        """AssertionError when something of a request that ended is still there."""
        if not self._policy.known <= running:
            raise AssertionError(f"drafts of {self._policy.known - running} are kept, {running} run")
        for proposer in self._proposers:
            proposer.check_integrity(running)

    def _account_rest(self) -> None:
        """Of the steps that went without since they were last accounted for."""
        rest = self._resting
        if rest is None:
            return
        now, forwards = self._clock(), rest.decoded.tokens - rest.tokens
        self._resting = None
        if forwards:
            self.figures.rest(forwards, rest.decoded.seconds - rest.seconds)
            self._policy.rested(rest.requests, forwards // rest.requests, now - rest.begin)

    def _account(self, works: Sequence[Work], kept: Sequence[int], seconds: float) -> None:
        """A step that only decoded. What was learnt from the last one is charged to it."""
        asking = self._proposed_at - self._begin + self._verifying + self._learning
        self.figures.verify_seconds += seconds
        self.figures.draft_seconds += asking
        if any(work.draft for work in works):
            self.figures.drafted_seconds += seconds
        self._policy.measured(works, kept, seconds, asking)

    def _follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        begin = self._clock()
        for proposer in self._followers:
            proposer.follow(works, kept)
        took = self._clock() - begin
        self._policy.charge(took)
        self.figures.draft_seconds += took
