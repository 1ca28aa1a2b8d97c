"""What pays: drafts with the most expected tokens per second, within what a request may lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.core import Request
from strata.engine.scheduler import Work
from strata.engine.speculative.acceptance import Acceptance, Counts, Key
from strata.engine.speculative.asking import POOR, SHARE, Asking
from strata.engine.speculative.choice import Choice, choose
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.drafting import Drafting, DraftState
from strata.engine.speculative.ledger import Ledger, Promise
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.step_times import Estimate, StepTable, StepTimes

PLAIN_EVERY = 64
"""At the latest after so many steps with drafts a plain one says what plain decoding takes now."""
WATCHED_EVERY = 4
"""Steps, of those that are not asked about, after which it is seen whether the text repeats itself again."""
AGREED, MOST_AGREED = 2, 1 << 30
"""Tokens in a row that went on as before: it does; where that was no reason yet, twice as many are."""
DOUBT_AFTER = 128
"""Steps without any draft after which times that were measured once or twice are measured anew."""


@dataclass(slots=True)
class _State:
    """What is known of one request. free: acceptance of what costs nothing; drafting: of what does.

    trusts: of the draft that is verified; shadow: first token, and its trust, of a free proposal of which
    nothing is.
    """

    request: Request
    ledger: Ledger
    free: Acceptance
    drafting: DraftState | None
    trusts: tuple[int, ...] = ()
    shadow: tuple[int, int] | None = None


class ByCosts:
    """See `LengthPolicy`. spare: proposes for free where `proposer` is not and does not pay.

    A request is never slower than PROMISE of plain decoding, over what `promise` says (`ledger`), prompts
    text that a draft model reads, and the work of choosing included. Only reading may exceed that by what the
    draft model won for others.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: LengthOptions,
        estimate: Estimate,
        clock: Callable[[], float],
        promise: Promise = "request",
        spare: Proposer | None = None,
    ) -> None:
        self._free = proposer if proposer.free else spare
        self._draft = None if proposer.free else Drafting(proposer, clock, lengths.most, promise)
        self._most = lengths.most
        self._times = StepTimes(estimate)
        self._promise = promise
        self._shared: dict[Key, Counts] = {}
        self._states: dict[str, _State] = {}
        self._table: StepTable | None = None
        self._by_draft = False
        self._since_plain = self._since_draft = self._rested = 0
        self._asking = Asking()
        self._wanted = AGREED
        self._unpaid = self._shortest = 0.0
        self._doubt_at = DOUBT_AFTER

    @property
    def known(self) -> set[str]:
        """Requests of which something is kept."""
        return set(self._states)

    @property
    def drafted_by(self) -> str:
        """The draft model, or what proposes in its place."""
        proposer = self._draft.costs.proposer if self._by_draft and self._draft is not None else self._free
        return "" if proposer is None else proposer.name

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._states.pop(request_id, None)

    def rests(self, running: int) -> bool:
        """Whether asking now would take more time than it may, or none has anything to be proposed."""
        asking = self._asking
        if asking.rest:
            asking.rest -= 1
            return True
        if not self._times.known(running):
            return True
        self._wait()
        free, states = self._free, self._states
        if any(state.ledger.left < asking.took + self._shortest for state in states.values()):
            asking.rest = POOR - 1
            return True
        if asking.took <= SHARE or self._draft is not None or free is None or running != len(states):
            return False
        return all(free.agreed(state.request) is None for state in states.values())

    def rested(self, works: Sequence[Work], seconds: float) -> None:
        """A step that only decoded went without. Who is new, or repeats what was there, is asked about."""
        self._rested += 1
        if not self._times.known(len(works)):
            self._times.table(len(works), sum(work.start + 1 for work in works)).add(len(works), seconds)
        if self._rested % WATCHED_EVERY:
            return
        agreed = max(self._agreed(work.request) for work in works)
        if agreed >= self._wanted:
            self._wanted = 2 * agreed
            self._asking.rest = 0
        elif agreed < AGREED:
            self._wanted = AGREED

    def _agreed(self, request: Request) -> int:
        """Tokens in a row that were as a free proposer would have guessed, more than any of a new request."""
        if request.finish_reason is not None:
            return 0
        if request.request_id not in self._states:
            return MOST_AGREED
        return 0 if self._free is None else self._free.agreed(request) or 0

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The drafts of a step: of the proposer that promises more, or none."""
        self._table, self._by_draft = None, False
        table = self._table = self._times.table(len(asks), sum(len(ask.request.tokens) for ask in asks))
        states = [self._state(ask.request) for ask in asks]
        if not table.known or table.stale or self._since_plain >= PLAIN_EVERY:
            return [()] * len(asks)
        if self._since_draft >= self._doubt_at:
            self._doubt_at += DOUBT_AFTER
            table.doubt()
        left = self._left(states, table)
        proposals, choice = self._matches(asks, states, table, left)
        drafts = None if self._draft is None else self._drafts(asks, states, table, choice.rate, left)
        self._by_draft = drafts is not None
        found = []
        for state, proposal, length in zip(states, proposals, choice.lengths, strict=True):
            if drafts is not None or not length:
                state.shadow = (proposal.tokens[0], (*proposal.trusts, 0)[0]) if proposal.tokens else None
            else:
                state.trusts = proposal.trusted(length)
            found.append(proposal.tokens[:length])
        return found if drafts is None else drafts

    def verified(self, work: Work, accepted: int, rejected: bool) -> None:
        """What was tested says how good the proposer is; what was not verified is still compared."""
        state = self._states.get(work.request.request_id)
        if state is None:
            return
        if self._draft is not None and state.drafting is not None:
            self._draft.verified(state.drafting, work)
        if work.draft and not self._by_draft:
            state.free.add(state.trusts, accepted, rejected)
        first = work.start + 1
        if state.shadow is not None and first < len(work.request.tokens):
            token, trust = state.shadow
            hit = work.request.tokens[first] == token
            state.free.add((trust,), int(hit), not hit)
        state.shadow = None

    def charge(self, seconds: float) -> None:
        """The proposer worked beside proposing."""
        if self._draft is not None:
            self._draft.costs.spent += seconds

    def measured(self, works: Sequence[Work], kept: Sequence[int], seconds: float, asking: float) -> None:
        """A step that only decoded: its time, and what it cost or gained each request."""
        rows, requests = sum(work.count for work in works), len(works)
        self._since_plain = self._since_plain + 1 if rows > requests else 0
        self._since_draft += 1
        if rows > requests:
            self._since_draft, self._doubt_at, self._wanted = 0, DOUBT_AFTER, AGREED
        table = self._table
        if table is None or table.requests != requests:
            return  # nothing was asked, or some waited for a seat: such steps are compared with nothing
        table.add(rows, seconds)
        busy = owed = 0.0
        if self._draft is not None:
            busy, owed = self._draft.costs.busy, self._draft.costs.settle()
        self._asking.measured(max(0.0, asking - busy), rows > requests)
        if not table.known:
            self._unpaid += owed + self._asking.seconds
            return
        asked = self._asking.seconds / table.plain
        self._unpaid, owed = 0.0, (self._unpaid + owed) / table.plain
        took = owed + (table.worst(rows) if rows > requests else 1.0)
        if self._draft is not None and (self._by_draft or owed):
            self._draft.win(sum(kept) / requests - took - asked)
        self._enter(works, took + asked, kept if rows > requests else [1] * requests)
        self._asking.took, self._shortest = asked, table.worst(requests + 1) - 1
        reads = self._draft is not None and self._draft.costs.reads
        if rows == requests and not reads:  # what was read is for a draft in the next step
            self._asking.came_to_nothing()

    def _enter(self, works: Sequence[Work], took: float, kept: Sequence[int]) -> None:
        for work, tokens in zip(works, kept, strict=True):
            state = self._states.get(work.request.request_id)
            if state is not None:
                state.ledger.add(took, tokens)

    def _wait(self) -> None:
        """Account for plain steps about which nothing was asked."""
        steps = self._rested
        if not steps:
            return
        for state in self._states.values():
            state.ledger.wait(steps)
            if state.drafting is not None:
                state.drafting.retry.untested += steps
        self._since_draft += steps
        self._since_plain = self._rested = 0

    def _left(self, states: Sequence[_State], table: StepTable) -> float:
        """Plain steps that a step may lose beside asking: what the poorest request may."""
        return (
            min(state.ledger.left for state in states) - (self._unpaid + self._asking.seconds) / table.plain
        )

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            drafting = None if self._draft is None else self._draft.state()
            state = self._states[request.request_id] = _State(
                request, Ledger(self._promise), Acceptance(self._shared), drafting
            )
        return state

    # -- what costs nothing --------------------------------------------------------------------------------

    def _matches(
        self, asks: Sequence[Ask], states: Sequence[_State], table: StepTable, left: float
    ) -> tuple[list[Proposal], Choice]:
        """All proposals, and how much of them is worth its rows."""
        if self._free is None:
            return [Proposal()] * len(asks), Choice([0] * len(asks), float(len(asks)))
        proposals = self._free.propose(asks)
        chances = [
            state.free.chances(proposal.trusted(self._most))
            for state, proposal in zip(states, proposals, strict=True)
        ]
        return proposals, choose(chances, left, table)

    # -- what costs something ------------------------------------------------------------------------------

    def _drafts(
        self, asks: Sequence[Ask], states: Sequence[_State], table: StepTable, rate: float, left: float
    ) -> list[tuple[int, ...]] | None:
        """The draft model's, where they promise more than `rate`; else None."""
        assert self._draft is not None
        drafting = [state.drafting for state in states if state.drafting is not None]
        return self._draft.propose(asks, drafting, left, table, rate)
