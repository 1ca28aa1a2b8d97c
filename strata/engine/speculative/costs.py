"""What pays: drafts with the most expected tokens per second, within what a request may lose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from strata.core import Request
from strata.engine.scheduler import Work
from strata.engine.speculative.acceptance import Acceptance, Counts, Key
from strata.engine.speculative.asking import POOR, Asking
from strata.engine.speculative.choice import Choice, choose, pays
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.drafting import Drafting, DraftState
from strata.engine.speculative.ledger import BUDGET, Ledger, Promise
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.step_times import Estimate, StepTable, StepTimes

PLAIN_EVERY = 64
"""At the latest after so many steps with drafts a plain one says what plain decoding takes now."""
TRUSTED, MOST_TRUSTED = 3, 5
"""Where looking whether drafts pay is dear: four tokens that match are a reason at least, and 16 at most."""
ENOUGH = 1.5
"""Times the shortest draft's price: with less left to lose, asking must have a reason, too, and leaves what
there is to a draft that is nearly sure."""
DOUBT_AFTER = 128
"""Steps without any draft after which times that were measured once or twice are measured anew."""


@dataclass(slots=True)
class _State:
    """What is known of one request. free: acceptance of what costs nothing; drafting: of what does.

    trusts: of the draft that is verified; shadow: first token, and its trust, of a free proposal of which
    nothing is.
    """

    ledger: Ledger
    free: Acceptance
    drafting: DraftState | None
    trusts: tuple[int, ...] = ()
    shadow: tuple[int, int] | None = None


class ByCosts:
    """See `LengthPolicy`. spare: proposes for free where `proposer` is not and does not pay.

    A request is never slower than PROMISE of plain decoding, over what `promise` says (`ledger`), text
    that a draft model reads and the work of choosing included. Only reading may exceed that by what the
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
        self._since_plain = self._since_draft = 0
        self._asking = Asking(TRUSTED, MOST_TRUSTED)
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

    def rests(self, decoding: Sequence[Request]) -> int:
        """Steps without asking: it would take more time than it may, or nobody has anything to propose."""
        table = self._times.table(len(decoding), sum([len(request.tokens) for request in decoding]))
        if not table.known:
            return 1
        left = self._left(self._states.values(), table)
        if self._asking.dear or left < ENOUGH * self._shortest:
            return self._rests_long(decoding, table)
        return POOR if left < 0 else self._asking.pause()

    def _rests_long(self, decoding: Sequence[Request], table: StepTable) -> int:
        """Unless a glance gives a reason to ask."""
        asking, free = self._asking, self._free
        trusts = [0] if free is None else [free.glance(request) for request in decoding]
        asking.glanced(max(trusts))
        if max(trusts) >= asking.wanted:
            for request, trust in zip(decoding, trusts, strict=True):
                if trust >= asking.wanted and self._promises(request, trust, table):
                    return 0
        if self._draft is None:
            return asking.rest(max(trusts))
        return POOR if self._left(self._states.values(), table) < self._shortest else asking.until_due()

    def _promises(self, request: Request, trust: int, table: StepTable) -> bool:
        """Whether a proposal of this trust is worth asking about. That those before were right is known."""
        state, requests = self._state(request), table.requests
        state.free.misses = 0
        first, taken = state.free.first(trust), table.expected(requests + 1)
        coming = min(self._most, first / max(1e-9, 1 - first))
        left = self._left(self._states.values(), table)
        return table.worst(requests + 1) <= 1 + left and pays(requests, coming, first, left, taken)

    def rested(self, requests: int, steps: int, seconds: float) -> None:
        """So many plain steps of so many requests went without, in so many seconds."""
        if steps == 1:
            self._times.add_plain(requests, seconds)
        for state in self._states.values():
            state.ledger.wait(steps)
            if state.drafting is not None:
                state.drafting.retry.untested += steps
        self._since_draft += steps
        self._since_plain = 0

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
            self._since_draft, self._doubt_at = 0, DOUBT_AFTER
        table = self._table
        if table is None or table.requests != requests:
            return  # nothing was asked, or some waited for a seat: such steps are compared with nothing
        table.add(rows, seconds)
        busy = owed = 0.0
        if self._draft is not None:
            busy, owed = self._draft.costs.busy, self._draft.costs.settle()
        asked = self._asking.measured(max(0.0, asking - busy), rows > requests)
        if not table.known:
            self._unpaid += owed + asked
            return
        asked /= table.plain
        self._unpaid, owed = 0.0, (self._unpaid + owed) / table.plain
        took = owed + (table.worst(rows) if rows > requests else 1.0)
        if self._draft is not None and (self._by_draft or owed):
            self._draft.win(sum(kept) / requests - took - asked)
        self._enter(works, took + asked, kept if rows > requests else [1] * requests)
        self._shortest = table.worst(requests + 1) - 1
        reads = self._draft is not None and self._draft.costs.reads  # for a draft in the next step
        self._asking.asked(table.plain, idle=rows == requests and not reads)

    def _enter(self, works: Sequence[Work], took: float, kept: Sequence[int]) -> None:
        for work, tokens in zip(works, kept, strict=True):
            state = self._states.get(work.request.request_id)
            if state is not None:
                state.ledger.add(took, tokens)

    def _left(self, states: Iterable[_State], table: StepTable) -> float:
        """Plain steps that a step may lose beside asking: what the poorest request may."""
        unsettled = self._unpaid + self._asking.unpaid + self._asking.seconds
        return min((state.ledger.left for state in states), default=BUDGET) - unsettled / table.plain

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            drafting = None if self._draft is None else self._draft.state()
            state = self._states[request.request_id] = _State(
                Ledger(self._promise), Acceptance(self._shared), drafting
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
