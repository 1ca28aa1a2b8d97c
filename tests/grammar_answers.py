"""Answers under a grammar, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.core import Constraint
from strata.interfaces.tokenizer import Tokenizer

MOST_TOKENS = 4000
"""More than any grammar of the tests can need."""


def written(tokenizer: Tokenizer, constraint: Constraint, seed: int, markers: Sequence[str] = ()) -> str:
    """An answer of a model that wants anything at all: any of the tokens that are allowed, again and again.

    markers: texts that it writes more often, so that free text comes to its end; they stay in the answer.
    """
    random, answer = np.random.default_rng(seed), list[int]()
    liked = [tokenizer.encode(text, special=True) for text in markers]
    while len(answer) < MOST_TOKENS:
        if liked and random.random() < 0.3:
            answer += _liked(constraint, answer, liked[random.integers(len(liked))])
        ids = np.flatnonzero(constraint.allowed(answer)[: tokenizer.vocab_size])
        others = [index for index in ids if index not in tokenizer.stop_ids]
        if not others or (len(others) < len(ids) and random.random() < 0.5):
            return tokenizer.decode(answer, skip_special=not markers, continuation=True)
        answer.append(int(random.choice(others)))
    raise AssertionError(f"no end: {tokenizer.decode(answer)[-300:]!r}")


def _liked(constraint: Constraint, answer: list[int], ids: list[int]) -> list[int]:
    return ids if constraint.legal(answer, ids) == len(ids) else []
