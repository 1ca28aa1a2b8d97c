"""From a ModelSpec and a table of names to the tensors of the store: the same code for every family."""

from __future__ import annotations

from functools import lru_cache

from strata.model.architectures.expert_sources import expert_sources
from strata.model.architectures.lookup import Lookup
from strata.model.architectures.names import Names
from strata.plan.spec import MlaSpec, ModelSpec
from strata.store import names as store
from strata.store.source import SourceRows, TargetExpert, TargetTensor


def build_targets(
    spec: ModelSpec, names: Names, lookup: Lookup, rotated: bool
) -> tuple[list[TargetTensor], list[TargetExpert]]:
    """All targets of a checkpoint. rotated: q and k rows are in the order of interleaved rotation (GGUF)."""
    builder = Builder(spec, names, lookup, rotated)
    builder.matrix(store.EMBED, "embed", spec.vocab, spec.hidden, kind="embed")
    for layer in range(spec.layers):
        builder.layer(layer)
    builder.vector(store.FINAL_NORM, "final_norm.weight", spec.hidden)
    if not spec.tied_head:
        builder.matrix(store.HEAD, "head", spec.vocab, spec.hidden, kind="head")
    return builder.targets, builder.experts


@lru_cache(maxsize=8)
def _halves_of_pairs(heads: int, dim: int) -> tuple[int, ...]:
    """Inverse of llama.cpp's converter, which moves row h * dim + j * dim / 2 + t to h * dim + 2 * t + j."""
    return tuple(h * dim + 2 * t + j for h in range(heads) for j in (0, 1) for t in range(dim // 2))


class Builder:
    """Collects targets; `index` is the layer of the checkpoint that `layer` is at."""

    def __init__(self, spec: ModelSpec, names: Names, lookup: Lookup, rotated: bool) -> None:
        self.spec = spec
        self.names = names
        self.lookup = lookup
        self.rotated = rotated
        self.index = 0
        self.targets: list[TargetTensor] = []
        self.experts: list[TargetExpert] = []

    def source(self, part: str, shape: tuple[int, ...], **block: object) -> SourceRows:
        """Rows of the tensor that holds `part` of the current layer; `part` may end in .weight or .bias."""
        key, dot, suffix = part.rpartition(".")
        if suffix not in ("weight", "bias"):
            key, dot, suffix = part, "", ""
        return self.lookup.take(self.names[key].format(i=self.index) + dot + suffix, shape, **block)

    def add(self, name: str, sources: tuple[SourceRows, ...], shape: tuple[int, ...], kind: str) -> None:
        """One more target."""
        self.targets.append(TargetTensor(name, sources, shape, kind))

    def matrix(self, name: str, part: str, rows: int, cols: int, kind: str = "shared") -> None:
        """A packed matrix that is one whole tensor of the checkpoint."""
        self.add(name, (self.source(part + ".weight", (rows, cols)),), (rows, cols), kind)

    def vector(self, name: str, part: str, *shape: int) -> None:
        """A plain tensor that is one whole tensor of the checkpoint."""
        self.add(name, (self.source(part, shape),), shape, "plain")

    def layer(self, index: int) -> None:
        """Everything of decoder layer `index`."""
        self.index = index
        spec = self.spec
        self.vector(self.part("attn_norm.weight"), "attn_norm.weight", spec.hidden)
        self.vector(self.part("ffn_norm.weight"), "ffn_norm.weight", spec.hidden)
        if spec.attention.mla is None:
            self.grouped_query()
        else:
            self.latent(spec.attention.mla)
        if spec.is_moe(index):
            self.routed()
        else:
            self.gate_up("mlp", "", spec.dense_width)

    def part(self, name: str) -> str:
        """Store name of a part of the current layer."""
        return store.layer(self.index, name)

    def grouped_query(self) -> None:
        """q, k and v in one matrix; output projection; norms, biases and sinks where the model has them."""
        a, hidden = self.spec.attention, self.spec.hidden
        rows = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
        order = {"q": self.unrotated(a.heads), "k": self.unrotated(a.kv_heads), "v": None}
        total = sum(rows.values())
        qkv = tuple(self.source(f"{p}.weight", (rows[p], hidden), row_order=order[p]) for p in "qkv")
        self.add(self.part("attn.qkv.weight"), qkv, (total, hidden), "shared")
        if a.qkv_bias:
            bias = tuple(self.bias(p, rows[p], order[p]) for p in "qkv")
            self.add(self.part("attn.qkv.bias"), bias, (total,), "plain")
        self.matrix(self.part("attn.out.weight"), "out", hidden, a.heads * a.head_dim)
        if a.out_bias:
            self.vector(self.part("attn.out.bias"), "out.bias", hidden)
        if a.qk_norm != "none":
            full = a.qk_norm == "full"
            self.vector(self.part("attn.q_norm.weight"), "q_norm.weight", rows["q"] if full else a.head_dim)
            self.vector(self.part("attn.k_norm.weight"), "k_norm.weight", rows["k"] if full else a.head_dim)
        if a.sinks:
            self.vector(self.part("attn.sinks"), "sinks", a.heads)

    def bias(self, part: str, rows: int, order: tuple[int, ...] | None) -> SourceRows:
        """A bias; to permute it, it is taken as a column, so that row_order applies."""
        if order is None:
            return self.source(f"{part}.bias", (rows,))
        return self.source(f"{part}.bias", (rows,), transposed=True, row_order=order)

    def unrotated(self, heads: int) -> tuple[int, ...] | None:
        """Row order that turns pairs (0, 1), (2, 3), ... of a head into halves; None if they are halves."""
        return _halves_of_pairs(heads, self.spec.attention.head_dim) if self.rotated else None

    def latent(self, mla: MlaSpec) -> None:
        """Multi-head latent attention in its absorbed form."""
        a, hidden = self.spec.attention, self.spec.hidden
        queries = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank:
            self.matrix(self.part("attn.q_a.weight"), "q_a", mla.q_lora_rank, hidden)
            self.vector(self.part("attn.q_a_norm.weight"), "q_a_norm.weight", mla.q_lora_rank)
            self.matrix(self.part("attn.q_b.weight"), "q_b", queries, mla.q_lora_rank)
        else:
            self.matrix(self.part("attn.q.weight"), "q", queries, hidden)
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.matrix(self.part("attn.kv_a.weight"), "kv_a", latent, hidden)
        self.vector(self.part("attn.kv_a_norm.weight"), "kv_a_norm.weight", mla.kv_lora_rank)
        self.absorbed(mla, a.heads)
        self.matrix(self.part("attn.out.weight"), "out", hidden, a.heads * mla.v_head_dim)

    def absorbed(self, mla: MlaSpec, heads: int) -> None:
        """k_b and v_b, cut from kv_b head by head unless the checkpoint (GGUF from 2025 on) has them."""
        nope, value, rank = mla.qk_nope_head_dim, mla.v_head_dim, mla.kv_lora_rank
        if "k_b" in self.names and self.lookup.has(self.names["k_b"].format(i=self.index) + ".weight"):
            k: tuple[SourceRows, ...] = (self.source("k_b.weight", (heads, rank, nope)),)
            v: tuple[SourceRows, ...] = (self.source("v_b.weight", (heads, value, rank)),)
        else:
            shape, step = (heads * (nope + value), rank), nope + value
            starts = range(0, heads * step, step)
            k = tuple(
                self.source("kv_b.weight", shape, start=s, stop=s + nope, transposed=True) for s in starts
            )
            v = tuple(self.source("kv_b.weight", shape, start=s + nope, stop=s + step) for s in starts)
        self.add(self.part("attn.k_b.weight"), k, (heads * rank, nope), "shared")
        self.add(self.part("attn.v_b.weight"), v, (heads * value, rank), "shared")

    def gate_up(self, target: str, prefix: str, width: int) -> None:
        """A gated FFN that every token passes: `target` is mlp or shared_expert, `prefix` "" or "shared."."""
        hidden = self.spec.hidden
        pair = tuple(self.source(f"{prefix}{p}.weight", (width, hidden)) for p in ("gate", "up"))
        name = self.part(f"{target}.gate_up.weight")
        self.targets.append(TargetTensor(name, pair, (2 * width, hidden), "shared", interleave=True))
        self.matrix(self.part(f"{target}.down.weight"), f"{prefix}down", hidden, width)

    def routed(self) -> None:
        """Router, shared expert and routed experts of the current layer."""
        experts, hidden = self.spec.experts, self.spec.hidden
        assert experts is not None
        router = experts.router
        self.vector(self.part("router.weight"), "router.weight", router.experts, hidden)
        if router.logit_bias:
            self.vector(self.part("router.bias"), "router.bias", router.experts)
        if router.select_bias:
            self.vector(self.part("router.select_bias"), "select_bias", router.experts)
        if experts.shared_width:
            self.gate_up("shared_expert", "shared.", experts.shared_width)
        if experts.shared_gate:
            self.vector(self.part("shared_expert.gate.weight"), "shared_gate.weight", 1, hidden)
        self.experts.extend(expert_sources(self.spec, self.names, self.lookup, self.index))
