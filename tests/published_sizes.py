"""The sizes of a published model, for sums without its files."""

from __future__ import annotations

from strata.plan.footprint import Attention, Footprint

# Qwen3-30B-A3B in w4g64 experts and w4g128 attention, by its config.json; sizes to two digits.
QWEN3 = Footprint(
    name="Qwen3-30B-A3B",
    layers=48,
    moe_layers=48,
    hidden=2048,
    vocab=151_936,
    context=40_960,
    static=480_000_000,
    static_macs=920_000_000,
    head=160_000_000,
    head_macs=311_000_000,
    embedding=160_000_000,
    tied=False,
    experts=128,
    top_k=8,
    expert_bytes=2_506_752,
    expert_macs=4_718_592,
    expert_total=128 * 48 * 2_506_752,
    slices=2,
    attention=Attention((0,) * 48, 32 * 256, 1_056),
    kv_dtype="int8",
    page_tokens=32,
    activation_bytes=150_000,
)
