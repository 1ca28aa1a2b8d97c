"""Logits of every architecture against transformers, from its own files through a bf16 store.

The reference backend is held to transformers (f32, 1e-4); the cpu backend to the reference on the same store.
How far off each case is: `pytest tests/model/test_parity.py -k prefill_and_decode --junitxml FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import parity
import pytest
import small_models

from strata.backends.reference import ReferenceBackend
from strata.store.reader import Store

TOLERANCE = 1e-4


class Model(NamedTuple):
    """A saved model, its bf16 store, the tokens and transformers' logits of every position."""

    checkpoint: Path
    store: Store
    ids: list[int]
    logits: parity.Logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def make(case: str) -> Model:
        if case not in made:
            folder = tmp_path_factory.mktemp("model")
            model = small_models.save(case, folder / "hf")
            # The last rows of the vocabulary are padding that no tokenizer produces.
            ids = parity.tokens(small_models.VOCAB - 56)
            store = parity.to_store(folder / "hf", folder / "store")
            made[case] = Model(folder / "hf", store, ids, parity.transformers_logits(model, ids))
        return made[case]

    return make


@pytest.mark.parametrize("case", small_models.CASES)
def test_prefill_and_decode(
    case: str, models: Callable[[str], Model], record_property: Callable[[str, object], None]
) -> None:
    model = models(case)
    logits = parity.strata_logits(model.store, ReferenceBackend(), model.ids, [parity.PROMPT])
    assert logits.shape == (parity.PROMPT + parity.STEPS, small_models.VOCAB)
    difference = np.abs(logits - model.logits).max()
    record_property("difference", f"{difference:.1e}")
    assert difference < TOLERANCE
    # A test that any model would pass proves nothing: tokens must matter to the logits.
    assert model.logits.std(axis=0).mean() > 0.3


@pytest.mark.parametrize("case", small_models.CASES)
def test_prefill_in_two_chunks(case: str, models: Callable[[str], Model]) -> None:
    model = models(case)
    prompt = model.ids[: parity.PROMPT]
    logits = parity.strata_logits(model.store, ReferenceBackend(), prompt, [9, parity.PROMPT - 9])
    assert np.abs(logits - model.logits[: parity.PROMPT]).max() < TOLERANCE


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_names_of_transformers_modules(case: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    """Files with the names that transformers 5 has in memory (experts in one tensor) are the same model."""
    model = models(case)
    small_models.build(case).save_pretrained(tmp_path / "hf", save_original_format=False)
    store = parity.to_store(tmp_path / "hf", tmp_path / "store")
    ids = model.ids[:4]
    ours = parity.strata_logits(store, ReferenceBackend(), ids, [4])
    assert np.array_equal(ours, parity.strata_logits(model.store, ReferenceBackend(), ids, [4]))


def test_experts_without_tokens(models: Callable[[str], Model]) -> None:
    """Decoding one token leaves most experts idle, and the prompt left at least one so in some layer."""
    model = models("qwen3_moe-top1")
    session = parity.Session(model.store, ReferenceBackend(), len(model.ids))
    session.feed(model.ids[:4])
    chosen = [set(np.unique(ids)) for ids in session.decoder.routes.ids.values()]
    assert all(0 < len(experts) < 8 for experts in chosen)
    logits = session.feed(model.ids[4:5])
    assert np.abs(logits - model.logits[4]).max() < TOLERANCE
