"""How many prompt tokens go beside decoding requests, so that these keep their pace."""

from __future__ import annotations

from strata.engine.scheduler import Work

SLOWDOWN = 4.0
"""A step with prompt tokens takes at most so many times what decoding alone takes, as far as LEAST allows."""

LEAST = 16
"""Prompt tokens beside decoding requests at least: a prompt of 2,000 then begins after 125 steps at most."""

_WEIGHT = 0.3
"""Of a new measurement in the running means: what costs depend on (depth, experts touched) changes slowly."""


class PrefillShare:
    """Measures steps and says what the next may take.

    chunk: the most. decode_seconds, token_seconds: of a step that decodes one request, and of one prompt
    token more in it; as predicted, until they are measured. None: nothing is known, a step takes the most.
    """

    def __init__(
        self, chunk: int, decode_seconds: float | None = None, token_seconds: float | None = None
    ) -> None:
        self.chunk = chunk
        self._decode: dict[int, float] = {} if decode_seconds is None else {1: decode_seconds}
        self._token = token_seconds

    def tokens(self, decoding: int) -> int:
        """Prompt tokens for a step in which so many requests decode."""
        alone = self._alone(decoding)
        if alone is None or not self._token:
            return self.chunk
        share = int((SLOWDOWN - 1.0) * alone / self._token)
        return max(min(LEAST, self.chunk), min(share, self.chunk))

    def measured(self, works: list[Work], seconds: float) -> None:
        """Take in a step of so many seconds."""
        prompt = sum(work.count for work in works if work.is_prefill)
        decoding = sum(not work.is_prefill for work in works)
        if not prompt:
            self._decode[decoding] = _mean(self._decode.get(decoding), seconds)
            return
        alone = self._alone(decoding) if decoding else 0.0
        if alone is not None:
            # What a token costs depends on how many there are: after a step that took too long at once.
            cost = max(seconds - alone, 0.0) / prompt
            slow = bool(decoding) and seconds > SLOWDOWN * alone
            self._token = cost if slow and cost > (self._token or 0.0) else _mean(self._token, cost)

    def _alone(self, decoding: int) -> float | None:
        """Seconds of a step in which so many requests decode and nothing else; of fewer, if unknown."""
        known = [count for count in self._decode if count <= decoding]
        return self._decode[max(known)] if known else None


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
