"""verify_draft against the engine's own sampler: the same tokens for the same random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import Case, Prepared, call_of
from cases_head_topk import best
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.core import SamplingParams
from strata.engine.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class GivenNumber:
    """Takes the place of a sampler's random numbers."""

    value: float = 0.0

    def random(self) -> float:
        return self.value


@dataclass(frozen=True)
class Draft:
    """tokens: of the draft; right: how many of them are what the sampler says."""

    params: SamplingParams
    tokens: int
    right: int


def prepare(drafts: tuple[Draft, ...], vocab: int, top: int, seed: int = 0) -> Prepared:
    rng = np.random.default_rng(seed)
    rows = sum(1 + draft.tokens for draft in drafts)
    logits = (2 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, rng.permutation(vocab)[: vocab // 3]] = -np.inf  # what a grammar forbids
    uniforms = rng.random(rows).astype(np.float32)
    first_row = np.cumsum([0, *(1 + draft.tokens for draft in drafts)]).astype(np.int32)
    sampled = [
        sampled_token(draft.params, logits[row], float(uniforms[row]))
        for draft, begin in zip(drafts, first_row, strict=False)
        for row in range(begin, begin + 1 + draft.tokens)
    ]
    proposed = np.array(sampled, np.int32)
    for draft, begin in zip(drafts, first_row, strict=False):
        proposed[begin + draft.right : begin + draft.tokens] += 1  # none is what was sampled
        proposed[begin + draft.tokens] = sampled[begin + draft.tokens]  # nothing was proposed: not looked at
    ids = np.arange(vocab)
    candidates = [best(row, ids, top) for row in logits]
    values = np.array([c[0] for c in candidates], np.float32)
    found = np.array([c[1] for c in candidates], np.int32)
    accepted, tokens = (unwritten((len(drafts),), np.int32) for _ in range(2))
    settings = np.array([sampler_settings(draft.params) for draft in drafts], np.float32)
    inputs = (values, found, first_row, proposed, settings, uniforms)
    shape = launch_shapes.verify_draft(len(drafts))
    call = call_of(shape, (*map(read_only, inputs), accepted, tokens, top, len(drafts)))

    def check() -> None:
        np.testing.assert_array_equal(accepted, [draft.right for draft in drafts])
        behind = [sampled[begin + draft.right] for draft, begin in zip(drafts, first_row, strict=False)]
        np.testing.assert_array_equal(tokens, behind)

    return Prepared(call, check)


def sampler_settings(params: SamplingParams) -> tuple[float, float, float, int]:
    """As the kernel takes them: 1 / temperature, top_p, ln min_p, top_k."""
    inverse = 1 / params.temperature if params.temperature > 0 else 0.0
    return inverse, params.top_p, float(np.log(params.min_p)) if params.min_p > 0 else -3e38, params.top_k


def sampled_token(params: SamplingParams, logits: np.ndarray, uniform: float) -> int:
    """What the engine's sampler says."""
    sampler = Sampler(params, len(logits))
    sampler.random = GivenNumber(uniform)  # type: ignore[assignment]
    return sampler.sample(logits, [])


WARM = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05)
HOT = SamplingParams(temperature=3.0, top_k=70, top_p=1.0, min_p=0.0)
NUCLEUS = SamplingParams(temperature=1.0, top_k=64, top_p=0.6, min_p=0.0)
LEAST = SamplingParams(temperature=2.0, top_k=50, top_p=1.0, min_p=0.2)
MIXED = (
    *(Draft(GREEDY, 3, 3), Draft(GREEDY, 2, 0), Draft(WARM, 3, 1), Draft(HOT, 4, 4)),
    *(Draft(NUCLEUS, 2, 1), Draft(LEAST, 3, 3), Draft(HOT, 0, 0), Draft(LEAST, 1, 0), Draft(WARM, 2, 2)),
)
FLAT = SamplingParams(temperature=60.0, top_k=120, top_p=1.0, min_p=0.0)


NO_MIN_P = -3e38
MARGIN = 1 / 16384  # of the kernel's: nearer to a border than this it does not decide


def given_rows(
    rows: list[tuple[list[float], list[int], tuple[float, ...], float]], wanted: list[int]
) -> Prepared:
    """Sequences of one row: candidates, ids, settings, random number; what each is to say."""
    values = np.array([row[0] for row in rows], np.float32)
    ids = np.array([row[1] for row in rows], np.int32)
    settings = np.array([row[2] for row in rows], np.float32)
    uniforms = np.array([row[3] for row in rows], np.float32)
    count = len(rows)
    first_row = np.arange(count + 1, dtype=np.int32)
    inputs = (values, ids, first_row, np.zeros(count, np.int32), settings, uniforms)
    accepted, tokens = (unwritten((count,), np.int32) for _ in range(2))
    top = values.shape[1]
    call = call_of(launch_shapes.verify_draft(count), (*map(read_only, inputs), accepted, tokens, top, count))

    def check() -> None:
        assert (accepted.tolist(), tokens.tolist()) == ([0] * count, wanted)

    return Prepared(call, check)


def borders() -> Prepared:
    """Within a margin of a border nothing is decided, and nothing of what is not finite or not there."""
    pair, ids, nothing = [1.0, 1.0, -3e38], [4, 7, -1], [-3e38] * 3
    plain, greedy = (1, 1, NO_MIN_P, 3), (0, 1, NO_MIN_P, 3)
    largest = float(np.finfo(np.float32).max)
    near, clear = MARGIN * 0.9, MARGIN * 1.1
    falling, three = [1.0, 0.0, -1.0], [5, 6, 8]
    half = float(np.log(0.5))
    top_p = float(1 / (1 + np.exp(-1) + np.exp(-2)))  # the best one's share
    rows = [
        *((pair, ids, plain, 0.5 + off) for off in (0.0, near, -near, clear, -clear)),
        *((pair, ids, plain, number) for number in (0.0, near, 1 - near)),
        *((nothing, [-1] * 3, which, 0.5) for which in (plain, greedy)),
        *(([largest, 1.0, 0.0], three, which, 0.5) for which in (plain, greedy)),
        (falling, three, greedy, 0.9),
        *((falling, three, (1e-3, top_p + off, NO_MIN_P, 3), 0.6) for off in (0.0, near, clear, -clear)),
        *(([1.0, 1.0 + half + off, -9], three, (1e-3, 1, half, 3), 0.7) for off in (0.0, 1e-6, -1e-6)),
    ]
    of_pairs = [-1, -1, -1, 7, 4, 4, 4, 7]
    return given_rows(rows, [*of_pairs, -1, -1, -1, -1, 5, -1, -1, 6, 5, -1, 6, 5])


CASES = [
    Case("borders", "verify_draft", borders, True),
    Case("flat", "verify_draft", lambda: prepare((Draft(FLAT, 5, 5), Draft(FLAT, 4, 2)), 300, 128, 3)),
    Case("mixed", "verify_draft", lambda: prepare(MIXED, 300, 80, 5), True),
    Case("hot", "verify_draft", lambda: prepare(tuple(Draft(HOT, 2, i % 3) for i in range(5)), 200, 70, 1)),
    Case("few", "verify_draft", lambda: prepare((Draft(HOT, 1, 1), Draft(WARM, 1, 0)), 24, 40, 7)),
]
