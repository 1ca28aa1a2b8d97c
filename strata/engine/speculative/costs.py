"""What pays: drafts with the most expected tokens per second, within what a request may lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from strata.core import MOST_DRAFTED, Request
from strata.engine.scheduler import Work
from strata.engine.speculative.acceptance import Acceptance, Counts, Key
from strata.engine.speculative.choice import Choice, choose
from strata.engine.speculative.draft_costs import WITH_THE_FIRST, DraftCosts
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import LOSS, Ledger, Promise
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.retry import LAST, Retry
from strata.engine.speculative.step_times import Estimate, StepTable, StepTimes

PLAIN_EVERY = 64
"""At the latest after so many steps with drafts a plain one says what plain decoding takes now."""
REST_AFTER = 32
"""Steps without any draft after which a proposer that costs next to nothing is asked less often, so that it
costs no more than REST_SHARE of the time: of a model whose steps take 0.4 ms it is 4 % otherwise."""
REST_SHARE, LONGEST_REST = 0.01, 8
DOUBT_AFTER = 128
"""Steps without any draft after which times that were measured once or twice are measured anew."""
ASKED_EVERY = 4
"""Steps between two looks at whether a proposer pays that did not: only tests change what is known."""
TRUSTS = tuple((place + 1).bit_length() for place in range(MOST_DRAFTED))
"""A draft model's tokens are accepted less or more often by their place: by powers of two."""
MOST_WON = 256.0
"""Plain steps: what a draft model won by earlier requests that it may stake on reading the next one."""


@dataclass(slots=True)
class _State:
    """What is known of one request. free, drafted: acceptance of what costs nothing and of what does.

    trusts: of the draft that is verified; shadow: first token, and its trust, of a free proposal of which
    nothing is.
    """

    ledger: Ledger
    free: Acceptance
    drafted: Acceptance
    retry: Retry
    trusts: tuple[int, ...] = ()
    shadow: tuple[int, int] | None = None


