"""Virtual time: in a prompt, the next experts are copied while the last ones compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hybrids import one_sequence
from sizes_only import SizesOnlyCpu, SizesOnlyDevice, SizesOnlyStore, glm_45_air, qwen3_30b

from strata.backends.base import KvSpec
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.options import HybridOptions
from strata.device.emulated import EmulatedDevice
from strata.device.timeline import Span, Timeline, busy_seconds, hidden_share, share_under
from strata.hardware.profile_file import load_profile
from strata.memory.transfers import TransferOptions
from strata.model.decoder import Decoder
from strata.plan.figures import device_figures
from strata.plan.spec import ModelSpec
from strata.plan.speeds import speeds_of

MACHINE = load_profile("rtx3090-2x-e5-2680v4")
SPEEDS = speeds_of(MACHINE, {node.index: len(node.cores) for node in MACHINE.nodes}, "partition")
LAYERS = 5
PAGE = 32


def prompt_pass(spec: ModelSpec, rows: int, **changes: Any) -> tuple[Timeline, float, float, HybridBackend]:
    """A second pass over a prompt of `rows` tokens, when the weights are on the device: begin and end."""
    timeline, store = Timeline(), SizesOnlyStore(spec)
    inner = EmulatedDevice(device_figures(MACHINE), timeline=timeline, with_data=False)
    assert spec.experts is not None
    device: Any = SizesOnlyDevice(inner, spec.experts.router.experts)
    cpu = SizesOnlyCpu(threads=1)
    cpu.hidden = spec.hidden
    pages = 2 * rows // PAGE
    asked = {
        "slots": 64,
        "stream_buffers": 32,
        "slot_bytes": store.expert_layout(spec.layers - 1).record_bytes,
        "speeds": SPEEDS,
        "misses": "fetch",
        "rows": rows,
        "logit_rows": 1,
        "blocks": pages,
        "transfers": TransferOptions(staging_bytes=16 << 20),
        "simulated": SPEEDS,
    }
    options = HybridOptions(**{**asked, **changes})
    backend = HybridBackend(device, HostKernels(cpu), cpu, spec, options)
    decoder = Decoder(spec, store, backend)
    cache = backend.kv_cache(KvSpec.of(spec, PAGE, "int8"), pages)
    table = np.arange(pages, dtype=np.int32)
    for start in (0, rows):
        if start:
            device.sync()
            begin = device.now()
        decoder.forward(one_sequence([0] * rows, start, table, False), cache)
    device.sync()
    return timeline, begin, device.now(), backend


def since(timeline: Timeline, lane: str, begin: float) -> list[Span]:
    return timeline.spans(lane, lambda span: span.start >= begin)


@pytest.mark.parametrize("rows", [512, 4096, 16384])
@pytest.mark.parametrize("make", [qwen3_30b, glm_45_air], ids=["Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_a_prompt_streams_its_experts_under_its_compute(make: Any, rows: int) -> None:
    """Bus-bound, balanced, and bound by attention: whichever of the two is shorter is hidden."""
    timeline, begin, end, backend = prompt_pass(make(LAYERS), rows)
    copies = [s for s in since(timeline, "h2d", begin) if s.name.startswith("layer")]
    compute = since(timeline, "compute", begin)
    assert hidden_share(copies, compute) >= 0.9
    for layer in range(LAYERS + 1, 2 * LAYERS - 1):
        crossing = [span for span in copies if span.name == f"layer {layer + 1}"]
        computing = [span for span in compute if span.name == f"layer {layer}"]
        shorter, lane = min((crossing, compute), (computing, copies), key=lambda pair: busy_seconds(pair[0]))
        assert share_under(shorter, lane) >= 0.9, f"layer {layer}"
    longer = max(busy_seconds(copies), busy_seconds(compute))
    assert end - begin <= 1.05 * longer
    moe = sum(backend.spec.is_moe(layer) for layer in range(LAYERS))
    assert backend.flow.metrics.streamed == 2 * moe * 128  # each expert once per layer and pass
    assert backend.cache.statistics.inserts == 0


@pytest.mark.parametrize("make", [qwen3_30b, glm_45_air], ids=["Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_auto_shares_a_prompt_between_bus_and_host(make: Any) -> None:
    """At 512 tokens bus and sockets together are faster than either; at 4,096 the host would only hold up
    attention. Virtual time, sockets as fast as the profile says: 52 ms, 74 (cpu) and 137 (fetch) for five
    layers of Qwen3's shape, 155, 223 and 395 for GLM's."""
    for rows, most in ((512, 0.75), (4096, 1.01)):
        seconds = {}
        for misses in ("cpu", "fetch", "auto"):
            _, begin, end, _ = prompt_pass(make(LAYERS), rows, misses=misses)
            seconds[misses] = end - begin
        assert seconds["auto"] <= most * min(seconds["cpu"], seconds["fetch"]), f"{rows} rows: {seconds}"
