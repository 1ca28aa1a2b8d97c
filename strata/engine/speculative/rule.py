"""Draft lengths by the rule of recent acceptance, or fixed ones, whatever steps cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.core import Request
from strata.engine.scheduler import Work
from strata.engine.speculative.draft_length import DraftLength, LengthOptions
from strata.engine.speculative.proposer import Ask, Proposer
from strata.engine.speculative.retry import Retry

RETRY_AFTER = 16
"""Steps until a proposer that costs something and came down to no tokens is tried again, at first."""


@dataclass
class _State:
    """Of one request. shadow: the first token of a proposal of which none was verified."""

    length: DraftLength
    retry: Retry = field(default_factory=lambda: Retry(RETRY_AFTER, RETRY_AFTER))
    shadow: int | None = None


class ByRule:
    """See `LengthPolicy`."""

    def __init__(self, proposer: Proposer, lengths: LengthOptions) -> None:
        self._proposer, self._lengths = proposer, lengths
        self._states: dict[str, _State] = {}

    def rests(self, decoding: Sequence[Request]) -> int:
        """It never does."""
        return 0

    def rested(self, requests: int, steps: int, seconds: float) -> None:
        """It never did."""

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """As many tokens as the rule says. At length 0 what costs nothing is still compared."""
        states = [self._state(ask.request.request_id) for ask in asks]
        if not self._proposer.free:
            for state in states:
                if state.retry.due:
                    state.length.retry()
        least = int(self._proposer.free)
        wanted = [
            Ask(ask.request, min(ask.count, max(least, state.length.value)), ask.sampler)
            for ask, state in zip(asks, states, strict=True)
        ]
        found: list[tuple[int, ...]] = [()] * len(asks)
        places = [place for place, ask in enumerate(wanted) if ask.count]
        if not places:
            return found
        for place, proposal in zip(
            places, self._proposer.propose([wanted[place] for place in places]), strict=True
        ):
            state = states[place]
            found[place] = proposal.tokens[: state.length.value]
            state.shadow = proposal.tokens[0] if proposal.tokens and not found[place] else None
        return found

    def verified(self, work: Work, accepted: int, rejected: bool) -> None:
        """The rule learns from what was tested."""
        state = self._states.get(work.request.request_id)
        if state is None:
            return
        first = work.start + 1
        if state.shadow is not None and first < len(work.request.tokens):
            accepted = int(work.request.tokens[first] == state.shadow)
            rejected = not accepted
        state.shadow = None
        if not (accepted or rejected):
            state.retry.waited()
            return
        state.retry.tested(accepted > 0)
        state.length.add(accepted, rejected)

    def measured(self, works: Sequence[Work], kept: Sequence[int], seconds: float, asking: float) -> None:
        """Time does not matter."""

    def charge(self, seconds: float) -> None:
        """Neither does that."""

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._states.pop(request_id, None)

    @property
    def known(self) -> set[str]:
        """Requests of which something is kept."""
        return set(self._states)

    @property
    def drafted_by(self) -> str:
        """Always the same proposer."""
        return self._proposer.name

    def _state(self, request_id: str) -> _State:
        state = self._states.get(request_id)
        if state is None:
            state = self._states[request_id] = _State(DraftLength(self._lengths))
        return state
