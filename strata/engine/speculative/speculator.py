"""Decides what a step verifies, and learns from what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from strata.core import Request
from strata.engine.scheduler import Work
from strata.engine.speculative.acceptance import Acceptance, Counts
from strata.engine.speculative.choice import Option, choose
from strata.engine.speculative.draft_length import DraftLength, LengthOptions
from strata.engine.speculative.figures import SpeculationFigures
from strata.engine.speculative.ledger import Ledger
from strata.engine.speculative.proposer import Ask, Proposer
from strata.engine.speculative.step_times import Estimate, StepTable, StepTimes

PLAIN_EVERY = 64
"""At the latest after so many steps with drafts a plain one says what plain decoding takes now."""
REST_AFTER = 32
"""Steps without any draft after which a proposer that costs next to nothing is asked less often, so that it
costs no more than REST_SHARE of the time: of a model whose steps take 0.4 ms it is 4 % otherwise."""
REST_SHARE, LONGEST_REST = 0.01, 8
DOUBT_AFTER = 128
"""Steps without any draft after which times that were measured once or twice are measured anew."""
FIRST_PROBE, LAST_PROBE = 16, 512
"""Steps until a proposer that costs something and was given up is tried again; doubled by each failure."""
DRAFT_AT_MOST = 0.5
"""Of a plain step: a draft's token before one was measured. A draft model that takes longer is of no use."""


@dataclass
class _State:
    """What is known of one request. trusts: of this step's proposal. shadow: its first token, where it was
    for free and none of it is verified."""

    length: DraftLength
    acceptance: Acceptance
    ledger: Ledger = field(default_factory=Ledger)
    trusts: tuple[int, ...] = ()
    shadow: int | None = None
    untested: int = 0
    probe_after: int = FIRST_PROBE


