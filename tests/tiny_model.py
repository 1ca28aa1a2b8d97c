"""A random model of any ModelSpec, held in memory: what tests of the decoder and the engine run on.

The bf16 packing here is written from the words of `strata/store/formats.py`, apart from the converter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Activations, Backend
from strata.backends.cpu import CpuBackend
from strata.core import ExpertId
from strata.engine.load import BackendName
from strata.plan.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec, RouterSpec
from strata.store import names
from strata.store.formats import FORMATS, ExpertLayout, PackedShape, PackedTensor, padded
from strata.store.pack import pack
from strata.store.quantize import quantize

BF16 = FORMATS["bf16"]
HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 32, 50, 4, 2, 16
DENSE_WIDTH, EXPERT_WIDTH, SHARED_WIDTH, EXPERTS, TOP_K = 24, 16, 24, 8, 2


def make_backend(name: BackendName, threads: int | None, activations: Activations) -> Backend:
    """A backend without a plan."""
    if name == "cpu":
        return CpuBackend(threads, activations)
    from strata.backends.reference import ReferenceBackend

    return ReferenceBackend(threads=threads or 1)


def moe_spec(layers: int = 2, **changes: object) -> ModelSpec:
    """A small MoE: the first layer dense, the others routed."""
    attention = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, RopeSpec("default", 1e4, HEAD_DIM))
    spec = ModelSpec(
        architecture="tiny",
        name="tiny",
        layers=layers,
        hidden=HIDDEN,
        vocab=VOCAB,
        context=4096,
        norm_eps=1e-5,
        attention=attention,
        dense_width=DENSE_WIDTH,
        moe_layers=tuple(index > 0 for index in range(layers)),
        experts=ExpertSpec(RouterSpec(EXPERTS, TOP_K), EXPERT_WIDTH),
    )
    return replace(spec, **changes)


def gpt_oss_spec() -> ModelSpec:
    """Biases everywhere, sinks, alternating sliding windows, clamped SwiGLU, router bias."""
    spec = moe_spec(3, activation="swiglu_clamped")
    attention = replace(
        spec.attention, qkv_bias=True, out_bias=True, sinks=True, sliding_window=(5, 0, 5), qk_norm="head"
    )
    router = RouterSpec(EXPERTS, TOP_K, score="softmax_topk", normalize=False, logit_bias=True)
    return replace(spec, attention=attention, experts=ExpertSpec(router, EXPERT_WIDTH, biases=True))


def mla_spec(q_lora_rank: int = 12) -> ModelSpec:
    """DeepSeek V3 in small: MLA, grouped sigmoid routing with a correction bias, a shared expert."""
    spec = moe_spec()
    mla = MlaSpec(q_lora_rank, 20, 16, 8, 12)
    rope = RopeSpec("default", 1e4, 8, interleaved=True)
    attention = replace(spec.attention, kv_heads=HEADS, head_dim=24, scale=24**-0.5, rope=rope, mla=mla)
    router = RouterSpec(EXPERTS, TOP_K, "sigmoid", True, 1e-20, 2.5, select_bias=True)
    router = replace(router, groups=4, top_groups=2, group_score="top2")
    experts = ExpertSpec(router, EXPERT_WIDTH, shared_width=SHARED_WIDTH, shared_gate=True)
    return replace(spec, attention=attention, experts=experts)


def pack_bf16(matrix: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values of `[rows, cols]` in the packed layout; they must be bf16 numbers already."""
    shape = PackedShape(BF16, *matrix.shape)
    full = np.zeros((shape.padded_rows, shape.padded_cols), np.float32)
    full[: matrix.shape[0], : matrix.shape[1]] = matrix
    words = (full.view(np.uint32) >> 16).astype(np.uint16)
    chunks = words.reshape(shape.blocks, 16, -1, 32, 2).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(chunks).reshape(-1).view(np.uint8)


def as_bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Truncated to bf16, so that packing loses nothing."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


