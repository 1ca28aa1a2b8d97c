"""Sampling with drafts draws from the distribution without them (chi-square on 5 tokens, fixed seeds)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from strata.core import SamplingParams
from strata.engine.sampler import Sampler, min_p, top_k, top_p

TOKENS = 5
SETTINGS = {
    "plain": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "hot": SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0),
    "filtered": SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.05),
    "penalized": SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.7, repeat_penalty=1.3
    ),
}


def logits_after(last: int) -> np.ndarray:
    """A toy model: the next token's logits depend on the last token."""
    return np.random.default_rng(last).standard_normal(TOKENS).astype(np.float32) * 1.5


def draft_after(last: int) -> np.ndarray:
    """A draft that is often right and never quite."""
    return logits_after(last) + np.random.default_rng(50 + last).standard_normal(TOKENS).astype(np.float32)


def verified(sampler: Sampler, tokens: list[int], proposed: Sequence[int]) -> list[int]:
    """What the engine does with the rows of a draft: sample, go on while the draft is what was sampled."""
    taken: list[int] = []
    for guess in (*proposed, None):
        taken.append(sampler.sample(logits_after((tokens + taken)[-1]), tokens + taken))
        if taken[-1] != guess:
            break
    return taken


def pairs(params: SamplingParams, proposer: str, count: int) -> Counter[tuple[int, int]]:
    """First two tokens of `count` answers to the prompt [0]."""
    found: Counter[tuple[int, int]] = Counter()
    for seed in range(count):
        sampler = Sampler(SamplingParams(**{**params.__dict__, "seed": seed}), TOKENS)
        tokens = [0]
        while len(tokens) < 3:
            if proposer == "fixed":
                draft = [1, 2]
            else:
                draft = []
                for number in sampler.ahead(2):
                    text = tokens + draft
                    draft.append(sampler.guess(draft_after(text[-1]), text, number))
            tokens += verified(sampler, tokens, draft)
        found[tokens[1], tokens[2]] += 1
    return found


def distribution(params: SamplingParams, tokens: list[int]) -> np.ndarray:
    """The filtered distribution, from the sampler's published stages."""
    sampler = Sampler(params, TOKENS)
    candidates = top_k(sampler.scores(logits_after(tokens[-1]), tokens), params.top_k)
    candidates = min_p(top_p(candidates, params.top_p), params.min_p)
    result = np.zeros(TOKENS)
    result[candidates.ids] = candidates.probabilities(params.temperature)
    return result


def p_value(statistic: float, freedom: int) -> float:
    """Upper tail of the chi-square distribution, by Wilson and Hilferty (good to 0.001 here)."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("proposer", ["fixed", "coupled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_pairs_of_tokens_have_the_distribution_of_plain_sampling(name: str, proposer: str) -> None:
    """1,500 answers; p above 0.01 with these seeds (they are fixed: the test cannot flake).

    Measured p-values are in docs/speculation.md. A verifier that accepts the first proposal unchecked has p
    below 1e-9.
    """
    params, count = SETTINGS[name], 1500
    first = distribution(params, [0])
    expected = {
        (a, b): count * first[a] * distribution(params, [0, a])[b]
        for a in range(TOKENS)
        for b in range(TOKENS)
    }
    found = pairs(params, proposer, count)
    assert all(expected[pair] > 0 for pair in found)
    cells = [pair for pair, amount in expected.items() if amount >= 5]
    rest = count - sum(expected[pair] for pair in cells), count - sum(found[pair] for pair in cells)
    statistic = sum((found[pair] - expected[pair]) ** 2 / expected[pair] for pair in cells)
    statistic += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] >= 5 else 0.0
    p = p_value(statistic, len(cells) - (rest[0] < 5))
    print(f"{name}, {proposer}: chi-square {statistic:.1f}, {len(cells)} cells, p = {p:.3f}")
    assert p > 0.01


def test_the_test_notices_a_first_token_that_is_not_checked() -> None:
    """case-29: the first draft token was accepted unchecked."""
    params, count = SETTINGS["plain"], 1500
    first = distribution(params, [0])
    statistic = sum(
        (count * (token == 1) - count * first[token]) ** 2 / (count * first[token]) for token in range(TOKENS)
    )
    assert p_value(statistic, TOKENS - 1) < 1e-9


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_gives_the_same_text_with_drafts(name: str) -> None:
    """More than the distribution: every single text is the same, token by token."""
    for seed in range(50):
        params = SamplingParams(**{**SETTINGS[name].__dict__, "seed": seed})
        texts = []
        for drafts in (False, True):
            sampler, tokens = Sampler(params, TOKENS), [0]
            while len(tokens) < 20:
                tokens += verified(sampler, tokens, [1, 2, 3, 0] if drafts else [])
            texts.append(tokens[:20])
        assert texts[0] == texts[1]
