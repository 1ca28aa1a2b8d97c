"""The decoder on made-up weights: what a pass computes, reads and refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import KvSpec
from strata.core import Batch, ExpertId, Sequence
from strata.errors import StoreError, UnsupportedError
from strata.model.decoder import Decoder
from strata.plan.spec import ExpertSpec, ModelSpec, RouterSpec
from strata.store import names
from strata.store.formats import PackedShape, PackedTensor

torch = pytest.importorskip("torch")
from strata.backends.reference import ReferenceBackend  # noqa: E402

SPECS = {
    "moe": moe_spec(),
    "gpt_oss": gpt_oss_spec(),
    "mla": mla_spec(),
    "mla without q lora": mla_spec(q_lora_rank=0),
    "tied": moe_spec(tied_head=True),
}
TOKENS = [7, 1, 49, 0, 7, 7, 23, 11, 2, 30, 5]


def whole_batch(tokens: list[int], wanted: list[int] | None = None) -> Batch:
    """One sequence from position 0, on pages 2, 0, 1 of 8 tokens."""
    count = len(tokens)
    return Batch(
        np.array(tokens, np.int32),
        np.arange(count, dtype=np.int32),
        (Sequence(0, count, 0, np.array([2, 0, 1], np.int32)),),
        np.array(range(count) if wanted is None else wanted, np.int32),
    )


def logits_of(spec: ModelSpec, store: TinyStore | None = None, tokens: list[int] = TOKENS) -> np.ndarray:
    backend = ReferenceBackend(torch.float64)
    cache = backend.kv_cache(KvSpec.of(spec, 8, "f32"), 3)
    decoder = Decoder(spec, store or TinyStore(spec), backend)
    return backend.to_numpy(decoder.forward(whole_batch(tokens), cache))


@pytest.mark.parametrize("name", SPECS)
def test_a_token_at_a_time_equals_all_at_once(name: str) -> None:
    """Also: a batch of one token is nothing special."""
    spec = SPECS[name]
    backend = ReferenceBackend()
    decoder, kv = Decoder(spec, TinyStore(spec), backend), KvSpec.of(spec, 8, "f32")
    whole = backend.to_numpy(decoder.forward(whole_batch(TOKENS), backend.kv_cache(kv, 3)))
    cache, pages = backend.kv_cache(kv, 3), np.array([2, 0, 1], np.int32)
    for position, token in enumerate(TOKENS):
        one = [np.array([value], np.int32) for value in (token, position, 0)]
        logits = decoder.forward(Batch(one[0], one[1], (Sequence(0, 1, position, pages),), one[2]), cache)
        assert (backend.to_numpy(logits)[0] == whole[position]).all()


@pytest.mark.parametrize("name", SPECS)
def test_later_tokens_never_change_earlier_logits(name: str) -> None:
    first = logits_of(SPECS[name])
    changed = logits_of(SPECS[name], tokens=[*TOKENS[:-1], 9])
    assert (first[:-1] == changed[:-1]).all() and (first[-1] != changed[-1]).any()


def test_only_wanted_rows_get_logits() -> None:
    spec = moe_spec()
    backend = ReferenceBackend()
    decoder, kv = Decoder(spec, TinyStore(spec), backend), KvSpec.of(spec, 8, "f32")
    whole = decoder.forward(whole_batch(TOKENS), backend.kv_cache(kv, 3))
    some = decoder.forward(whole_batch(TOKENS, [9, 2]), backend.kv_cache(kv, 3))
    assert torch.equal(some, whole[[9, 2]])
    assert decoder.forward(whole_batch(TOKENS, []), backend.kv_cache(kv, 3)) is None


def test_multipliers_of_granite() -> None:
    """A model with multipliers equals one without whose weights were multiplied beforehand."""
    plain = moe_spec(1, moe_layers=(), experts=None)
    scaled = replace(plain, embedding_scale=4.0, residual_scale=0.25, logit_scale=0.5)

    class Multiplied(TinyStore):
        def matrix(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
            factors = {names.EMBED: 4.0, "attn.out.weight": 0.25, "mlp.down.weight": 0.25, names.HEAD: 0.5}
            part = name.removeprefix("layers.0.")
            return super().matrix(name, shape) * np.float32(factors.get(part, 1.0))

    ours = logits_of(scaled, TinyStore(scaled))
    np.testing.assert_allclose(ours, logits_of(plain, Multiplied(plain)), rtol=1e-5, atol=1e-5)


def test_shared_expert_and_its_gate_count() -> None:
    spec = mla_spec()
    assert spec.experts is not None
    variants = [
        logits_of(replace(spec, experts=replace(spec.experts, **changes)))
        for changes in ({}, {"shared_gate": False}, {"shared_width": 0, "shared_gate": False})
    ]
    assert (variants[0] != variants[1]).any() and (variants[1] != variants[2]).any()


def test_experts_that_receive_no_token_are_not_read() -> None:
    spec = moe_spec(experts=ExpertSpec(RouterSpec(8, 1), 16))
    store = TinyStore(spec)
    backend = ReferenceBackend()
    decoder = Decoder(spec, store, backend)
    assert store.experts_read == [], "experts are read when first needed, not at the start"
    decoder.forward(whole_batch([5]), backend.kv_cache(KvSpec.of(spec, 8, "f32"), 3))
    routed = decoder.routes.ids[1]
    assert routed.shape == (1, 1) and decoder.routes.used == {1: 1}
    assert store.experts_read == [ExpertId(1, int(routed[0, 0]))]


def test_bytes_that_every_step_reads() -> None:
    for tied in (False, True):
        spec = moe_spec(1, moe_layers=(), experts=None, tied_head=tied)
        packed = [
            (50, 32),
            (128, 32),
            (32, 64),
            (48, 32),
            (32, 24),
        ]  # head or embedding, qkv, out, gate_up, down
        shapes = [PackedShape(TinyStore(spec).tensor(names.EMBED).shape.format, *shape) for shape in packed]
        norms = 3 * 32 * 4
        decoder = Decoder(spec, TinyStore(spec), ReferenceBackend())
        assert decoder.shared_bytes == sum(shape.nbytes for shape in shapes) + norms


class WrongShape(TinyStore):
    """A store in which one tensor has lost its last row."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        super().__init__(spec)
        self.name = name

    def tensor(self, name: str) -> PackedTensor:
        tensor = super().tensor(name)
        if name != self.name:
            return tensor
        return PackedTensor(name, replace(tensor.shape, rows=tensor.shape.rows - 1), tensor.data)

    def plain(self, name: str) -> np.ndarray:
        return super().plain(name)[: -1 if name == self.name else None]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (names.EMBED, r"embed\.weight is \[49, 32\] in the store, the spec asks for \[50, 32\]"),
        ("layers.1.attn.qkv.weight", r"layers\.1\.attn\.qkv\.weight is \[127, 32\]"),
        ("layers.0.ffn_norm.weight", r"layers\.0\.ffn_norm\.weight is \[31\] .* \[32\]"),
        ("layers.1.router.weight", r"router\.weight is \[7, 32\] .* \[8, 32\]"),
    ],
)
def test_a_store_that_is_not_the_specs_is_refused(name: str, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        Decoder(moe_spec(), WrongShape(moe_spec(), name), ReferenceBackend())


def test_experts_of_another_width_are_refused() -> None:
    spec = moe_spec()
    assert spec.experts is not None
    other = replace(spec, experts=replace(spec.experts, width=24))
    with pytest.raises(StoreError, match="experts of layer 1"):
        Decoder(spec, _Mixed(spec, other), ReferenceBackend())


class _Mixed(TinyStore):
    """Tensors of one spec, expert records of another."""

    def __init__(self, spec: ModelSpec, other: ModelSpec) -> None:
        super().__init__(spec)
        self.expert_layout = TinyStore(other).expert_layout  # type: ignore[method-assign]


def test_mlp_biases_are_refused() -> None:
    spec = moe_spec(mlp_bias=True)
    with pytest.raises(UnsupportedError, match="mlp_bias"):
        Decoder(spec, TinyStore(spec), ReferenceBackend())
