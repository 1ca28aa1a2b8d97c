"""Plain data that every part of Strata may import. No behaviour beyond validation and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from strata.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]
    BoolArray = NDArray[np.bool_]


MOST_DRAFTED = 16
"""Proposed tokens of one request in a step, at most: speculative decoding verifies that many at once."""
PAGE_TOKENS = 32
"""Tokens of a KV page, unless kv.page_tokens asks for others."""
KvDtype = Literal["int8", "int8g128", "int8g64", "int8g32", "int8t", "bf16", "f32"]
"""int8: codes with a scale per token and head; int8g*: a scale per so many elements of a head; int8t: one
scale for all keys of a layer and one for all its values, for comparison only."""


class ExpertId(NamedTuple):
    """One expert FFN: `layer` counts decoder layers from 0, `index` counts experts of that layer."""

    layer: int
    index: int  # type: ignore[assignment]  # the field's word; nobody searches an id with tuple.index


class FinishReason(Enum):
    """Why a request ended; values are OpenAI's words where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; names and meanings are llama.cpp's.

    Neutral values switch a stage off: temperature 0 is greedy, top_k 0 and top_p 1 keep everything,
    min_p 0, repeat_penalty 1, presence_penalty 0, frequency_penalty 0. seed None draws a fresh seed.
    max_tokens None means "until the context is full".
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_p", self.top_p, 0.0 <= self.top_p <= 1.0, "0 to 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            (
                "repeat_penalty",
                self.repeat_penalty,
                0.0 < self.repeat_penalty <= 100.0,
                "above 0, at most 100",
            ),
            ("repeat_last_n", self.repeat_last_n, self.repeat_last_n >= -1, "-1 (whole context) or more"),
            ("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 2.0, "-2 to 2"),
            ("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 2.0, "-2 to 2"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 0, "0 or more"),
            ("stop", self.stop, all(self.stop), "non-empty strings"),
        )
        for name, value, valid, allowed in checks:
            if not valid:
                raise RequestError(f"{name} is {value!r}", remedy=f"allowed: {allowed}")


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the model, and the likeliest tokens beside it, best first.

    Of the logits as the model gives them: before bias, penalties, filters and temperature.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What one request's answer must look like, token by token. Belongs to the thread that samples.

    Every question names the whole answer before its position, so that any position may be asked in any order
    (drafts that are verified are positions, too): what was taken in and is not part of it is taken back.
    """

    def allowed(self, answer: list[int]) -> BoolArray:
        """bool `[ids]`: which ids may follow these; a stop id where the answer may end.

        Raises RequestError where the answer is none that the constraint allows, or has become too costly.
        """

    def legal(self, answer: list[int], draft: list[int]) -> int:
        """How many of the draft's tokens, from its first, may follow the answer."""


@dataclass
class Request:
    """One prompt and the progress of its answer; the engine knows token ids only.

    `tokens` holds prompt and generated ids; positions [0, computed) are already in the KV pages, and the
    first `shared` of them were there before: another request had the same beginning.
    logit_bias: added to the logits of these ids before anything else. logprobs: how many alternatives are
    reported with each token's log-probability; None: no log-probabilities. scored: also those of the prompt's
    tokens but the first, which `scores` then holds when the first event comes; nothing is shared then.
    priority: lower ones are admitted first, within limits. constraint: of this request alone; it knows where
    answers end, so that ignore_eos has no say beside it.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    scored: bool = False
    constraint: Constraint | None = None
    priority: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    shared: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty", remedy="send at least one token")
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """Ids produced so far, without the prompt."""
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True)
class Sequence:
    """The part of one request that a forward pass computes.

    rows `[first_row, first_row + count)` of the batch are this request's tokens at positions
    `[start, start + count)`; `pages` covers at least `start + count` tokens.
    """

    first_row: int
    count: int
    start: int
    pages: IntArray


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, rows packed sequence after sequence.

    token_ids, positions: int32 `[rows]`; logit_rows: int32 `[n]`, the rows whose logits are wanted.
    """

    token_ids: IntArray
    positions: IntArray
    sequences: tuple[Sequence, ...]
    logit_rows: IntArray

    @classmethod
    def single(cls, token_ids: IntArray, positions: IntArray, pages: IntArray, logit_rows: IntArray) -> Batch:
        """Consecutive tokens of one request, at least one."""
        part = Sequence(0, len(token_ids), int(positions[0]), pages)
        return cls(token_ids, positions, (part,), logit_rows)

    @property
    def rows(self) -> int:
        """Tokens in this pass."""
        return len(self.token_ids)
