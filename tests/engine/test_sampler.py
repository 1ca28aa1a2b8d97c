"""Sampling: llama.cpp's stages one by one, extreme values in every combination, seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.core import SamplingParams
from strata.engine.sampler import Sampler, min_p, penalized, top_k, top_p
from strata.errors import NumericalError, RequestError

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample(logits: np.ndarray, tokens: list[int] | None = None, **params: object) -> int:
    return Sampler(SamplingParams(**params), len(logits)).sample(logits, tokens or [0])


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# The stages


@example([-math.inf, -math.inf], 1)
@example([-math.inf, 0.5, -math.inf, -math.inf], 2)
@given(
    st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 3.0, 2.0**127]), min_size=1, max_size=40),
    st.integers(-2, 50),
)
def test_top_k_is_a_stable_sort_cut_off(values: list[float], k: int) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    candidates = top_k(f32(*values), k)
    assert candidates.ids.tolist() == (order[:k] if 0 < k < len(values) else order)
    assert candidates.logits.tolist() == [values[i] for i in candidates.ids]


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_top_p_keeps_the_fewest_that_reach_p(values: list[float], p: float) -> None:
    everything = top_k(f32(*values), 0)
    kept = len(top_p(everything, p).ids)
    shares = everything.probabilities()
    assert 1 <= kept <= len(values)
    assert kept == 1 or shares[: kept - 1].sum() < p + 1e-12, "one fewer would do"
    assert kept == len(values) or shares[:kept].sum() >= p - 1e-12, "too few"


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_min_p_keeps_what_is_p_times_the_best(values: list[float], p: float) -> None:
    everything = top_k(f32(*values), 0)
    kept = min_p(everything, p)
    shares = everything.probabilities() / everything.probabilities()[0]
    assert 1 <= len(kept.ids) <= len(values)
    assert (shares[: len(kept.ids)] >= p * (1 - 1e-9)).all()
    assert (shares[len(kept.ids) :] <= p * (1 + 1e-9)).all()


def test_penalties_of_repeated_tokens() -> None:
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=4)
    logits = f32(4.0, -4.0, 1.0, 1.0)
    changed = penalized(logits, [3, 3, 0, 1, 1, 0], params)
    # 0 and 1 occur twice among the last four, 3 only before them: (4 / 2, -4 * 2) - 2 * 0.5 - 0.25.
    assert changed.tolist() == [0.75, -9.25, 1.0, 1.0]
    assert logits.tolist() == [4.0, -4.0, 1.0, 1.0], "the logits belong to the caller"


@pytest.mark.parametrize(
    ("last_n", "expected"), [(0, [4.0, 4.0]), (1, [4.0, 2.0]), (-1, [2.0, 2.0]), (99, [2.0, 2.0])]
)
def test_how_far_penalties_look_back(last_n: int, expected: list[float]) -> None:
    params = SamplingParams(repeat_penalty=2.0, repeat_last_n=last_n)
    assert penalized(f32(4.0, 4.0), [0, 1, 1], params).tolist() == expected


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    assert sample(f32(0, 3, 1, 3), temperature=0) == 1


def test_penalties_apply_to_greedy_too() -> None:
    assert sample(f32(0, 3, 1, 2.9), [1], temperature=0, repeat_penalty=1.5) == 3


def test_frequencies_follow_the_softmax() -> None:
    """20,000 draws: each frequency within five standard deviations of its probability."""
    logits, draws = f32(1.0, 0.0, -1.0, 2.0), 20_000
    sampler = Sampler(SamplingParams(temperature=0.7, seed=11, **NEUTRAL), 4)
    counts = np.bincount([sampler.sample(logits, [0]) for _ in range(draws)], minlength=4)
    expected = np.exp(logits.astype(np.float64) / 0.7)
    expected /= expected.sum()
    assert (np.abs(counts / draws - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)).all()


def test_temperature_comes_last() -> None:
    """llama.cpp's order: top_p looks at the probabilities before the temperature flattens them."""
    logits = f32(3.0, 0.0, 0.0, 0.0)
    seen = {sample(logits, temperature=50.0, top_p=0.8, min_p=0.0, top_k=0, seed=seed) for seed in range(50)}
    assert seen == {0}


# What must never be chosen


def test_padding_rows_of_the_vocabulary_are_never_chosen() -> None:
    """A vocabulary padded past the tokenizer: the padding rows' logits may even be NaN."""
    logits = f32(0.0, 1.0, np.nan, 99.0)
    assert Sampler(SamplingParams(temperature=0), 2).sample(logits, [0]) == 1
    sampler = Sampler(SamplingParams(temperature=100.0, seed=1, **NEUTRAL), 2)
    assert {sampler.sample(logits, [3]) for _ in range(50)} == {0, 1}