class TinyStore:
    """A WeightStore: every tensor is made up, from its name, when it is asked for.

    Formats other than bf16 are quantized and packed by the store's own code.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0, fmt: str = "bf16") -> None:
        self.spec = spec
        self.seed = seed
        self.format = FORMATS[fmt]
        self.packed: dict[str, PackedTensor] = {}
        self.records: dict[ExpertId, NDArray[np.uint8]] = {}
        self.experts_read: list[ExpertId] = []

    def has(self, name: str) -> bool:
        return name in self._shapes()

    def tensor(self, name: str) -> PackedTensor:
        return self._packed(name, *self._shapes()[name])

    def plain(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes()[name]
        noise = self.matrix(name, (1, int(np.prod(shape)))).reshape(shape)
        return noise + 1 if "norm" in name else noise

    def expert_layout(self, layer: int) -> ExpertLayout:
        assert self.spec.experts is not None
        experts = self.spec.experts
        return ExpertLayout(self.format, self.format, self.spec.hidden, experts.width, 1, experts.biases)

    def expert(self, expert: ExpertId) -> NDArray[np.uint8]:
        self.experts_read.append(expert)
        if expert not in self.records:
            self.records[expert] = self._record(expert)
        return self.records[expert]

    def _record(self, expert: ExpertId) -> NDArray[np.uint8]:
        layout = self.expert_layout(expert.layer)
        record = np.zeros(layout.record_bytes, np.uint8)
        for part, offset, shape in (
            ("gate_up", layout.gate_up_offset(0), layout.gate_up),
            ("down", layout.down_offset(0), layout.down),
        ):
            record[offset : offset + shape.nbytes] = self._packed(
                f"{expert}.{part}", shape.rows, shape.cols
            ).data
        if layout.biases:
            for part, offset, length in (
                ("gate_up_bias", layout.gate_up_bias_offset, layout.gate_up.rows),
                ("down_bias", layout.down_bias_offset, layout.hidden),
            ):
                bias = self.matrix(f"{expert}.{part}", (1, length))
                record[offset : offset + 4 * length] = bias.reshape(-1).view(np.uint8)
        return record

    def matrix(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Random bf16 numbers that depend on seed and name only."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        return as_bf16(rng.standard_normal(shape) * 0.3)

    def _packed(self, name: str, rows: int, cols: int) -> PackedTensor:
        if name not in self.packed:
            matrix, shape = self.matrix(name, (rows, cols)), PackedShape(self.format, rows, cols)
            exact = self.format is BF16
            data = pack_bf16(matrix) if exact else pack(shape, quantize(matrix, self.format, name))
            self.packed[name] = PackedTensor(name, shape, data)
        return self.packed[name]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        spec = self.spec
        shapes: dict[str, tuple[int, ...]] = {
            names.EMBED: (spec.vocab, spec.hidden),
            names.FINAL_NORM: (spec.hidden,),
        }
        if not spec.tied_head:
            shapes[names.HEAD] = (spec.vocab, spec.hidden)
        if spec.further:
            shapes |= dict.fromkeys((names.EMBED_NORM, names.HIDDEN_NORM), (spec.hidden,))
            shapes |= dict.fromkeys((names.JOIN_EMBED, names.JOIN_HIDDEN), (spec.hidden, spec.hidden))
        for index in range(spec.layers):
            parts = {**self._attention_shapes(), **self._ffn_shapes(index)}
            parts["attn_norm.weight"] = parts["ffn_norm.weight"] = (spec.hidden,)
            shapes.update({names.layer(index, part): shape for part, shape in parts.items()})
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        a, mla, hidden = self.spec.attention, self.spec.attention.mla, self.spec.hidden
        if mla is not None:
            q_rows = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
            return {
                "attn.q.weight": (q_rows, hidden),
                "attn.q_a.weight": (mla.q_lora_rank, hidden),
                "attn.q_a_norm.weight": (mla.q_lora_rank,),
                "attn.q_b.weight": (q_rows, mla.q_lora_rank),
                "attn.kv_a.weight": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
                "attn.kv_a_norm.weight": (mla.kv_lora_rank,),
                "attn.k_b.weight": (a.heads * mla.kv_lora_rank, mla.qk_nope_head_dim),
                "attn.v_b.weight": (a.heads * mla.v_head_dim, mla.kv_lora_rank),
                "attn.out.weight": (hidden, a.heads * mla.v_head_dim),
            }
        rows = (a.heads + 2 * a.kv_heads) * a.head_dim
        q_norm, k_norm = (a.head_dim * (n if a.qk_norm == "full" else 1) for n in (a.heads, a.kv_heads))
        return {
            "attn.qkv.weight": (rows, hidden),
            "attn.qkv.bias": (rows,),
            "attn.q_norm.weight": (q_norm,),
            "attn.k_norm.weight": (k_norm,),
            "attn.sinks": (a.heads,),
            "attn.out.weight": (hidden, a.heads * a.head_dim),
            "attn.out.bias": (hidden,),
        }

    def _ffn_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        spec, hidden = self.spec, self.spec.hidden
        if not spec.is_moe(index) or spec.experts is None:
            width = spec.dense_width
            return {"mlp.gate_up.weight": (2 * padded(width, 8), hidden), "mlp.down.weight": (hidden, width)}
        router, width = spec.experts.router, spec.experts.shared_width
        return {
            "router.weight": (router.experts, hidden),
            "router.bias": (router.experts,),
            "router.select_bias": (router.experts,),
            "shared_expert.gate_up.weight": (2 * padded(width, 8), hidden),
            "shared_expert.down.weight": (hidden, width),
            "shared_expert.gate.weight": (1, hidden),
        }
