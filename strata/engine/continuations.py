"""Where two models' texts part: greedy continuations of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.core import Request, SamplingParams
from strata.engine.engine import Engine


@dataclass(frozen=True)
class Continuation:
    """Greedy answers of two models to the same prompt, as token ids; a stop id at the end is left out."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    other: tuple[int, ...]

    @property
    def diverges(self) -> int | None:
        """How many tokens agree before the first that does not; None where all agree."""
        longest = max(len(self.reference), len(self.other))
        return next((i for i in range(longest) if self.reference[i : i + 1] != self.other[i : i + 1]), None)


def continuations(
    reference: Engine, other: Engine, prompts: Sequence[Sequence[int]], tokens: int, stop_ids: frozenset[int]
) -> list[Continuation]:
    """Both engines' greedy answers of up to `tokens` tokens. Raises what `Engine.add` raises."""
    return [
        Continuation(
            tuple(prompt), *(_greedy(engine, prompt, tokens, stop_ids) for engine in (reference, other))
        )
        for prompt in prompts
    ]


def _greedy(engine: Engine, prompt: Sequence[int], tokens: int, stop_ids: frozenset[int]) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    return tuple(engine.generate(Request("continuation", list(prompt), sampling, stop_ids)))
