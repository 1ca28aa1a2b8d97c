"""Every KV cache beside BF16 on the same text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_model import VOCAB, TinyStore, make_backend, mla_spec, moe_spec

from strata.backends.base import KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.cpu_kv import CpuKvCache
from strata.core import Batch, Sequence
from strata.engine.kv_comparison import KvText, compare_kv, kv_variants, tensor_steps
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec

TEXT = KvText(*np.split(np.random.default_rng(3).integers(VOCAB, size=70), [20]))


def decoder_of(spec: ModelSpec) -> Decoder:
    return Decoder(spec, TinyStore(spec, fmt="w4g64"), make_backend("cpu", 1, "f32"))


def test_bf16_is_itself_and_all_others_lose_a_little() -> None:
    decoder = decoder_of(moe_spec())
    found = {one.dtype: one for one in compare_kv(decoder, TEXT, 8)}
    assert list(found)[:4] == ["bf16", "f32", "int8t", "int8"]
    assert all(len(one.figures.divergences) == len(TEXT.written) for one in found.values())
    assert found["bf16"].figures.divergence == 0
    assert 0 < found["f32"].figures.divergence < found["int8"].figures.divergence < 0.01
    kv = KvSpec.of(decoder.spec, 8, "int8")
    assert found["int8"].token_bytes * 8 == kv.page_bytes
    assert found["int8t"].token_bytes < found["int8"].token_bytes < found["bf16"].token_bytes


def test_parts_are_those_of_the_written_tokens() -> None:
    one = compare_kv(decoder_of(moe_spec()), TEXT, 8)[3]
    first, last = one.part(slice(0, 10)), one.part(slice(-10, None))
    assert np.array_equal(first.score.losses, one.figures.score.losses[:10])
    assert np.array_equal(last.divergences, one.figures.divergences[40:])
    assert len(last.same_top) == len(last.reference.losses) == 10


@pytest.mark.parametrize("spec", [moe_spec(), mla_spec()], ids=["grouped-query", "latent"])
def test_steps_of_a_tensor_are_its_largest_element(spec: ModelSpec) -> None:
    """Over 127, as BF16 holds it, padding and other layers left out."""
    decoder = decoder_of(spec)
    steps = tensor_steps(decoder, TEXT.prompt, 8)
    kv = KvSpec.of(spec, 8, "bf16")
    cache: CpuKvCache = decoder.backend.kv_cache(kv, 3)
    tokens = np.asarray(TEXT.prompt, np.int32)
    positions, pages = np.arange(20, dtype=np.int32), np.arange(3, dtype=np.int32)
    decoder.forward(Batch(tokens, positions, (Sequence(0, 20, 0, pages),), positions[:0]), cache)
    for layer, (keys, values) in enumerate(steps):
        block = np.concatenate([cache.page(i)[layer * kv.layer_bytes :][: kv.layer_bytes] for i in range(3)])
        numbers = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert max(keys, values) == pytest.approx(np.abs(numbers).max() / 127)
        assert 0 < values <= keys or not kv.value_in_key


def test_steps_are_wanted_by_int8t_alone() -> None:
    kv = KvSpec.of(moe_spec(), 8, "int8")
    with pytest.raises(ValueError, match="scales of 0 layers, int8t takes 2"):
        replace(kv, dtype="int8t")
    with pytest.raises(ValueError, match="scales of 1 layers, int8 takes 0"):
        replace(kv, steps=((1.0, 1.0),))


def test_groups_as_large_as_a_head_are_left_out() -> None:
    assert kv_variants(KvSpec(1, 1, 64, 64, 8, "bf16"))[4:] == ["int8g32"]
    assert kv_variants(KvSpec(1, 1, 576, 512, 8, "bf16", True))[4:] == ["int8g128", "int8g64", "int8g32"]
    assert CpuBackend(threads=1).supports("attention", "int8g32")
