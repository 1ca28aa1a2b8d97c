"""When a proposer that costs something is asked, how far it goes on, and what it may read for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from strata.core import MOST_DRAFTED, Request
from strata.engine.scheduler import Work
from strata.engine.speculative.acceptance import Acceptance, Counts, Key
from strata.engine.speculative.choice import choose, stake
from strata.engine.speculative.confidence import GUESSES
from strata.engine.speculative.draft_costs import DRAFT_AT_MOST, WITH_THE_FIRST, DraftCosts
from strata.engine.speculative.ledger import LOSS, Promise
from strata.engine.speculative.proposer import Ask, Proposal, Proposer
from strata.engine.speculative.retry import LAST, Retry
from strata.engine.speculative.step_times import StepTable

ASKED_EVERY = 4
"""Steps between two looks at whether a proposer pays that did not: only tests change what is known."""
PLACES = tuple((place + 1).bit_length() for place in range(MOST_DRAFTED))
"""Before it is asked, a draft model's tokens are thought to be accepted by their place: by powers of two."""
NEXT_TEXT = 16
"""Steps of a new request after which a draft model that was wrong in the last one's text is tried, at the
latest: it may guess this one well. One that can never pay waits on."""
MOST_WON = 256.0
"""Plain steps: what a draft model won by earlier requests that it may stake on reading the next one."""


@dataclass(slots=True)
class DraftState:
    """Of one request. expected: acceptance by place, of tokens that are yet to be drafted; seen: by the
    confidence of those that are. draft: the latest, verified or not, until the step is over."""

    expected: Acceptance
    seen: Acceptance
    retry: Retry
    draft: Proposal = field(default_factory=Proposal)


class Drafting:
    """Asks a proposer where it pays, or where it is time to see whether it does.

    It goes on token by token, as long as the next one promises more than it costs, by how sure the model was
    of those before it. What was drafted and is not verified is compared with what is sampled all the same.
    won: plain steps that it won, for requests that are to be read.
    """

    def __init__(self, proposer: Proposer, clock: Callable[[], float], most: int, promise: Promise) -> None:
        self.costs = DraftCosts(proposer, clock)
        self.won = 0.0
        self._most, self._promise = most, promise
        self._retry_after = 0
        self._token = DRAFT_AT_MOST
        self._expected: dict[Key, Counts] = {}
        self._seen: dict[Key, Counts] = {}

    def state(self) -> DraftState:
        """Of a request that begins."""
        after = self._retry_after
        if after < LAST:
            after = min(after, NEXT_TEXT)
        return DraftState(
            Acceptance(self._expected), Acceptance(self._seen, guesses=GUESSES), Retry(1, after)
        )

    def win(self, steps: float) -> None:
        """A step was so many plain ones better, or worse."""
        self.won = min(MOST_WON, self.won + steps)

    def propose(
        self, asks: Sequence[Ask], states: Sequence[DraftState], left: float, table: StepTable, rate: float
    ) -> list[tuple[int, ...]] | None:
        """The drafts, where they promise more than `rate` or it is time to try; None: nothing to verify.

        left: plain steps that the step may lose.
        """
        due = [state.retry.due for state in states]
        if not any(due) and all(state.retry.untested % ASKED_EVERY for state in states):
            return None
        token = self._token = self.costs.token(table.plain)
        chances = [
            state.expected.chances(PLACES[: min(ask.count, self._most)])
            for ask, state in zip(asks, states, strict=True)
        ]
        self.costs.reads = False
        lengths, promised = choose(chances, left, table, token)
        if promised <= rate or not any(lengths):
            promised, lengths = rate, self._tried(asks, states, table, token, left)
        lengths = self._caught_up(asks, lengths, table, left - token)
        places = [place for place, length in enumerate(lengths) if length]
        if not places:
            for state in states:
                if state.retry.due and not self.costs.reads:
                    state.retry.later()
            return None
        drafted = _Drafted(table, token, left, promised, len(asks))
        wanted = [drafted.ask(asks[place], states[place], chances[place]) for place in places]
        for place, proposal in zip(places, self.costs.propose(wanted), strict=True):
            states[place].draft = proposal
        return self._worth(states, left - drafted.longest * token, table, rate)

    def verified(self, state: DraftState, work: Work) -> None:
        """Learn from how the text went on."""
        (tokens, trusts), state.draft = state.draft, Proposal()
        truth = work.request.tokens[work.start + 1 :]
        tested = min(len(tokens), len(truth))
        if not tested:
            state.retry.waited()
            return
        hits = next((place for place in range(tested) if tokens[place] != truth[place]), tested)
        state.expected.add(PLACES, hits, hits < tested)
        state.seen.add(trusts, hits, hits < tested)
        state.retry.tested(hits > 0, self._token)
        self._retry_after = state.retry.after

    def _worth(
        self, states: Sequence[DraftState], left: float, table: StepTable, rate: float
    ) -> list[tuple[int, ...]] | None:
        """What of the drafts to verify. What they took is spent in any case."""
        chances = [state.seen.chances(state.draft.trusts) for state in states]
        lengths, promised = choose(chances, left, table)
        if promised <= rate:
            return None
        return [state.draft.tokens[:length] for state, length in zip(states, lengths, strict=True)]

    def _tried(
        self, asks: Sequence[Ask], states: Sequence[DraftState], table: StepTable, token: float, left: float
    ) -> list[int]:
        """One token for the request that has been without for longest, where it can be afforded."""
        lengths = [0] * len(asks)
        due = [place for place, state in enumerate(states) if state.retry.due and asks[place].count]
        if not due:
            return lengths
        if not self.costs.could_pay(len(asks), table, token):
            for place in due:
                states[place].retry.after = LAST
            self._retry_after = LAST
            due = [place for place in due if states[place].retry.due]
        if due and token <= left:
            lengths[max(due, key=lambda place: states[place].retry.untested)] = 1
        return lengths

    def _caught_up(self, asks: Sequence[Ask], lengths: list[int], table: StepTable, left: float) -> list[int]:
        """The lengths, 0 for those whose text the draft has not read: it reads what may be spent on it. What
        is left then says whether the next step has drafts."""
        costs = self.costs
        found = [0] * len(asks)
        for place, length in enumerate(lengths):
            behind = costs.proposer.behind(asks[place].request) if length else None
            if behind is None:
                continue
            if behind > WITH_THE_FIRST:
                spend = max(left, self.won) if self._promise == "request" else left
                needed = behind * costs.reading(table.plain, behind)
                if costs.knows_reading(behind) and needed > spend + LOSS * _coming(asks[place].request) / 2:
                    continue  # most of the answer would be over
                count = costs.readable(spend, table.plain, behind)
                if count:
                    taken = count * costs.reading(table.plain, count)
                    costs.read(asks[place], count)
                    if taken > left:  # then it is what was won that paid
                        self.won -= costs.forgive(self.won, table.plain)
                    left -= taken
            else:
                found[place] = length
        return found


