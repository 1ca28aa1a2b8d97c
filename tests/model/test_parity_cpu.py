"""The cpu backend against the reference on the same store: bf16 and w4 weights, f32 and int8 activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import parity
import pytest
import small_models

from strata.backends.cpu import CpuBackend
from strata.backends.reference import ReferenceBackend
from strata.store.options import ConvertOptions
from strata.store.reader import Store

W4 = ConvertOptions(experts="w4g64", shared="w4g64", head="w8", embed="w8")
STORES = {"bf16": parity.EXACT, "w4g64": W4}
# With f32 activations both compute the same sums in another order (measured: 4e-5 where logits have a
# deviation of 8, 2e-5 elsewhere).
EXACT_BOUND = 1e-4
# int8 activations: rms error of a token's logits relative to their deviation, the median token (measured:
# 0.7 to 4.8 %; a token whose experts change because of the noise is further off, so the mean says nothing).
INT8_BOUND = 0.08


class Stored(NamedTuple):
    store: Store
    ids: list[int]
    logits: parity.Logits


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Stored]:
    """A case in a weight format, with the reference's logits of every position."""
    made: dict[tuple[str, str], Stored] = {}

    def make(case: str, weights: str) -> Stored:
        if (case, weights) not in made:
            folder: Path = tmp_path_factory.mktemp("cpu")
            small_models.save(case, folder / "hf")
            store = parity.to_store(folder / "hf", folder / "store", STORES[weights])
            ids = parity.tokens(small_models.VOCAB)
            logits = parity.strata_logits(store, ReferenceBackend(), ids, [parity.PROMPT])
            made[case, weights] = Stored(store, ids, logits)
        return made[case, weights]

    return make


@pytest.mark.parametrize("weights", STORES)
@pytest.mark.parametrize("case", small_models.CASES)
def test_f32_activations(case: str, weights: str, stored: Callable[[str, str], Stored]) -> None:
    model = stored(case, weights)
    backend = CpuBackend(threads=1, activations="f32")
    logits = parity.strata_logits(model.store, backend, model.ids, [7, parity.PROMPT - 7])
    assert np.abs(logits - model.logits).max() < EXACT_BOUND


@pytest.mark.parametrize("case", small_models.CASES)
def test_int8_activations(case: str, stored: Callable[[str, str], Stored]) -> None:
    model = stored(case, "w4g64")
    backend = CpuBackend(threads=1, activations="int8")
    logits = parity.strata_logits(model.store, backend, model.ids, [parity.PROMPT])
    errors = np.sqrt(np.square(logits - model.logits).mean(axis=1)) / model.logits.std()
    assert np.median(errors) < INT8_BOUND
