"""Decides what a step verifies, and learns from what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

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

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The drafts of a step, one for each ask, which may be empty."""
        ...

    def verified(self, work: Work, accepted: int, rejected: bool) -> None:
        """Of a request's draft so many tokens were right, and then one was wrong or none was tested."""
        ...

    def measured(self, works: Sequence[Work], kept: Sequence[int], seconds: float, drafting: float) -> None:
        """A step that only decoded. kept: as of the engine's; seconds: it took; drafting: `propose` did."""
        ...

    def charge(self, seconds: float) -> None:
        """The proposer worked so long beside proposing."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended."""
        ...


class Speculator:
    """Belongs to the engine's thread, which calls `propose`, `verified` for each request, then `measured`.

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
        self.figures = SpeculationFigures()
        self._proposers = [proposer] if spare is None else [proposer, spare]
        self._policy: LengthPolicy = (
            ByRule(proposer, lengths)
            if estimate is None
            else ByCosts(proposer, lengths, estimate, clock, promise, spare)
        )
        self._clock = clock
        self._begin = self._proposed_at = 0.0

    def propose(self, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]:
        """The drafts of a step. asks: all that decode in it, with the tokens that could be verified."""
        self._begin = self._proposed_at = self._clock()
        if not asks:
            return {}
        found = self._policy.propose(asks)
        self._proposed_at = self._clock()
        return {ask.request.request_id: draft for ask, draft in zip(asks, found, strict=True) if draft}

    def verified(self, work: Work, accepted: int) -> None:
        """A request's forward brought the first `accepted` tokens of its draft, and one more."""
        if work.is_prefill:  # the prompt's last tokens: nothing could have been proposed
            return
        tokens, behind = work.request.tokens, work.start + 1 + accepted
        sampled = tokens[behind] if behind < len(tokens) else None
        proposed = work.draft[accepted] if accepted < len(work.draft) else None
        rejected = proposed is not None and sampled != proposed
        hits = accepted + (proposed is not None and not rejected)
        self.figures.add(len(work.draft), hits, rejected, accepted + 1, self._policy.drafted_by)
        self._policy.verified(work, hits, rejected)

    def measured(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """The step is over. kept: rows of each work that were no rejected draft."""
        end = self._clock()
        if not any(work.is_prefill for work in works):
            self._account(works, kept, end - self._proposed_at)
        begin = self._clock()
        for proposer in self._proposers:
            proposer.follow(works, kept)
        took = self._clock() - begin
        self._policy.charge(took)
        self.figures.draft_seconds += took

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

    def _account(self, works: Sequence[Work], kept: Sequence[int], seconds: float) -> None:
        """A step that only decoded."""
        drafting = self._proposed_at - self._begin
        self.figures.verify_seconds += seconds
        self.figures.draft_seconds += drafting
        if any(work.draft for work in works):
            self.figures.drafted_seconds += seconds
        self._policy.measured(works, kept, seconds, drafting)