class _Drafted:
    """What a step's drafts have come to. rate: tokens per plain step that they are to bring."""

    def __init__(self, table: StepTable, token: float, left: float, rate: float, requests: int) -> None:
        self.table, self.token, self.left, self.rate = table, token, left, rate
        self.requests = self.rows = requests
        self.longest = 0

    def ask(self, ask: Ask, state: DraftState, expected: Sequence[float]) -> Ask:
        """For as much as pays."""

        def more(trusts: Sequence[int]) -> bool:
            self.rows += 1
            self.longest = max(self.longest, len(trusts))
            if len(trusts) >= len(expected):
                return False
            chances = state.seen.chances(trusts)
            return self._allowed(chances[0]) and self._pays(chances[-1], expected, len(trusts))

        return Ask(ask.request, len(expected), ask.sampler, more)

    def _allowed(self, first: float) -> bool:
        """Whether one more may be lost with all that there are (`choice.choose`)."""
        steps, rows = self.table, self.rows + 1
        taken = (self.longest + 1) * self.token
        least = steps.expected(self.requests + 1) - 1 + self.token
        return (
            steps.expected(rows) + taken <= 1 + stake(self.left, first, least)
            and steps.worst(rows) + taken <= 1 + self.left
        )

    def _pays(self, chance: float, expected: Sequence[float], drafted: int) -> bool:
        """Whether some more tokens do, behind `drafted` ones that are all right with this chance."""
        steps, rows = self.table, self.rows
        taken, gain = steps.expected(rows), 0.0
        scale = chance / expected[drafted - 1]
        for more, each in enumerate(expected[drafted:], 1):
            gain += each * scale
            if gain > self.rate * (steps.expected(rows + more) - taken + more * self.token):
                return True
        return False


def _coming(request: Request) -> float:
    """Tokens that the request may still bring."""
    asked = request.sampling.max_tokens
    return inf if asked is None else asked - len(request.generated)
