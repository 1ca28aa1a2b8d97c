"""From a store on disk to an engine: sizes, refusals, and the same text from both backends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strata.backends.base import KvSpec
from strata.core import Request, SamplingParams
from strata.engine.engine import Engine
from strata.engine.load import kv_size, load_engine
from strata.errors import CapacityError, ConfigError, StoreError
from strata.model.resolve import resolve
from strata.store.checkpoint import open_checkpoint
from strata.store.convert import convert
from strata.store.options import ConvertOptions
from strata.store.reader import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PROMPT = [5, 77, 3, 120, 42]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE, experts and shared layers in 4 bit."""
    folder = tmp_path_factory.mktemp("load")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "checkpoint")
    source = open_checkpoint(folder / "checkpoint")
    resolved = resolve(source.config, source.tensors, source.kind)
    options = ConvertOptions(experts="w4g64", shared="w4g64", head="w8", embed="bf16", slices=1)
    convert(source, resolved.spec, resolved.targets, resolved.experts, folder / "store", options)
    return folder / "store"


def answer(engine: Engine) -> list[int]:
    return list(engine.generate(Request("a", PROMPT, GREEDY)))


def test_both_backends_give_the_same_text(store: Path) -> None:
    exact = load_engine(store, backend="cpu", activations="f32", threads=2, kv_dtype="f32", kv_bytes=1 << 24)
    truth = load_engine(store, backend="reference", kv_dtype="f32", kv_bytes=1 << 24)
    assert answer(exact) == answer(truth)


def test_defaults_answer(store: Path) -> None:
    engine = load_engine(store)
    assert engine.options.context == 256 and engine.options.valid_tokens == 128
    assert len(answer(engine)) == 12


def test_valid_tokens_bound_the_answer(store: Path) -> None:
    limit = sorted(answer(load_engine(store)))[6]
    engine = load_engine(store, valid_tokens=limit)
    assert max(answer(engine)) < limit


def test_no_torch_for_the_cpu_backend(store: Path) -> None:
    """`strata run` must not wait seconds for torch."""
    code = (
        "import sys; from strata.engine.load import load_engine; "
        f"e = load_engine({str(store)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        load_engine(tmp_path)


@pytest.mark.parametrize(
    ("context", "kv_pages", "sequences", "expected"),
    [
        (None, 100, 1, (256, 16)),
        (None, 10, 1, (160, 10)),
        (None, 10, 3, (48, 9)),
        (100, 100, 1, (100, 7)),
        (100, 100, 4, (100, 28)),
        (2, 1, 1, (2, 1)),
    ],
)
def test_size_of_the_kv_cache(
    store: Path, context: int | None, kv_pages: int, sequences: int, expected: tuple[int, int]
) -> None:
    """Pages of 16 tokens; the context asked for, or as much of the model's 256 as fits."""
    spec = Store.open(store).spec
    kv = KvSpec.of(spec, 16, "int8")
    size = kv_size(spec, kv, context, kv_pages * kv.page_bytes, sequences)
    assert (size.context, size.pages) == expected


def test_sizes_that_cannot_be(store: Path) -> None:
    spec = Store.open(store).spec
    kv = KvSpec.of(spec, 16, "int8")
    with pytest.raises(ConfigError, match=r"257 tokens, but .* was made for 256"):
        kv_size(spec, kv, 257, 1 << 30, 1)
    needed, budget = 2 * kv.page_bytes, 2 * kv.page_bytes - 1
    with pytest.raises(
        CapacityError, match=f"needs {needed} bytes for 1 x 32 tokens, {budget} are available"
    ):
        kv_size(spec, kv, 32, budget, 1)
    with pytest.raises(CapacityError, match=r"lower model\.context"):
        kv_size(spec, kv, None, 0, 1)


def test_auto_takes_half_of_the_free_memory(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(Store.open(store).spec, context=1 << 20)
    kv = KvSpec.of(spec, 16, "int8")
    monkeypatch.setattr("strata.engine.load.available_bytes", lambda: 21 * kv.page_bytes)
    assert kv_size(spec, kv, None, None, 1).context == 160