class Speculator:
    """Belongs to the engine's thread, which calls `propose`, `verified` for each request, then `measured`.

    lengths: the rule by recent acceptance, or a fixed length. estimate: what steps cost before they were
    measured; None: costs do not count, every draft is as long as the rule says. With costs, a request is
    never slower than PROMISE of plain decoding over any WINDOW steps (`ledger`). clock: in seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: LengthOptions,
        estimate: Estimate | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer = proposer
        self.figures = SpeculationFigures()
        self._lengths = lengths
        self._times = StepTimes(estimate) if estimate is not None else None
        self._clock = clock
        self._shared: dict[int, Counts] = {}
        self._states: dict[str, _State] = {}
        self._drafting: deque[float] = deque(maxlen=5)  # seconds of a draft's token
        self._begin = self._proposed_at = 0.0
        self._table: StepTable | None = None
        self._longest = self._since_plain = self._since_draft = self._rest = 0
        self._doubt_at = DOUBT_AFTER

    def propose(self, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]:
        """The drafts of a step. asks: all that decode in it, with the tokens that could be verified."""
        self._begin = self._proposed_at = self._clock()
        self._longest = 0
        found: list[tuple[int, ...]] = []
        if self._rest and asks:
            self._rest -= 1
            self._table = None
            return {}
        if asks:
            states = [self._state(ask.request) for ask in asks]
            found = self._free(asks, states) if self.proposer.free else self._costly(asks, states)
            self._longest = max(map(len, found))
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
        self.figures.add(len(work.draft), hits, rejected, accepted + 1)
        state = self._states.get(work.request.request_id)
        if state is None:
            return
        if not work.draft and state.shadow is not None:
            hits, rejected = int(sampled == state.shadow), sampled != state.shadow
        state.shadow = None
        if hits or rejected:
            if self._times is None:
                state.length.add(hits, rejected)
            else:
                state.acceptance.add(state.trusts, hits, rejected)
            state.untested = 0
            state.probe_after = FIRST_PROBE if not rejected else min(LAST_PROBE, 2 * state.probe_after)
        else:
            state.untested += 1

    def measured(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """The step is over. kept: rows of each work that were no rejected draft."""
        end = self._clock()
        if not any(work.is_prefill for work in works):
            self._account(works, kept, end)
        self.proposer.follow(works, kept)
        self.figures.draft_seconds += self._clock() - end

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._states.pop(request_id, None)
        self.proposer.forget(request_id)

    def check_integrity(self, running: set[str]) -> None:
        """AssertionError when something of a request that ended is still there."""
        if not set(self._states) <= running:
            raise AssertionError(f"drafts of {set(self._states) - running} are kept, {running} run")
        self.proposer.check_integrity(running)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            state = _State(DraftLength(self._lengths), Acceptance(self._shared))
            self._states[request.request_id] = state
        return state

    # -- how long drafts are -------------------------------------------------------------------------------

    def _free(self, asks: Sequence[Ask], states: Sequence[_State]) -> list[tuple[int, ...]]:
        """All proposals are made, some are verified, and of the others the first token is compared."""
        wanted = [
            Ask(ask.request, min(ask.count, max(1, self._most(state))), ask.sampler)
            for ask, state in zip(asks, states, strict=True)
        ]
        proposals = self.proposer.propose(wanted)
        for state, proposal in zip(states, proposals, strict=True):
            state.trusts = proposal.trusted(self._most(state))
        lengths = self._affordable(asks, states)
        for state, proposal, length in zip(states, proposals, lengths, strict=True):
            state.shadow = proposal.tokens[0] if proposal.tokens and not length else None
        return [proposal.tokens[:length] for proposal, length in zip(proposals, lengths, strict=True)]

    def _costly(self, asks: Sequence[Ask], states: Sequence[_State]) -> list[tuple[int, ...]]:
        """Only what will be verified is proposed."""
        for state in states:
            if state.untested >= state.probe_after:
                state.length.retry()
        for ask, state in zip(asks, states, strict=True):
            state.trusts = (0,) * min(ask.count, self._most(state))
        lengths = self._affordable(asks, states)
        if self._times is not None and not any(lengths):
            lengths = self._probes(states)
        places = [place for place, length in enumerate(lengths) if length]
        found: list[tuple[int, ...]] = [()] * len(asks)
        if places:
            wanted = [Ask(asks[place].request, lengths[place], asks[place].sampler) for place in places]
            begin = self._clock()
            for place, proposal in zip(places, self.proposer.propose(wanted), strict=True):
                found[place] = proposal.tokens
                states[place].trusts = proposal.trusted(lengths[place])
            longest = max(map(len, found))
            if longest:
                self._drafting.append((self._clock() - begin) / longest)
        return found

    def _most(self, state: _State) -> int:
        """Tokens that may be verified: with costs, those that pay of all; without, what the rule says."""
        return state.length.value if self._times is None else self._lengths.most

    def _affordable(self, asks: Sequence[Ask], states: Sequence[_State]) -> list[int]:
        """The lengths that promise most tokens per second; without costs, all that there may be."""
        if self._times is None:
            return [len(state.trusts) for state in states]
        table = self._table = self._times.table(len(asks), sum(len(ask.request.tokens) for ask in asks))
        if not table.known or self._since_plain >= PLAIN_EVERY or not any(state.trusts for state in states):
            return [0] * len(asks)
        if self._since_draft >= self._doubt_at:
            self._doubt_at += DOUBT_AFTER
            table.doubt()
        if self.proposer.free and not self._hopeful(states, table):
            return [0] * len(asks)
        options = [Option(state.acceptance.chances(state.trusts), state.ledger.left) for state in states]
        return choose(options, self._expected, self._worst)

    def _hopeful(self, states: Sequence[_State], table: StepTable) -> bool:
        """Whether any proposal may pay: what says at once that none does, for most steps of most texts."""
        first = max(state.acceptance.rate(state.trusts[0]) for state in states if state.trusts)
        return first > table.least_chance

    def _probes(self, states: Sequence[_State]) -> list[int]:
        """A short draft for the request that has been without for longest, where it can be afforded."""
        lengths, table = [0] * len(states), self._table
        waited = [state.untested >= state.probe_after or not self._drafting for state in states]
        due = [place for place, long in enumerate(waited) if long and states[place].trusts]
        if not due or table is None or not table.known:
            return lengths
        place = max(due, key=lambda place: states[place].untested)
        lengths[place] = int(self._worst(1, 1) <= 1 + min(state.ledger.left for state in states))
        return lengths

    # -- what steps cost -----------------------------------------------------------------------------------

    def _expected(self, rows: int, longest: int) -> float:
        """Plain steps of one with `rows` draft rows, the longest draft having `longest` tokens."""
        assert self._table is not None
        return self._table.expected(self._table.requests + rows) + longest * self._token_seconds()

    def _worst(self, rows: int, longest: int) -> float:
        """The same at most."""
        assert self._table is not None
        return self._table.worst(self._table.requests + rows) + longest * self._token_seconds()

    def _token_seconds(self) -> float:
        """Of the proposer, for one token of all drafts, in plain steps."""
        if self.proposer.free:
            return 0.0
        assert self._table is not None
        return median(self._drafting) / self._table.plain if self._drafting else DRAFT_AT_MOST

    def _account(self, works: Sequence[Work], kept: Sequence[int], end: float) -> None:
        """A step that only decoded: its time, and what it cost or gained each request."""
        seconds = end - self._proposed_at
        drafting = self._proposed_at - self._begin
        rows = sum(work.count for work in works)
        self._since_plain = self._since_plain + 1 if rows > len(works) else 0
        self._since_draft += 1
        if rows > len(works):
            self._since_draft, self._doubt_at = 0, DOUBT_AFTER
        self.figures.verify_seconds += seconds
        self.figures.draft_seconds += drafting
        if rows > len(works):
            self.figures.drafted_seconds += seconds
        table = self._table
        if table is None or table.requests != len(works):
            return  # some waited for a seat: such steps are compared with nothing
        table.add(rows, seconds)
        if not table.known:
            return
        if self.proposer.free and self._since_draft >= REST_AFTER:
            self._rest = min(LONGEST_REST, int(drafting / (REST_SHARE * table.plain)))
        took = 1.0
        if rows > len(works):
            took = self._expected(rows - len(works), self._longest)
        for work, tokens in zip(works, kept, strict=True):
            state = self._states.get(work.request.request_id)
            if state is not None:
                state.ledger.add(took, tokens if rows > len(works) else 1)