class ByCosts:
    """See `LengthPolicy`. spare: proposes for free where `proposer` is not and does not pay.

    A request is never slower than PROMISE of plain decoding, over what `promise` says (`ledger`), prompts
    and text that a draft model reads included. Only its reading may exceed that by what it won for others.
    The work of choosing itself is in no ledger: some 40 us a step, which shows where a step takes 0.5 ms.
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
        self._draft = None if proposer.free else DraftCosts(proposer, clock)
        self._most = lengths.most
        self._times = StepTimes(estimate)
        self._promise = promise
        self._shared: tuple[dict[Key, Counts], dict[Key, Counts]] = {}, {}
        self._states: dict[str, _State] = {}
        self._table: StepTable | None = None
        self._by_draft = False
        self._retry_after = self._since_plain = self._since_draft = self._rest = 0
        self._doubt_at = DOUBT_AFTER
        self._won = 0.0

    @property
    def known(self) -> set[str]:
        """Requests of which something is kept."""
        return set(self._states)

    @property
    def drafted_by(self) -> str:
        """The draft model, or what proposes in its place."""
        proposer = self._draft.proposer if self._by_draft and self._draft is not None else self._free
        return "" if proposer is None else proposer.name

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._states.pop(request_id, None)

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The drafts of a step: of the proposer that promises more, or none."""
        self._table, self._by_draft = None, False
        if self._rest:
            self._rest -= 1
            return [()] * len(asks)
        table = self._table = self._times.table(len(asks), sum(len(ask.request.tokens) for ask in asks))
        states = [self._state(ask.request) for ask in asks]
        if not table.known or self._since_plain >= PLAIN_EVERY:
            return [()] * len(asks)
        if self._since_draft >= self._doubt_at:
            self._doubt_at += DOUBT_AFTER
            table.doubt()
        proposals, choice = self._matches(asks, states, table)
        drafts = None if self._draft is None else self._drafts(asks, states, table, choice.rate)
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
        if self._by_draft and (accepted or rejected):
            state.drafted.add(state.trusts, accepted, rejected)
            state.retry.tested(accepted > 0)
            self._retry_after = state.retry.after
        else:
            state.retry.waited()
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
            self._draft.spent += seconds

    def measured(self, works: Sequence[Work], kept: Sequence[int], seconds: float, drafting: float) -> None:
        """A step that only decoded: its time, and what it cost or gained each request."""
        rows, requests = sum(work.count for work in works), len(works)
        self._since_plain = self._since_plain + 1 if rows > requests else 0
        self._since_draft += 1
        if rows > requests:
            self._since_draft, self._doubt_at = 0, DOUBT_AFTER
        table = self._table
        if table is None:  # nothing was asked
            self._enter(works, 1.0, [1] * requests)
            return
        if table.requests != requests:
            return  # some waited for a seat: such steps are compared with nothing
        table.add(rows, seconds)
        if not table.known:
            return
        owed = self._draft.settle() / table.plain if self._draft is not None else 0.0
        if self._since_draft >= REST_AFTER and owed < REST_SHARE:
            self._rest = min(LONGEST_REST, int(drafting / (REST_SHARE * table.plain)))
        took = owed + (table.worst(rows) if rows > requests else 1.0)
        if self._by_draft or owed:
            self._won = min(MOST_WON, self._won + sum(kept) / requests - took)
        self._enter(works, took, kept if rows > requests else [1] * requests)

    def _enter(self, works: Sequence[Work], took: float, kept: Sequence[int]) -> None:
        for work, tokens in zip(works, kept, strict=True):
            state = self._states.get(work.request.request_id)
            if state is not None:
                state.ledger.add(took, tokens)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            free, drafted = self._shared
            state = self._states[request.request_id] = _State(
                Ledger(self._promise), Acceptance(free), Acceptance(drafted), Retry(1, self._retry_after)
            )
        return state

    # -- what costs nothing --------------------------------------------------------------------------------

    def _matches(
        self, asks: Sequence[Ask], states: Sequence[_State], table: StepTable
    ) -> tuple[list[Proposal], Choice]:
        """All proposals, and how much of them is worth its rows."""
        if self._free is None:
            return [Proposal()] * len(asks), Choice([0] * len(asks), float(len(asks)))
        proposals = self._free.propose(asks)
        chances = [
            state.free.chances(proposal.trusted(self._most))
            for state, proposal in zip(states, proposals, strict=True)
        ]
        return proposals, choose(chances, _left(states), table)

    # -- what costs something ------------------------------------------------------------------------------

    def _drafts(
        self, asks: Sequence[Ask], states: Sequence[_State], table: StepTable, rate: float
    ) -> list[tuple[int, ...]] | None:
        """The draft model's, where they promise more than `rate` or it is time to try it; else None."""
        draft = self._draft
        assert draft is not None
        due = [state.retry.due for state in states]
        if not any(due) and all(state.retry.untested % ASKED_EVERY for state in states):
            return None
        token = draft.token(table.plain)
        chances = [
            state.drafted.chances(TRUSTS[: min(ask.count, self._most)])
            for ask, state in zip(asks, states, strict=True)
        ]
        left = _left(states)
        draft.reads = False
        lengths, promised = choose(chances, left, table, token)
        if promised <= rate or not any(lengths):
            lengths = self._tried(asks, states, table, token, left)
        lengths = self._caught_up(asks, lengths, table, left - (table.worst(len(asks) + 1) - 1 + token))
        places = [place for place, length in enumerate(lengths) if length]
        if not places:
            for state in states:
                if state.retry.due and not draft.reads:
                    state.retry.later()
            return None
        found: list[tuple[int, ...]] = [()] * len(asks)
        wanted = [Ask(asks[place].request, lengths[place], asks[place].sampler) for place in places]
        for place, proposal in zip(places, draft.propose(wanted), strict=True):
            found[place] = proposal.tokens
            states[place].trusts = TRUSTS[: len(proposal.tokens)]
        return found

    def _tried(
        self, asks: Sequence[Ask], states: Sequence[_State], table: StepTable, token: float, left: float
    ) -> list[int]:
        """One token for the request that has been without for longest, where it can be afforded."""
        assert self._draft is not None
        lengths = [0] * len(asks)
        due = [place for place, state in enumerate(states) if state.retry.due and asks[place].count]
        if not due:
            return lengths
        if not self._draft.could_pay(len(asks), table, token):
            for place in due:
                states[place].retry.after = LAST
            self._retry_after = LAST
            due = [place for place in due if states[place].retry.due]
        if due and table.worst(len(asks) + 1) + token <= 1 + left:
            lengths[max(due, key=lambda place: states[place].retry.untested)] = 1
        return lengths

    def _caught_up(self, asks: Sequence[Ask], lengths: list[int], table: StepTable, left: float) -> list[int]:
        """The lengths, 0 for those whose text the draft has not read: it reads what may be spent on it. What
        is left then says whether the next step has drafts."""
        draft = self._draft
        assert draft is not None
        each = draft.reading(table.plain)
        found = [0] * len(asks)
        for place, length in enumerate(lengths):
            behind = draft.proposer.behind(asks[place].request) if length else None
            if behind is None:
                continue
            if behind > WITH_THE_FIRST:
                spend = max(left, self._won) if self._promise == "request" else left
                if behind * each > spend + LOSS * _coming(asks[place].request) / 2:
                    continue  # most of the answer would be over
                count = min(behind, draft.readable(spend, table.plain))
                if count:
                    draft.read(asks[place], count)
                    if count * each > left:  # then it is what was won that paid
                        self._won -= draft.forgive(self._won, table.plain)
                    left -= count * each
            else:
                found[place] = length
        return found


def _coming(request: Request) -> float:
    """Tokens that the request may still bring."""
    asked = request.sampling.max_tokens
    return inf if asked is None else asked - len(request.generated)


def _left(states: Sequence[_State]) -> float:
    """Plain steps that a step may lose: what the poorest request may."""
    return min(state.ledger.left for state in states)