def test_banned_ids_are_never_chosen() -> None:
    for temperature in (0.0, 5.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1, **NEUTRAL), 3, banned={1, 77, -1})
        assert 1 not in {sampler.sample(f32(0, 9, 0), [0]) for _ in range(50)}


def test_impossible_tokens_are_never_drawn() -> None:
    sampler = Sampler(SamplingParams(temperature=100.0, seed=3, **NEUTRAL), 4)
    logits = f32(-np.inf, 0.0, -np.inf, 0.0)
    assert {sampler.sample(logits, [0, 1]) for _ in range(300)} == {1, 3}


# case-25: extreme values


TEMPERATURES = (0.0, 1e-320, 1e-9, 1e-4, 2.0, 100.0)
TOP_PS = (0.0, 1e-9, 1.0)
TOP_KS = (0, -1, 1, 40002, 9999999)
MIN_PS = (0.0, 1.0)
PENALTIES = (1.0, 1e-30, 100.0)
VOCAB = 40001
ONE_POSSIBLE = np.full(VOCAB, -np.inf, np.float32)
ONE_POSSIBLE[40000] = -3.0
HUGE = np.linspace(-3e38, 3e38, VOCAB, dtype=np.float32)
USUAL = (np.random.default_rng(2).standard_normal(VOCAB) * 4).astype(np.float32)


@pytest.mark.parametrize(("temperature", "penalty"), list(itertools.product(TEMPERATURES, PENALTIES)))
def test_every_combination_of_extremes_gives_a_possible_token(temperature: float, penalty: float) -> None:
    """case-25: 1,620 combinations on a vocabulary of odd size; no crash, no warning, no impossible token."""
    for p, k, m, logits in itertools.product(TOP_PS, TOP_KS, MIN_PS, (ONE_POSSIBLE, HUGE, USUAL)):
        params = SamplingParams(
            temperature=temperature,
            top_p=p,
            top_k=k,
            min_p=m,
            repeat_penalty=penalty,
            seed=1,
            presence_penalty=2.0,
        )
        with np.errstate(all="raise", under="ignore"):
            token = Sampler(params, VOCAB).sample(logits, [40000, 5, 5])
        assert 0 <= token < VOCAB and logits[token] > -np.inf
        if penalty == 1.0 and (temperature <= 1e-4 or p < 1 or k == 1 or m == 1):
            assert token == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e-4])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """case-25: dividing by 1e-4 must not overflow into empty text."""
    for seed in range(20):
        assert sample(USUAL, temperature=temperature, seed=seed, **NEUTRAL) == int(USUAL.argmax())


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_without_meaning_end_the_request(bad: list[float], temperature: float) -> None:
    """case-25: NaN logits."""
    with pytest.raises(NumericalError, match="the best of 2 logits is"):
        sample(f32(*bad), temperature=temperature)


@pytest.mark.parametrize(
    "params",
    [{"repeat_penalty": 0.0}, {"temperature": math.nan}, {"top_p": 1.5}, {"min_p": -0.1}, {"max_tokens": -1}],
)
def test_values_out_of_range_are_refused_by_name(params: dict[str, float]) -> None:
    """case-25: repetition penalty 0."""
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


@given(
    logits=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    temperature=st.floats(0, 100),
    k=st.integers(-1, 15),
    p=st.floats(0, 1),
    m=st.floats(0, 1),
    penalty=st.floats(1e-30, 100),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=300, deadline=None)
def test_any_values_give_a_token(
    logits: list[float], temperature: float, k: int, p: float, m: float, penalty: float, seed: int
) -> None:
    token = sample(
        f32(*logits),
        [0, 1],
        temperature=temperature,
        top_k=k,
        top_p=p,
        min_p=m,
        repeat_penalty=penalty,
        seed=seed,
    )
    assert 0 <= token < len(logits)


# case-26: seeds


def draws(seed: int | None, count: int = 30) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=1.5, seed=seed, **NEUTRAL), VOCAB)
    return [sampler.sample(USUAL, [0]) for _ in range(count)]


def test_a_seed_repeats_and_seeds_differ() -> None:
    """case-26: seed 42 five times, seeds 1 to 5."""
    assert len({tuple(draws(42)) for _ in range(5)}) == 1
    assert len({tuple(draws(seed)) for seed in range(1, 6)}) == 5


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed_differs_every_time(seed: int | None) -> None:
    """case-26: without a seed every answer was the same. -1 is llama.cpp's word for no seed."""
    assert len({tuple(draws(seed)) for _ in range(5)}) == 5


def test_other_requests_draws_change_nothing() -> None:
    """case-26: two samplers in turn draw what each draws alone."""
    samplers = [Sampler(SamplingParams(temperature=1.5, seed=seed, **NEUTRAL), VOCAB) for seed in (1, 2)]
    turns = [[sampler.sample(USUAL, [0]) for sampler in samplers] for _ in range(30)]
    assert [list(column) for column in zip(*turns, strict=True)] == [draws(1), draws(2)]
