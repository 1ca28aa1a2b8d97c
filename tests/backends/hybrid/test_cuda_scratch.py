"""The plan's part for scratch against what launches of the CUDA kernels take, without computing any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hybrids import FIGURES, make_hybrid, tokens
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.device.counting import CountingDevice
from strata.engine.dry_launch import MadeUpRoutes, NoLoader
from strata.plan.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec, RouterSpec

ROPE = RopeSpec("default", 1e4, 64)
GROUPED = AttentionSpec(16, 2, 64, 0.125, ROPE)
WIDE = AttentionSpec(20, 20, 128, 0.1, ROPE, qk_norm="full")
EVERY = ExpertSpec(RouterSpec(16, 16), 128, shared_width=64, shared_gate=True)
FEW = ExpertSpec(RouterSpec(64, 2), 256, shared_width=2048)
LATENT = replace(mla_spec().attention, rope=replace(ROPE, interleaved=True), mla=MlaSpec(16, 512, 16, 64, 16))
SPECS = {
    "all experts of a layer for each token": moe_spec(2, hidden=64, attention=GROUPED, experts=EVERY),
    "a shared expert wider than the chosen": moe_spec(2, hidden=64, attention=GROUPED, experts=FEW),
    "attention wider than all else": moe_spec(2, hidden=64, attention=WIDE, vocab=200),
    "dense": moe_spec(2, hidden=64, attention=GROUPED, experts=None, moe_layers=(), dense_width=1024),
    "gpt-oss": replace(
        gpt_oss_spec(), hidden=64, attention=replace(gpt_oss_spec().attention, head_dim=64, rope=ROPE)
    ),
    "latent": replace(mla_spec(), hidden=64, attention=replace(LATENT, heads=16)),
}


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=1, activations="f32")


def peak(cpu: CpuBackend, spec: ModelSpec, rows: int, before: int) -> tuple[int, int]:
    """Bytes of the workspace that two passes of `rows` tokens take, and that there are."""
    device: Any = CountingDevice(replace(FIGURES, memory_bytes=1 << 40), MadeUpRoutes(spec))
    pages = -(-(before + 3 * rows) // 32)
    hybrid = make_hybrid(
        cpu,
        TinyStore(spec),
        spec,
        device=device,
        kernels=CudaKernels(NoLoader(), PrefillChoice(rows=17)),
        kv_dtype="int8",
        pages=pages,
        page_tokens=32,
        policy="lru",
        rows=rows,
        logit_rows=1,
        blocks=2 * pages,
        slots=2 * (spec.experts.router.experts if spec.experts else 1),
    )
    hybrid.done = before
    for _ in range(2):
        hybrid.feed(tokens(rows, vocab=spec.vocab), logits=False)
    level = hybrid.backend.memory.workspace.level()
    return level.peak, level.total


# At long contexts with few rows attention's splits take the most, with many rows its first one does.
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 8000), (33, 500), (500, 1000)])
@pytest.mark.parametrize("name", SPECS)
def test_the_workspace_holds_the_scratch(cpu: CpuBackend, name: str, rows: int, before: int) -> None:
    used, planned = peak(cpu, SPECS[name], rows, before)
    assert used <= planned, "or the pass would have failed"
    assert rows < 500 or used > 0.5 * planned, "room that nothing takes is lost to experts"
