"""The CPU backend's fused ops give the bits of the elementary ops that they are made of."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import KvSpec
from strata.backends.composed import ComposedOps
from strata.backends.cpu import CpuBackend
from strata.backends.isa import NAMES, extension
from strata.core import Batch, Sequence
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec

ISAS = [name for name in NAMES if extension().features()[name]]
PAGE, PAGES = 8, 12
MOE, MLA = moe_spec(3), mla_spec()
SPECS = {
    "moe": MOE,
    "gpt_oss": gpt_oss_spec(),
    "mla": MLA,
    "mla without q lora, without gate": replace(
        mla_spec(q_lora_rank=0), experts=replace(MLA.experts, shared_gate=False)
    ),
    "granite": replace(MOE, embedding_scale=12.0, residual_scale=0.22, logit_scale=0.1),
    "olmoe": replace(MOE, attention=replace(MOE.attention, qk_norm="full", clip_qkv=0.5)),
    "partial rotary": replace(
        MOE, attention=replace(MOE.attention, rope=replace(MOE.attention.rope, rotary_dim=8))
    ),
    "dense": replace(MOE, moe_layers=(), experts=None),
}


class Composed(CpuBackend):
    """Every decoder op as a sequence of elementary ones."""

    run_layers = ComposedOps.run_layers  # type: ignore[assignment]
    attend = ComposedOps.attend  # type: ignore[assignment]
    feed_forward = ComposedOps.feed_forward  # type: ignore[assignment]
    choose_experts = ComposedOps.choose_experts  # type: ignore[assignment]
    apply_experts = ComposedOps.apply_experts  # type: ignore[assignment]
    logits = ComposedOps.logits  # type: ignore[assignment]


def batches() -> list[Batch]:
    """Two requests: a prompt, the other's beside it, then decoding together; one step without logits."""
    first, second = np.array([3, 0, 7], np.int32), np.array([5, 1, 2], np.int32)
    return [
        make_batch([(11, 0, first)], wanted=[10]),
        make_batch([(1, 11, first), (6, 0, second)], wanted=[0]),
        make_batch([(1, 12, first), (1, 6, second)], wanted=[1, 0]),
        make_batch([(3, 7, second)], wanted=[]),
        make_batch([(1, 13, first)], wanted=[0]),
    ]


def make_batch(parts: list[tuple[int, int, np.ndarray]], wanted: list[int]) -> Batch:
    """parts: (count, start, pages) of each sequence."""
    sequences, positions = [], []
    for count, start, pages in parts:
        sequences.append(Sequence(len(positions), count, start, pages))
        positions += range(start, start + count)
    rng = np.random.default_rng(len(positions))
    ids = rng.integers(50, size=len(positions)).astype(np.int32)
    return Batch(ids, np.array(positions, np.int32), tuple(sequences), np.array(wanted, np.int32))


def run(backend: CpuBackend, spec: ModelSpec, kv_dtype: str, fmt: str) -> list[np.ndarray]:
    """Logits and routes of every batch."""
    decoder = Decoder(spec, TinyStore(spec, fmt=fmt), backend)
    cache = backend.kv_cache(KvSpec.of(spec, PAGE, kv_dtype), PAGES)  # type: ignore[arg-type]
    found = []
    for batch in batches():
        logits = decoder.forward(batch, cache)
        found += [] if logits is None else [logits.copy()]
        assert decoder.routes.used == {i: len(np.unique(ids)) for i, ids in decoder.routes.ids.items()}
        found += [ids.copy() for ids in decoder.routes.ids.values()]
    return found


def small(backend: CpuBackend) -> tuple[Decoder, Any]:
    """A decoder and its cache."""
    return Decoder(MOE, TinyStore(MOE), backend), backend.kv_cache(KvSpec.of(MOE, PAGE, "f32"), PAGES)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("activations", "fmt", "kv_dtype"), [("int8", "w4g64", "int8"), ("f32", "bf16", "f32")]
)
def test_fused_equals_composed(name: str, activations: str, fmt: str, kv_dtype: str) -> None:
    fused = CpuBackend(threads=2, activations=activations)  # type: ignore[arg-type]
    composed = Composed(threads=2, activations=activations)  # type: ignore[arg-type]
    ours, theirs = (run(backend, SPECS[name], kv_dtype, fmt) for backend in (fused, composed))
    assert len(ours) == len(theirs) >= 4
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["moe", "mla"])
def test_neither_threads_nor_instruction_set_change_a_bit(name: str, isa: str) -> None:
    wanted = run(CpuBackend(threads=1, isa_name="avx2"), SPECS[name], "int8", "w4g64")
    for threads in (1, 2):
        found = run(CpuBackend(threads=threads, isa_name=isa), SPECS[name], "int8", "w4g64")
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_was_made_of_a_model_goes_with_it() -> None:
    backend = CpuBackend(threads=1)
    for _ in range(2):
        run(backend, MOE, "f32", "bf16")
    gc.collect()
    assert backend._handles._made == {}


def test_scratch_is_reused_and_never_pulled_from_under_its_user() -> None:
    """Logits of one step are overwritten by the next of the same shape; another shape leaves them alone."""
    backend = CpuBackend(threads=1)
    decoder, cache = small(backend)
    pages = np.array([0, 1], np.int32)
    one = decoder.forward(make_batch([(1, 0, pages)], [0]), cache)
    again = decoder.forward(make_batch([(1, 1, pages)], [0]), cache)
    assert again is one
    kept = one.copy()
    two = decoder.forward(make_batch([(2, 2, pages)], [0, 1]), cache)
    assert two.shape == (2, MOE.vocab) and np.array_equal(one, kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2}, "layer is 2, expected 2"),
        ({"kv_heads": 1}, "KV heads is 1, expected 2"),
        ({"key_dim": 8}, "key_dim is 8, expected 16"),
        ({"value_dim": 8}, "value_dim is 8, expected 16"),
        ({"value_in_key": True}, "value_in_key is 1, expected 0"),
    ],
    ids=str,
)
def test_a_foreign_cache_is_refused(changes: dict[str, int], message: str) -> None:
    backend = CpuBackend(threads=1)
    cache = backend.kv_cache(replace(KvSpec.of(MOE, PAGE, "f32"), **changes), PAGES)
    with pytest.raises(ValueError, match=message):
        small(backend)[0].forward(make_batch([(1, 0, np.array([0], np.int32))], [0]), cache)


def test_rows_that_are_not_there_are_refused() -> None:
    backend = CpuBackend(threads=1)
    decoder, cache = small(backend)
    for row in (-1, 3):
        with pytest.raises(ValueError, match="logits: a row is"):
            decoder.forward(make_batch([(3, 0, np.array([0], np.int32))], [row]), cache)


def test_a_residual_of_another_size_is_refused() -> None:
    backend = CpuBackend(threads=1)
    decoder, cache = small(backend)
    batch = make_batch([(3, 0, np.array([0], np.int32))], [0])
    for shape in ((2, MOE.hidden), (3, MOE.hidden - 1)):
        with pytest.raises(ValueError, match="size of the residual is"):
            backend.attend(np.zeros(shape, np.float32), decoder.layers[0].attention, cache, batch)
